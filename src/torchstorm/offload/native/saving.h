// What a settled step does with a tensor that autograd saves, as `Settled` and `Saver` do it.

#pragma once

#include "keeping.h"

namespace {

// As `parcels.is_made_by`.
bool is_made_by(PyObject *call, const Moment &one) {
    if (!equal(see(call, call_number), one.maker)) return false;
    PyObject *name = see(see(call, call_operator), operation_name);
    if (equal(name, one.name)) return true;
    const char *text = PyUnicode_AsUTF8(name);
    if (text == nullptr) throw Failed();
    return strncmp(text, "torch.", 6) == 0;
}

// As `Repeats.returned`: the bytes of what a call has returned in this step, or of a view of the same; nullptr for any
// other. Borrowed.
PyObject *returned(const Way *way, const Moment &one, const at::Tensor &tensor) {
    Own records(get(way->repeats, s__records));
    PyObject *record = find(records.at, one.maker);
    PyObject *value = record == nullptr ? Py_None : see(record, record_value);
    if (value == Py_None) return nullptr;
    PyObject *root = referent(see(value, value_root)), *call = see(value, value_call);
    if (root == nullptr || call == Py_None) return nullptr;
    if (!root_of(tensor).is_same(THPVariable_Unpack(root))) return nullptr;
    if (version_of(tensor) != see_int(value, value_version) || !is_at(see(value, value_watch), tensor)) return nullptr;
    return is_made_by(call, one) ? value : nullptr;
}

// A parcel is the newest one.
void put_last(const Way *way, PyObject *parcel) {
    const int64_t order = see_int(way->residency, residency__order);
    put_int(way->residency, residency__order, order + 1);
    put_int(parcel, parcel_order, order);
}

// As `parcels.Parcel`, the newest one; its caller says where it is. `recomputed`: whether its bytes were let go.
PyObject *new_parcel(const Way *way, const Moment &one, int64_t nbytes, PyObject *recomputed) {
    Own parcel(allocate(of.parcel));
    put_last(way, parcel.at);
    put_int(parcel.at, parcel_nbytes, nbytes);
    put_int(parcel.at, parcel_filled, 0);
    put_int(parcel.at, parcel_num_joined, 0);
    put(parcel.at, parcel_members, PySet_New(nullptr));
    put_shared(parcel.at, parcel_block, one.left_block);
    put_shared(parcel.at, parcel_recomputed, recomputed);
    for (const Py_ssize_t place : {parcel_movable, parcel_sealed}) put_shared(parcel.at, place, Py_True);
    for (const Py_ssize_t place : {parcel_shared, parcel_used}) put_shared(parcel.at, place, Py_False);
    for (const Py_ssize_t place : {parcel_buffer, parcel_hold, parcel_tier, parcel_handle, parcel_back})
        put_shared(parcel.at, place, Py_None);
    return parcel.give();
}

// As `parcels.Saved`, alone in its parcel; its caller says what it is, and where.
PyObject *new_saved(PyObject *parcel) {
    Own saved(allocate(of.saved));
    put_shared(saved.at, saved_parcel, parcel);
    put_shared(saved.at, saved_nbytes, see(parcel, parcel_nbytes));
    put(saved.at, saved_kept, PyDict_New());
    put_shared(saved.at, saved_stale, Py_False);
    for (const Py_ssize_t place : {saved_offset, saved_live, saved_base_version}) put_int(saved.at, place, 0);
    for (const Py_ssize_t place : {saved_counter, saved_base, saved_origin, saved_root, saved_fingerprint, saved_lost})
        put_shared(saved.at, place, Py_None);
    return saved.give();
}

// Where in its step a storage was saved that is alone in its parcel, and what it is; takes `watch` over.
void put_saved(
    const Way *way, const Moment &one, PyObject *saved, const at::Tensor &tensor, PyObject *value, PyObject *address, PyObject *watch,
    int64_t ordinal) {
    put(saved, saved_watch, watch);
    PyObject *parcel = see(saved, saved_parcel);
    put_shared(parcel, parcel_number, one.parcel);
    checked(PyDict_SetItem(see(way->progress, running_numbered), one.parcel, parcel));
    put_int(saved, saved_ordinal, ordinal);
    put_shared(saved, saved_address, address);
    put(saved, saved_pointer, PyLong_FromVoidPtr(tensor.storage().mutable_data()));
    put_shared(saved, saved_block, one.left_block);
    put_shared(saved, saved_value, value);
    if (value != Py_None) put_shared(value, value_saved, saved);
    checked(PySet_Add(see(parcel, parcel_members), saved));
    Own at(saved_at(way));
    append_at(at.at, address, saved);
}

// As `Saver.save_made`.
PyObject *save_made(const Way *way, const Moment &one, PyObject *value, const at::Tensor &tensor) {
    PyObject *before = see(value, value_saved_before), *watch = see(value, value_watch);
    Own saved, parcel, absent(take(way->residency, residency_absent));
    if (before == Py_None || !equal(see(before, saved_nbytes), see(value, value_nbytes))) {
        parcel.at = new_parcel(way, one, see_int(value, value_nbytes), Py_True);
        saved.at = new_saved(parcel.at);
        put_shared(value, value_saved_before, saved.at);
    } else {  // gone from everywhere, since nothing is left of the step that it belonged to
        saved.at = Py_NewRef(before);
        parcel.at = take(before, saved_parcel);
        put_last(way, parcel.at);
        put_shared(parcel.at, parcel_used, Py_False);
        put_shared(parcel.at, parcel_recomputed, Py_True);
        put_shared(saved.at, saved_stale, Py_False);
        for (const Py_ssize_t place : {saved_counter, saved_lost, saved_fingerprint}) put_shared(saved.at, place, Py_None);
    }
    checked(PySet_Add(absent.at, parcel.at));
    put_shared(saved.at, saved_version, see(value, value_version));
    put_shared(saved.at, saved_origin, see(value, value_root));
    put_saved(way, one, saved.at, tensor, value, see(watch, weak_cdata), Py_NewRef(watch), one.made_ordinal);
    return saved.give();
}

// Whether a tensor is a result of the call that runs, which autograd saves before it is returned, and that call the one
// that the plan has make it: where `Tape.value_to_save` asks for the place among the results.
bool is_being_made(const Way *way, const Moment &one, PyObject *unfinished, const at::Tensor &tensor) {
    if (!is_in_a_function(unfinished, static_cast<int64_t>(tensor.storage().nbytes()))) return false;
    if (PyTuple_GET_ITEM(unfinished, 3) == Py_None) return false;
    if (!is_of_numbers(tensor) || !is_made_by(PyTuple_GET_ITEM(unfinished, 0), one)) return false;
    PyObject *arguments = PyTuple_GET_ITEM(unfinished, 1);
    if (!PyTuple_CheckExact(arguments) || is_among(tensor, arguments) != no) return false;
    Own known(get(way->tape, s_known)), address(address_of(tensor));
    return !is_as_known(find(known.at, address.at), tensor);
}

PyObject *new_placeholder(const Way *way, PyObject *saved, PyObject *view) {  // takes the view over
    Own placeholder(allocate(of.placeholder));
    put_int(saved, saved_live, see_int(saved, saved_live) + 1);
    put_shared(placeholder.at, placeholder__owner, way->owner);
    put(placeholder.at, placeholder_view, view);
    put_shared(placeholder.at, placeholder_saved, saved);
    return placeholder.give();
}

// As `Settled._pack_made`, and as `Settled._pack_away` for a result of the call that runs; nullptr without an error where
// that is not what is saved.
PyObject *pack_made(Way *way, PyObject *settled, PyObject *object, const at::Tensor &tensor, int64_t moment) {
    const Moment &one = moment_of(way, moment);
    Own value(Py_XNewRef(returned(way, one, tensor))), unfinished;
    if (!value) {
        unfinished.at = get(way->tape, s_unfinished);
        if (!is_being_made(way, one, unfinished.at, tensor)) return nullptr;
    }
    const Locked locked(way->lock, true);
    if (!is_current(way, settled) || see_int(way->progress, running_moment) + 1 != moment) return nullptr;
    const int64_t nbytes = value ? see_int(value.at, value_nbytes) : static_cast<int64_t>(tensor.storage().nbytes());
    if (!fits(way, nbytes, one.made_bytes)) return nullptr;
    Own saved(Py_NewRef(value ? see(value.at, value_saved) : Py_None));
    const int64_t num_saved = see_int(way->progress, running_num_saved);
    const bool is_new = saved.at == Py_None;
    if ((is_new ? num_saved : see_int(saved.at, saved_ordinal)) != one.made_ordinal) return nullptr;
    if (unfinished && !(value.at = name_made(way, unfinished.at, tensor))) return nullptr;
    begin(way, settled, one, moment);
    if (is_new) {
        Own made(save_made(way, one, value.at, tensor));
        std::swap(saved.at, made.at);
        if (unfinished) put(saved.at, saved_counter, counter_of(tensor));
        put_int(way->progress, running_num_saved, num_saved + 1);
    }
    put_int(way->progress, running_moment, moment);
    PyObject *view = see(value.at, value_view);
    const bool is_whole = view != Py_None && !tensor.is_view() && !unfinished;
    Own placeholder(new_placeholder(way, saved.at, is_whole ? Py_NewRef(view) : view_of(object, tensor)));
    finish(way, settled, one, moment);
    return placeholder.give();
}

PyObject *pack_away(Way *way, PyObject *settled, PyObject *object, const at::Tensor &tensor, PyObject *address, int64_t moment);

// As `Settled._pack_away`, for what moves, or has left and is saved once more; nullptr without an error where that must be
// called.
PyObject *pack_leaving(Way *way, PyObject *settled, PyObject *object, const at::Tensor &tensor, PyObject *address, int64_t moment) {
    const Moment &one = moment_of(way, moment);
    if (!fits(way, static_cast<int64_t>(tensor.storage().nbytes()), one.nbytes)) return nullptr;
    Own by_address(take(way->kept, kept_tensors_by_address)), at(saved_at(way));
    PyObject *group = find(at.at, address);
    if (group == nullptr) return pack_away(way, settled, object, tensor, address, moment);
    if (find(by_address.at, address) != nullptr || staying_at(way, tensor) != nullptr) return nullptr;
    Own saved(Py_NewRef(PyList_GET_ITEM(group, 0)));
    PyObject *root = see(saved.at, saved_root), *parcel = see(saved.at, saved_parcel);
    if (see_int(saved.at, saved_ordinal) != one.ordinal || see_int(saved.at, saved_version) != version_of(tensor)) return nullptr;
    if (root == Py_None || !equal(see(saved.at, saved_address), address)) return nullptr;
    PyObject *whole = referent(root);
    if (whole == nullptr || !root_of(tensor).is_same(THPVariable_Unpack(whole))) return nullptr;
    const bool may_still_stay = see(parcel, parcel_hold) != Py_None && see(parcel, parcel_handle) == Py_None;
    if (see(parcel, parcel_shared) == Py_True || may_still_stay) return nullptr;
    begin(way, settled, one, moment);
    put_int(way->progress, running_moment, moment);
    Own placeholder(new_placeholder(way, saved.at, view_of(object, tensor)));
    finish(way, settled, one, moment);
    return placeholder.give();
}

// As `Saver.save_as_planned`, for a storage that moves alone.
PyObject *save_to_move(const Way *way, PyObject *settled, const Moment &one, PyObject *object, const at::Tensor &tensor, PyObject *address) {
    const int64_t nbytes = static_cast<int64_t>(tensor.storage().nbytes());
    Own value(way->tape == Py_None ? Py_NewRef(Py_None) : notice(way, settled, tensor, address, one.ordinal));
    if (is_too_much(way, nbytes)) {  // even without what is dropped at this moment
        Own size(an_int(nbytes)), done(checked(PyObject_CallMethodObjArgs(way->residency, s_make_room, size.at, one.left_block, nullptr)));
    }
    Own parcel(new_parcel(way, one, nbytes, Py_False)), saved(new_saved(parcel.at)), resident(take(way->residency, residency_resident));
    checked(PyDict_SetItem(resident.at, see(parcel.at, parcel_order), parcel.at));
    count(way, nbytes);
    put(parcel.at, parcel_buffer, bytes_in(tensor, 0, nbytes));
    put(parcel.at, parcel_hold, THPVariable_Wrap(tensor.tensor_data()));
    PyObject *watch = value.at == Py_None ? Py_None : see(value.at, value_watch);
    put_int(saved.at, saved_version, version_of(tensor));
    put(saved.at, saved_root, weak_root_of(object, tensor));
    if (value.at != Py_None) put_shared(value.at, value_held, Py_None);
    put_saved(
        way, one, saved.at, tensor, value.at, address, watch == Py_None ? watch_of(tensor) : Py_NewRef(watch), one.ordinal);
    send(way, parcel.at, one.tier);
    return saved.give();
}

// Whether autograd saves what one call of an autograd.Function saves, as `SavedTensors._saved_by_the_same_call` asks.
bool is_saved_by_a_function() {
    PyFrameObject *frame = PyEval_GetFrame();  // borrowed
    if (frame == nullptr) return false;
    Own code(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame)));
    return code.at == of.apply;
}

