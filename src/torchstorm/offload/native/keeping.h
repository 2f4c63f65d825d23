// What a settled step does with a tensor that autograd saves and that stays, as `Settled` does it.

#pragma once

#include "moving.h"
#include "records.h"

namespace {

bool is_its_own(const Way *way, PyObject *object, const at::Tensor &tensor) {
    if (tensor.get_device() != way->device || tensor.is_cpu() != (way->device < 0)) return false;
    if (!is_of_numbers(tensor)) return false;
    return !tensor.is_view() || !is_of_parameter(object, tensor);
}

bool is_input(const Way *way, PyObject *address) { return find(see(way->progress, running_inputs), address) != nullptr; }

// Of plain data, which is taken for an input as well: `Saver.is_input`.
bool is_small_part(const at::Tensor &tensor, int64_t nbytes) {
    return !tensor.requires_grad() && 4 * static_cast<int64_t>(tensor.nbytes()) < nbytes;
}

bool count_if_it_fits(const Way *way, int64_t nbytes) {
    const int64_t resident = see_int(way->residency, residency_resident_bytes) + nbytes;
    if (resident > see_int(way->residency, residency_limit_bytes)) return false;
    put_int(way->residency, residency_resident_bytes, resident);
    if (resident > see_int(way->residency, residency_peak_bytes)) put_int(way->residency, residency_peak_bytes, resident);
    return true;
}

// As `Kept`; takes the alias over.
PyObject *new_kept(PyObject *alias, int64_t version, const void *pointer, PyObject *storage, PyObject *released) {
    Own kept(allocate(of.kept));
    put(kept.at, kept_tensor, alias);
    put_int(kept.at, kept_version, version);
    put(kept.at, kept_pointer, PyLong_FromVoidPtr(const_cast<void *>(pointer)));
    put_shared(kept.at, kept_placeholder, Py_None);
    Own weak(weak_reference(kept.at)), count(an_int(see_int(storage, kept_storage_num_live) + 1));
    PyObject *saved = see(storage, kept_storage_saved);
    if (saved == Py_None) {
        put(storage, kept_storage_saved, saved = checked(PyList_New(1)));
        PyList_SET_ITEM(saved, 0, weak.give());
    } else {
        checked(PyList_Append(saved, weak.at));
    }
    put(storage, kept_storage_num_live, count.give());
    put_shared(kept.at, kept_storage, storage);  // from here on it says when it is let go
    put_shared(kept.at, kept__released, released);
    return kept.give();
}

PyObject *new_kept(const at::Tensor &tensor, PyObject *storage, PyObject *released) {
    return new_kept(THPVariable_Wrap(tensor.tensor_data()), version_of(tensor), tensor.data_ptr(), storage, released);
}

// With the numbers' references taken over.
PyObject *new_storage(PyObject *address, PyObject *ordinal, PyObject *nbytes, PyObject *counted_bytes, PyObject *movable, PyObject *block) {
    Own storage(allocate(of.kept_storage));
    put_shared(storage.at, kept_storage_address, address);
    put(storage.at, kept_storage_ordinal, ordinal);
    put(storage.at, kept_storage_nbytes, nbytes);
    put(storage.at, kept_storage_counted_bytes, counted_bytes);
    put_shared(storage.at, kept_storage_movable, movable);
    put_shared(storage.at, kept_storage_block, block);
    put_int(storage.at, kept_storage_num_live, 0);
    for (const Py_ssize_t place : {kept_storage_saved, kept_storage_lost, kept_storage_value, kept_storage_owner, kept_storage_beside, kept_storage__held})
        put_shared(storage.at, place, Py_None);
    return storage.give();
}

// From now on `KeptTensors` has what stays, too, and a `Kept` stands for each `Stay`. Under the lock.
void bring_over(const Way *way) {
    settle_staying(way);
    if (way->staying->storages.empty()) return;
    // What is made here may have Python's collector run, and with it anything: nothing is left for that to change.
    const Leaving leaving(*way->staying);
    Own by_ordinal(take(way->kept, kept_tensors_by_ordinal)), by_address(take(way->kept, kept_tensors_by_address));
    Own released(take(way->kept, kept_tensors_released)), storages(checked(PyList_New(0)));
    for (const StayingStorage &is : leaving.storages) {
        if (!is.num_live) {  // autograd has let go of it
            checked(PyList_Append(storages.at, Py_None));
            continue;
        }
        Own address(checked(PyLong_FromVoidPtr(const_cast<c10::StorageImpl *>(is.address)))), ordinal(an_int(is.ordinal));
        Own storage(new_storage(address.at, Py_NewRef(ordinal.at), an_int(is.nbytes), an_int(is.counted_bytes), is.movable, is.block));
        checked(PyList_Append(storages.at, storage.at));
        checked(PyDict_SetItem(by_ordinal.at, ordinal.at, storage.at));
        checked(PyDict_SetItem(by_address.at, address.at, storage.at));
    }
    for (Stay *stay : leaving.stays) {
        PyObject *storage = PyList_GET_ITEM(storages.at, static_cast<Py_ssize_t>(stay->storage));
        stay->kept = new_kept(THPVariable_Wrap(stay->tensor), stay->version, stay->pointer, storage, released.at);
        stay->tensor.reset();  // else the memory would stay when the other lets go of it
    }
}

PyObject *way_bring_over(PyObject *self, PyObject *) {
    return guarded([&]() -> PyObject * {
        bring_over(reinterpret_cast<Way *>(self));
        Py_RETURN_NONE;
    });
}

// Whether a function runs whose results autograd may save: where `Tape.value_to_save` looks for their place.
bool is_in_a_function(PyObject *unfinished, int64_t nbytes) {
    if (Py_TYPE(unfinished) != of.unfinished) return false;
    return nbytes >= of.tiny_bytes || PyTuple_GET_ITEM(unfinished, 4) == Py_True;
}

// As `Tape._name`, of what the last step met as storage of the same number; nullptr without an error for anything else.
PyObject *named_again(const Way *way, const at::Tensor &tensor, PyObject *known, PyObject *address, PyObject *ordinal) {
    if (way->repeats == Py_None) return nullptr;
    Own sources(get(way->repeats, s_sources));
    Own value(Py_XNewRef(find(sources.at, ordinal)));
    if (!value || see(value.at, value_watch) != Py_None || see(value.at, value_call) != Py_None) return nullptr;
    renew(value.at, tensor, find(known, address));
    checked(PyDict_SetItem(known, address, value.at));
    return value.give();
}

// As `Tape._add_output`.
PyObject *add_output(PyObject *call, const at::Tensor &tensor, PyObject *known, PyObject *address, PyObject *place) {
    PyObject *before = find(known, address);
    Own value(allocate(of.value));
    put_int(value.at, value_nbytes, static_cast<int64_t>(tensor.storage().nbytes()));
    put_int(value.at, value_version, version_of(tensor));
    put_shared(value.at, value_call, call);
    put(value.at, value_watch, before == nullptr ? watch_of(tensor) : take(before, value_watch));
    put_shared(value.at, value_is_read, Py_False);
    for (const Py_ssize_t none : {value_saved, value_held, value_lost, value_out, value_root, value_view, value_saved_before, value_again})
        put_shared(value.at, none, Py_None);
    checked(PyDict_SetItem(known, address, value.at));
    Own weak(weak_reference(value.at));
    checked(PyList_Append(see(call, call_outputs), weak.at));
    checked(PyList_Append(see(call, call_places), place));
    return value.give();
}

// The bytes of what the function that runs is about to return, as the tape names them; nullptr without an error where
// that is no result of it.
PyObject *name_made(const Way *way, PyObject *unfinished, const at::Tensor &tensor) {
    Own place(PyIter_Next(PyTuple_GET_ITEM(unfinished, 2)));
    if (!place) {
        if (PyErr_Occurred()) throw Failed();
        return nullptr;
    }
    PyObject *again = PyTuple_GET_ITEM(unfinished, 3);
    Own known(get(way->tape, s_known)), address(address_of(tensor));
    if (as_int(place.at) || again == Py_None)
        return add_output(PyTuple_GET_ITEM(unfinished, 0), tensor, known.at, address.at, place.at);
    renew(again, tensor, find(known.at, address.at));
    checked(PyDict_SetItem(known.at, address.at, again));
    return Py_NewRef(again);
}

// As `Tape.value_to_save`, through which it goes for what has to be named anew.
PyObject *notice(const Way *way, PyObject *settled, const at::Tensor &tensor, PyObject *address, int64_t ordinal) {
    Own known(get(way->tape, s_known)), within(get(way->tape, s_within));
    PyObject *found = find(known.at, address);
    const bool is_known = is_as_known(found, tensor);
    if (is_known && within.at == Py_None) return Py_NewRef(found);
    Own number(an_int(ordinal)), unfinished(get(way->tape, s_unfinished)), wanted(get(way->tape, s_wanted)), idle(get(way->tape, s_idle));
    const auto by_python = [&](PyObject *object, PyObject *method) {
        Own storage(checked(THPStorage_Wrap(tensor.storage()))), version(an_int(version_of(tensor)));
        return checked(PyObject_CallMethodObjArgs(object, method, storage.at, version.at, number.at, nullptr));
    };
    if (!is_known && wanted.at != Py_None && idle.at == Py_False) {
        const bool is_in = is_in_a_function(unfinished.at, static_cast<int64_t>(tensor.storage().nbytes()));
        const Answer is_given = is_in ? is_among(tensor, PyTuple_GET_ITEM(unfinished.at, 1)) : yes;
        if (is_given == no) {
            PyObject *made = name_made(way, unfinished.at, tensor);
            return made != nullptr ? made : by_python(way->tape, s__name);
        }
        PyObject *named = is_given == yes ? named_again(way, tensor, known.at, address, number.at) : nullptr;
        if (named != nullptr) return named;
    }
    return by_python(settled, s__notice);
}

// As `KeptStorage.hold`.
void hold(const Way *way, PyObject *storage, PyObject *value, PyObject *alias, int64_t version) {
    put_shared(storage, kept_storage_value, value);
    put_shared(storage, kept_storage_owner, way->owner);
    Own held(checked(PyTuple_New(2)));
    PyTuple_SET_ITEM(held.at, 0, Py_NewRef(alias));
    PyTuple_SET_ITEM(held.at, 1, an_int(version));
    put_shared(storage, kept_storage__held, held.at);
    put_shared(value, value_held, held.at);
}

// As `Settled._pack_planned`, for what stays and the tape is told of.
PyObject *keep_noticed(
    const Way *way, PyObject *settled, const Moment &one, const at::Tensor &tensor, PyObject *address, int64_t nbytes, int64_t counted_bytes) {
    Own by_ordinal(take(way->kept, kept_tensors_by_ordinal)), by_address(take(way->kept, kept_tensors_by_address));
    Own released(take(way->kept, kept_tensors_released)), value(notice(way, settled, tensor, address, one.ordinal));
    PyObject *ordinal = PyTuple_GET_ITEM(one.stay, 0);
    Own storage(new_storage(address, Py_NewRef(ordinal), an_int(nbytes), an_int(counted_bytes), one.movable, one.block));
    Own kept(new_kept(tensor, storage.at, released.at));
    checked(PyDict_SetItem(by_ordinal.at, ordinal, storage.at));
    checked(PyDict_SetItem(by_address.at, address, storage.at));
    if (one.is_read && value.at != Py_None) hold(way, storage.at, value.at, see(kept.at, kept_tensor), version_of(tensor));
    return kept.give();
}

// Whether Python has a storage at an address among what stays or what may leave.
bool is_saved_at(const Way *way, PyObject *address) {
    Own by_address(take(way->kept, kept_tensors_by_address)), at(saved_at(way));
    return find(by_address.at, address) != nullptr || find(at.at, address) != nullptr;
}

// As `Settled._pack_planned`, for what stays; nullptr without an error where that must be called.
PyObject *pack_stay(Way *way, PyObject *settled, PyObject *object, const at::Tensor &tensor, PyObject *address, int64_t moment) {
    const Moment &one = moment_of(way, moment);
    const int64_t nbytes = static_cast<int64_t>(tensor.storage().nbytes());
    if (!fits(way, nbytes, one.nbytes)) return nullptr;
    begin(way, settled, one, moment);
    const StayingStorage *staying = staying_at(way, tensor);
    Own packed;
    if (one.ordinal == see_int(way->progress, running_num_saved)) {
        if (staying != nullptr || is_saved_at(way, address)) return nullptr;
        const int64_t counted_bytes = std::min(nbytes, one.counted_bytes);
        if (!is_its_own(way, object, tensor) || !count_if_it_fits(way, counted_bytes)) return nullptr;
        put_int(way->progress, running_num_saved, one.ordinal + 1);
        if (one.is_noticed && way->tape != Py_None)
            packed.at = keep_noticed(way, settled, one, tensor, address, nbytes, counted_bytes);
        else
            packed.at = stay_of_new(way, tensor, {storage_of(tensor), one.ordinal, nbytes, counted_bytes, 0, one.movable, one.block});
    } else if (staying != nullptr) {
        if (staying->ordinal != one.ordinal || !staying->num_live) return nullptr;
        packed.at = stay_of(way, tensor, staying);
    } else {
        Own by_ordinal(take(way->kept, kept_tensors_by_ordinal)), released(take(way->kept, kept_tensors_released));
        Own found(Py_XNewRef(find(by_ordinal.at, PyTuple_GET_ITEM(one.stay, 0))));
        if (!found || !equal(see(found.at, kept_storage_address), address) || !see_int(found.at, kept_storage_num_live)) return nullptr;
        packed.at = new_kept(tensor, found.at, released.at);
    }
    put_int(way->progress, running_moment, moment);
    finish(way, settled, one, moment);
    return packed.give();
}

// As `settled._is_of_all`.
bool is_of_all(const at::Tensor &tensor, int64_t nbytes) {
    if (!tensor.is_view()) return static_cast<int64_t>(tensor.nbytes()) == nbytes;
    return tensor._base().layout() == at::kStrided && static_cast<int64_t>(tensor._base().nbytes()) == nbytes;
}

// As `Settled._pack_unplanned`; nullptr without an error where that must be called, and nothing has changed.
PyObject *pack_unplanned(Way *way, PyObject *object, const at::Tensor &tensor, PyObject *address) {
    const int64_t nbytes = static_cast<int64_t>(tensor.storage().nbytes());
    if (!nbytes || !is_of_all(tensor, nbytes)) return nullptr;
    if (const StayingStorage *staying = staying_at(way, tensor))
        return staying->nbytes == nbytes && staying->num_live ? stay_of(way, tensor, staying) : nullptr;
    Own by_address(take(way->kept, kept_tensors_by_address)), found(Py_XNewRef(find(by_address.at, address)));
    if (found) {
        const bool is_in_parts = checked(PySet_Contains(see(way->kept, kept_tensors_in_parts), address));
        if (is_in_parts || see_int(found.at, kept_storage_nbytes) != nbytes) return nullptr;
        Own released(take(way->kept, kept_tensors_released));
        return new_kept(tensor, found.at, released.at);
    }
    Own at(saved_at(way));
    if (!is_its_own(way, object, tensor) || find(at.at, address) != nullptr) return nullptr;
    if (is_input(way, address) || is_small_part(tensor, nbytes) || !count_if_it_fits(way, nbytes)) return nullptr;
    const int64_t num_saved = see_int(way->progress, running_num_saved);
    put_int(way->progress, running_num_saved, num_saved + 1);
    return stay_of_new(way, tensor, {storage_of(tensor), num_saved, nbytes, nbytes, 0, Py_True, of.no_block});
}

PyObject *new_untouched(PyObject *object, const at::Tensor &tensor) {
    Own untouched(allocate(of.untouched));
    const bool is_leaf = Py_TYPE(object) == of.parameter && tensor.is_leaf();
    put(untouched.at, untouched_tensor, is_leaf ? Py_NewRef(object) : THPVariable_Wrap(tensor.tensor_data()));
    put_int(untouched.at, untouched_version, version_of(tensor));
    return untouched.give();
}

}  // namespace
