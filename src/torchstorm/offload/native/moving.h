// What a settled step has a moment do: give room back, and begin to bring something back, as `SavedTensors._drop` and `_fetch`
// do it.

#pragma once

#include "letting_go.h"

namespace {

void call_at(PyObject *settled, PyObject *what, int64_t moment) {
    Own number(an_int(moment));
    Own done(checked(PyObject_CallMethodOneArg(settled, what, number.at)));
}

// As `views.version_counter`.
PyObject *counter_of(const at::Tensor &tensor) {
    at::Tensor token = tensor.tensor_data();
    token.set_data(at::empty({0}, tensor.options()));
    return checked(THPVariable_Wrap(token));
}

// As `views.flat_bytes`, of the storage that a tensor lies in.
PyObject *bytes_in(const at::Tensor &tensor, int64_t offset, int64_t nbytes) {
    const auto key = at::TensorOptions().device(tensor.device()).dtype(at::kByte).computeDispatchKey();
    at::Tensor bytes = at::detail::make_tensor<at::TensorImpl>(
        c10::Storage(tensor.storage()), c10::DispatchKeySet(key), caffe2::TypeMeta::fromScalarType(at::kByte));
    bytes.unsafeGetTensorImpl()->set_sizes_contiguous(nbytes);
    bytes.unsafeGetTensorImpl()->set_storage_offset(offset);
    return checked(THPVariable_Wrap(bytes));
}

// As `Saved.has_other_memory`.
bool has_other_memory(PyObject *saved) {
    auto *weak = static_cast<c10::StorageImpl *>(PyLong_AsVoidPtr(see(see(saved, saved_watch), weak_cdata)));
    c10::StorageImpl *storage = weak == nullptr ? nullptr : c10::raw::weak_intrusive_ptr::lock(weak);
    if (storage == nullptr) return false;
    const auto held = c10::intrusive_ptr<c10::StorageImpl>::reclaim(storage);
    return held->data() != PyLong_AsVoidPtr(see(saved, saved_pointer));
}

// Whether the version counter of a tensor, if there is one, has moved on.
bool has_changed(PyObject *tensor, PyObject *version) {
    return tensor != Py_None && version_of(THPVariable_Unpack(tensor)) != as_int(version);
}

// The one storage in a parcel, where its bytes can go as they are; nullptr without an error for anything else. Borrowed.
PyObject *alone_in(PyObject *parcel) {
    PyObject *members = see(parcel, parcel_members);
    if (see(parcel, parcel_shared) != Py_False || PySet_GET_SIZE(members) != 1) return nullptr;
    Own each(checked(PyObject_GetIter(members))), saved(checked(PyIter_Next(each.at)));
    if (PyDict_GET_SIZE(see(saved.at, saved_kept)) || has_other_memory(saved.at)) return nullptr;
    if (has_changed(see(parcel, parcel_hold), see(saved.at, saved_version))) return nullptr;
    if (has_changed(see(saved.at, saved_base), see(saved.at, saved_base_version))) return nullptr;
    return saved.at;  // the parcel holds it
}

// Waits for a copy, as `Residency.drop` does: with marks around it in the steps that tell how long that took.
void wait_for_room(const Way *way, PyObject *copy) {
    Own waits(take(way->residency, residency_waits));
    if (waits.at == Py_None) return wait_for(copy);
    Own begun(checked(PyObject_CallMethodNoArgs(way->residency, s__mark)));
    wait_for(copy);
    Own ended(checked(PyObject_CallMethodNoArgs(way->residency, s__mark))), both(checked(PyTuple_Pack(2, begun.at, ended.at)));
    checked(PyList_Append(waits.at, both.at));
}

// As `Residency.drop`.
void drop(const Way *way, PyObject *parcel) {
    if (see(parcel, parcel_buffer) == Py_None || see(parcel, parcel_handle) == Py_None) return;
    Own back(take(parcel, parcel_back)), copy;
    copy.at = back.at != Py_None ? Py_NewRef(back.at) : get(see(parcel, parcel_handle), s_written);
    wait_for_room(way, copy.at);
    Own saved(Py_XNewRef(alone_in(parcel)));  // as it is now: another thread may have run meanwhile
    if (!saved) {
        Own done(checked(PyObject_CallMethodOneArg(way->residency, s_drop, parcel)));
        return;
    }
    put_shared(parcel, parcel_back, Py_None);
    Own away(take(way->residency, residency_away)), at(saved_at(way));
    checked(PyDict_SetItem(away.at, see(parcel, parcel_order), parcel));
    remove_base(at.at, saved.at);
    PyObject *hold = see(parcel, parcel_hold);
    if (hold != Py_None && see(saved.at, saved_counter) == Py_None)
        put(saved.at, saved_counter, counter_of(THPVariable_Unpack(hold)));
    release(way, parcel);
}

// As `Residency._hold`.
void make_resident(const Way *way, PyObject *parcel) {
    Own away(take(way->residency, residency_away)), resident(take(way->residency, residency_resident));
    PyObject *order = see(parcel, parcel_order);
    forget_if_there(away.at, order);
    checked(PyDict_SetItem(resident.at, order, parcel));
    count(way, see_int(parcel, parcel_nbytes));
}

// As `FastTier.empty`.
PyObject *empty(const Way *way, PyObject *parcel, PyObject *tier, PyObject *handle) {
    if (way->device >= 0 && is_plain_host_tier(tier)) {  // then that is a GPU
        const auto options = at::TensorOptions().dtype(at::kByte).device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(way->device)));
        return checked(THPVariable_Wrap(at::empty({see_int(parcel, parcel_nbytes)}, options)));
    }
    Own phase(get(handle, s_phase));
    return checked(PyObject_CallMethodObjArgs(way->residency, s__empty, see(parcel, parcel_nbytes), phase.at, nullptr));
}