// As `Settled._pack_away`, for what moves alone and is saved for the first time; nullptr without an error where that must
// be called, and nothing has changed.
PyObject *pack_away(Way *way, PyObject *settled, PyObject *object, const at::Tensor &tensor, PyObject *address, int64_t moment) {
    const Moment &one = moment_of(way, moment);
    const int64_t nbytes = static_cast<int64_t>(tensor.storage().nbytes());
    if (one.tier == nullptr || one.ordinal != see_int(way->progress, running_num_saved) || !fits(way, nbytes, one.nbytes)) return nullptr;
    Own by_address(take(way->kept, kept_tensors_by_address));
    if (find(by_address.at, address) != nullptr || staying_at(way, tensor) != nullptr || is_input(way, address)) return nullptr;
    if (!is_its_own(way, object, tensor)) return nullptr;
    if (is_small_part(tensor, nbytes)) return nullptr;
    if (one.is_saved_again && is_saved_by_a_function()) return nullptr;
    begin(way, settled, one, moment);
    Own saved(save_to_move(way, settled, one, object, tensor, address));
    put_int(way->progress, running_num_saved, one.ordinal + 1);
    put_int(way->progress, running_moment, moment);
    Own placeholder(new_placeholder(way, saved.at, view_of(object, tensor)));
    PyObject *parcel = see(saved.at, saved_parcel);
    if (see(parcel, parcel_handle) == Py_None) {  // no tier had room
        Own number(checked(PyLong_FromVoidPtr(placeholder.at)));
        checked(PyDict_SetItem(see(saved.at, saved_kept), number.at, see(parcel, parcel_hold)));
    }
    finish(way, settled, one, moment);
    return placeholder.give();
}

// As `Settled.pack`; nullptr without an error where that must be called.
PyObject *pack_settled(Way *way, PyObject *settled, PyObject *object, const at::Tensor &tensor) {
    const int64_t moment = see_int(way->progress, running_moment) + 1;
    const bool has_plan = way->moments != nullptr, is_planned = has_plan && moment < static_cast<int64_t>(way->moments->all->size());
    if (is_planned && way->repeats != Py_None && moment_of(way, moment).maker != nullptr) {
        PyObject *placeholder = pack_made(way, settled, object, tensor, moment);
        if (placeholder != nullptr) return placeholder;
    }
    Own address(address_of(tensor));
    if (checked(PySet_Contains(way->fixed, address.at))) return new_untouched(object, tensor);
    if (has_plan && (!is_planned || moment_of(way, moment).kind == Moment::unpacks)) return nullptr;
    const Locked locked(way->lock, true);
    if (!is_current(way, settled) || see_int(way->progress, running_moment) + 1 != moment) return nullptr;
    settle_kept(way);
    if (!has_plan) return pack_unplanned(way, object, tensor, address.at);
    const auto pack_it = moment_of(way, moment).kind == Moment::stays ? pack_stay : pack_leaving;
    return pack_it(way, settled, object, tensor, address.at, moment);
}

}  // namespace