// As `Residency.fetch`.
void fetch(const Way *way, PyObject *parcel) {
    const int64_t nbytes = see_int(parcel, parcel_nbytes);
    if (is_too_much(way, nbytes)) {
        Own done(checked(PyObject_CallMethodOneArg(way->residency, s_fetch, parcel)));
        return;
    }
    Own tier(take(parcel, parcel_tier)), handle(take(parcel, parcel_handle));
    Own buffer(empty(way, parcel, tier.at, handle.at)), back(get_from(tier.at, handle.at, THPVariable_Unpack(buffer.at)));
    if (!back) back.at = checked(PyObject_CallMethodObjArgs(tier.at, s_get, handle.at, buffer.at, nullptr));
    put(parcel, parcel_back, back.give());
    put(parcel, parcel_buffer, buffer.give());
    make_resident(way, parcel);
}

// As `Residency.send`, of a parcel that was made just now.
void send(const Way *way, PyObject *parcel, PyObject *name) {
    Own tiers(get(way->residency, s__tiers)), tier(Py_XNewRef(find(tiers.at, name)));
    if (tier && see(way->residency, residency_checks) == Py_False) {
        Own label(checked(PyObject_CallOneArg(of.label_of, see(parcel, parcel_block))));
        Own handle(put_into(tier.at, THPVariable_Unpack(see(parcel, parcel_buffer)), label.at));
        if (handle) {
            put_shared(parcel, parcel_handle, handle.at);
            put_shared(parcel, parcel_tier, tier.at);
            set_int(way->residency, s_moved_bytes, get_int(way->residency, s_moved_bytes) + see_int(parcel, parcel_nbytes));
            return;
        }
    }
    Own done(checked(PyObject_CallMethodObjArgs(way->residency, s_send, parcel, name, nullptr)));
}

// As `Settled._begin`.
void begin(const Way *way, PyObject *settled, const Moment &one, int64_t moment) {
    if (!one.is_busy) return;
    if (one.is_turn || see(way->progress, running_pace) != Py_None) return call_at(settled, s__begin, moment);
    for (PyObject *number : one.drops) {
        Own parcel(Py_XNewRef(find(see(way->progress, running_numbered), number)));
        if (parcel) drop(way, parcel.at);
    }
}

// As `Settled._finish`.
void finish(const Way *way, PyObject *settled, const Moment &one, int64_t moment) {
    if (!one.is_busy) return;
    if (see(way->progress, running_pace) != Py_None) return call_at(settled, s__finish, moment);
    Own let_go(take(way->owner, saved_tensors__let_go));
    settle(way, let_go.at);
    for (PyObject *number : one.fetches) {
        Own parcel(Py_XNewRef(find(see(way->progress, running_numbered), number)));
        if (!parcel || see(parcel.at, parcel_handle) == Py_None || see(parcel.at, parcel_buffer) != Py_None) continue;
        if (PySet_GET_SIZE(see(parcel.at, parcel_members))) fetch(way, parcel.at);
    }
}

}  // namespace
