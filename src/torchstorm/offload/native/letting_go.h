// What a settled step does when autograd lets go of a tensor that it saved, as `LetGo`, `Residency` and `KeptTensors` do it.

#pragma once

#include "copies.h"
#include "staying.h"

namespace {

bool fits(const Way *way, int64_t nbytes, int64_t expected) {
    return nbytes == expected || (!way->is_exact && nbytes < expected);
}

const Moment &moment_of(const Way *way, int64_t moment) { return (*way->moments->all)[static_cast<size_t>(moment)]; }

bool is_current(const Way *way, PyObject *settled) { return see(way->progress, running_settled) == settled; }

Way *way_of(PyObject *settled, Own &holder) {  // nullptr where a step has none
    if (settled == Py_None) return nullptr;
    holder.at = take(settled, settled_native);
    return Py_TYPE(holder.at) == way_type ? reinterpret_cast<Way *>(holder.at) : nullptr;
}

Way *planned_way_of(PyObject *settled, Own &holder) {  // nullptr where it has none by a plan
    Way *way = way_of(settled, holder);
    return way != nullptr && way->moments != nullptr ? way : nullptr;
}

// What autograd holds, by address: `SavedStorages._at`.
PyObject *saved_at(const Way *way) { return take(see(way->residency, residency_known), saved_storages__at); }

Py_ssize_t size_at(PyObject *object, PyObject *name) {
    Own found(get(object, name));
    return size_of(found.at);
}

// As `SavedStorages._forget`.
void forget_at(PyObject *at, PyObject *saved, PyObject *address) {
    PyObject *group = find(at, address);
    if (group == nullptr) return;
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(group); ++place)
        if (PyList_GET_ITEM(group, place) == saved) {
            checked(PyList_SetSlice(group, place, place + 1, nullptr));
            break;
        }
    if (!PyList_GET_SIZE(group)) checked(PyDict_DelItem(at, address));
}

void forget_if_there(PyObject *dict, PyObject *key) {
    if (find(dict, key) != nullptr) checked(PyDict_DelItem(dict, key));
}

void count(const Way *way, int64_t nbytes) {  // as `Residency._count`
    const int64_t resident = see_int(way->residency, residency_resident_bytes) + nbytes;
    put_int(way->residency, residency_resident_bytes, resident);
    if (resident > see_int(way->residency, residency_peak_bytes)) put_int(way->residency, residency_peak_bytes, resident);
}

// Whether so many bytes more exceed what may be resident; a GPU's plans see to that themselves.
bool is_too_much(const Way *way, int64_t nbytes) {
    return way->device < 0 && see_int(way->residency, residency_resident_bytes) + nbytes > see_int(way->residency, residency_limit_bytes);
}

// As `SavedStorages.remove_base`.
void remove_base(PyObject *at, PyObject *saved) {
    PyObject *base = see(saved, saved_base);
    if (base == Py_None) return;
    Own address(address_of(THPVariable_Unpack(base)));
    forget_at(at, saved, address.at);
    put_shared(saved, saved_base, Py_None);
}

// As `Residency._release`, but for what that does with each storage in the parcel.
void release(const Way *way, PyObject *parcel) {
    Own resident(take(way->residency, residency_resident));
    PyObject *order = see(parcel, parcel_order);
    put_shared(parcel, parcel_buffer, Py_None);
    put_shared(parcel, parcel_hold, Py_None);
    put_shared(parcel, parcel_used, Py_False);
    if (find(resident.at, order) == nullptr) return;
    checked(PyDict_DelItem(resident.at, order));
    count(way, -see_int(parcel, parcel_nbytes));
}

// As `Residency.discard`, for a parcel of which autograd holds nothing any more.
void discard(const Way *way, PyObject *parcel) {
    Own checks(take(way->residency, residency_checks));
    if (checks.at != Py_False || see(parcel, parcel_back) != Py_None || see(parcel, parcel_shared) != Py_False) {
        Own done(checked(PyObject_CallMethodOneArg(way->residency, s_discard, parcel)));
        return;
    }
    Own away(take(way->residency, residency_away)), absent(take(way->residency, residency_absent));
    release(way, parcel);
    checked(PySet_Discard(absent.at, parcel));
    forget_if_there(away.at, see(parcel, parcel_order));
    Own handle(take(parcel, parcel_handle)), tier(take(parcel, parcel_tier));
    if (handle.at == Py_None || tier.at == Py_None) return;
    if (!free_in(tier.at, handle.at)) Own done(checked(PyObject_CallMethodOneArg(tier.at, s_free, handle.at)));
    put_shared(parcel, parcel_handle, Py_None);
}

// As `LetGo._remove`.
void remove(const Way *way, PyObject *saved) {
    Own at(saved_at(way));
    Own parcel(take(saved, saved_parcel)), value(take(saved, saved_value));
    put_shared(saved, saved_value, Py_None);
    remove_base(at.at, saved);
    forget_at(at.at, saved, see(saved, saved_address));
    Own members(take(parcel.at, parcel_members));
    checked(PySet_Discard(members.at, saved));
    if (!PySet_GET_SIZE(members.at) && see(parcel.at, parcel_sealed) == Py_True) discard(way, parcel.at);
    if (value.at == Py_None || see(value.at, value_saved) != saved) return;
    put_shared(value.at, value_saved, Py_None);
    PyObject *group = find(at.at, see(saved, saved_address));
    for (Py_ssize_t place = 0; group != nullptr && place < PyList_GET_SIZE(group); ++place)
        if (see(PyList_GET_ITEM(group, place), saved_value) == value.at)  // saved with another version counter, too
            put_shared(value.at, value_saved, PyList_GET_ITEM(group, place));
}

// As `LetGo._is_read_later`, of bytes and of the storage that has them.
bool is_read_later(const Way *way, PyObject *value, PyObject *ordinal) {
    if (value == Py_None || see(value, value_is_read) != Py_True || !size_of(see(way->residency, residency_absent))) return false;
    PyObject *table = see(way->progress, running_table);
    if (table == Py_None || as_int(ordinal) < 0 || see(way->progress, running_has_changed) != Py_False) return true;
    Own read_until(get(table, s_read_until));
    PyObject *until = find(read_until.at, ordinal);
    if (until == nullptr) return see(value, value_call) == Py_None;
    return see_int(way->progress, running_moment) < as_int(until);
}

// As `KeptTensors._forget`.
void forget_kept(const Way *way, PyObject *storage) {
    count(way, -see_int(storage, kept_storage_counted_bytes));
    put_int(storage, kept_storage_counted_bytes, 0);
    PyObject *value = see(storage, kept_storage_value);
    if (value != Py_None && see(value, value_held) == see(storage, kept_storage__held)) put_shared(value, value_held, Py_None);
    for (const Py_ssize_t place : {kept_storage_value, kept_storage__held, kept_storage_owner})
        put_shared(storage, place, Py_None);
    Own by_address(take(way->kept, kept_tensors_by_address)), in_parts(take(way->kept, kept_tensors_in_parts));
    PyObject *address = see(storage, kept_storage_address), *beside = see(storage, kept_storage_beside);
    if (find(by_address.at, address) != storage) return;
    if (beside == Py_None)
        checked(PyDict_DelItem(by_address.at, address));
    else
        checked(PyDict_SetItem(by_address.at, address, beside));
    checked(PySet_Discard(in_parts.at, address));
}

// Whether autograd has let go of something that stays, and is still counted.
bool is_waiting(const Way *way) {
    return !way->staying->released.empty() || size_of(see(way->kept, kept_tensors_released));
}

PyObject *way_is_waiting(PyObject *self, PyObject *) {
    return PyBool_FromLong(!reinterpret_cast<Way *>(self)->staying->released.empty());
}

// Whether the storage at an address is among what stays.
PyObject *way_holds(PyObject *self, PyObject *address) {
    return guarded([&]() -> PyObject * {
        const Staying &staying = *reinterpret_cast<Way *>(self)->staying;
        const auto found = staying.by_address.find(static_cast<c10::StorageImpl *>(PyLong_AsVoidPtr(address)));
        if (PyErr_Occurred()) return nullptr;
        return PyBool_FromLong(found != staying.by_address.end() && staying.storages[found->second].num_live);
    });
}

// Uncounts what autograd has let go of, of what C++ keeps alone.
void settle_staying(const Way *way) {
    if (!way->staying->released.empty()) count(way, -forget_released(*way->staying));
}

// As `KeptTensors.settle`.
void settle_kept(const Way *way) {
    settle_staying(way);
    Own released(take(way->kept, kept_tensors_released));
    while (size_of(released.at)) {
        Own storage(checked(PyObject_CallMethodNoArgs(released.at, s_popleft)));
        const int64_t live = see_int(storage.at, kept_storage_num_live) - 1;
        put_int(storage.at, kept_storage_num_live, live);
        if (live) continue;
        if (is_read_later(way, see(storage.at, kept_storage_value), see(storage.at, kept_storage_ordinal))) {
            Own awaited(take(way->kept, kept_tensors_awaited));
            checked(PyList_Append(awaited.at, storage.at));
        } else {
            forget_kept(way, storage.at);
        }
    }
}

PyObject *way_settle(PyObject *self, PyObject *) {
    return guarded([&]() -> PyObject * {
        settle_staying(reinterpret_cast<Way *>(self));
        Py_RETURN_NONE;
    });
}

// Whether `LetGo.settle` has more to do than `KeptTensors.settle`.
bool has_more(const Way *way, PyObject *let_go) {
    return size_at(let_go, s__dropped) || size_of(see(way->kept, kept_tensors_awaited)) > get_int(let_go, s__num_awaited);
}

// Whether there is nothing to settle, beside what stays and was let go, and nothing that would be looked for.
bool is_quiet(const Way *way, PyObject *let_go) {
    if (size_at(let_go, s__dropped) || see(way->progress, running_recorder) != Py_None) return false;
    return !size_of(see(way->kept, kept_tensors_awaited)) && !size_at(let_go, s__awaited);
}

// As `LetGo.settle`; under the lock.
void settle(const Way *way, PyObject *let_go) {
    settle_kept(way);
    if (!is_quiet(way, let_go)) Own done(checked(PyObject_CallMethodNoArgs(let_go, s_settle)));
}

// The lock, as `SavedTensors._locked` takes it, and what was let go.
struct Holding : Locked {
    Own let_go;
    Holding(const Way *way, PyObject *owner) : Locked(way->lock), let_go(::take(owner, saved_tensors__let_go)) {}
};

// Whether the thread is one that copies, which may hold its tier's lock just now.
bool is_own_thread() {
    thread_local int known = -1;
    if (known < 0) known = checked(PyObject_CallNoArgs(of.is_own_thread)) == Py_True;
    return known;
}

// As `SavedTensors.settle_soon`.
PyObject *settle_soon(PyObject *owner) {
    const auto otherwise = [&] { return PyObject_CallMethodNoArgs(owner, s_settle_soon); };
    if (Py_TYPE(owner) != of.saved_tensors || is_own_thread()) return otherwise();
    Own run(take(owner, saved_tensors__run)), settled(take(run.at, running_settled)), holder;
    Way *way = way_of(settled.at, holder);
    if (way == nullptr) return otherwise();
    do {
        Holding holding(way, owner);
        if (!holding.take(false)) Py_RETURN_NONE;  // who has it settles
        settle_kept(way);
        const bool is_more = has_more(way, holding.let_go.at);
        holding.release();
        if (is_more) return otherwise();
    } while (is_waiting(way));
    Py_RETURN_NONE;
}

// In place of `Placeholder.drop`.
PyObject *placeholder_dropped(PyObject *placeholder, PyObject *) {
    return guarded([&]() -> PyObject * {
        if (slot(placeholder, placeholder__owner) == nullptr || slot(placeholder, placeholder_saved) == nullptr) Py_RETURN_NONE;
        Own owner(take(placeholder, placeholder__owner)), saved(take(placeholder, placeholder_saved));
        const auto otherwise = [&] {
            Own number(checked(PyLong_FromVoidPtr(placeholder)));
            return PyObject_CallMethodObjArgs(owner.at, s_let_go, saved.at, number.at, nullptr);
        };
        if (Py_TYPE(owner.at) != of.saved_tensors || is_own_thread()) return otherwise();
        Own run(take(owner.at, saved_tensors__run)), settled(take(run.at, running_settled)), holder;
        Way *way = planned_way_of(settled.at, holder);
        if (way == nullptr) return otherwise();
        {
            Holding holding(way, owner.at);
            if (!holding.take(false)) return otherwise();
            settle_kept(way);
            const bool is_read = is_read_later(way, see(saved.at, saved_value), see(saved.at, saved_ordinal));
            if (is_read || !is_quiet(way, holding.let_go.at)) {
                holding.release();
                return otherwise();
            }
            PyObject *kept = see(saved.at, saved_kept);
            if (PyDict_GET_SIZE(kept)) {
                Own number(checked(PyLong_FromVoidPtr(placeholder)));
                forget_if_there(kept, number.at);
            }
            const int64_t live = see_int(saved.at, saved_live) - 1;
            put_int(saved.at, saved_live, live);
            if (!live) remove(way, saved.at);
            const bool is_done = is_quiet(way, holding.let_go.at) && !is_waiting(way);
            holding.release();
            if (is_done) Py_RETURN_NONE;
        }
        return settle_soon(owner.at);
    });
}

// In place of `Kept.drop`.
PyObject *kept_dropped(PyObject *kept, PyObject *) {
    return guarded([&]() -> PyObject * {
        if (slot(kept, kept__released) == nullptr || slot(kept, kept_storage) == nullptr) Py_RETURN_NONE;
        PyObject *storage = see(kept, kept_storage);
        Own done(checked(PyObject_CallMethodOneArg(see(kept, kept__released), s_append, storage)));
        Own owner(take(storage, kept_storage_owner));
        if (owner.at == Py_None) Py_RETURN_NONE;
        return settle_soon(owner.at);
    });
}

// As `Event.drop`.
PyObject *event_dropped(PyObject *event, PyObject *) {
    return guarded([&]() -> PyObject * {
        checked(PyList_Append(see(event, event__unused), see(event, event_handle)));
        Py_RETURN_NONE;
    });
}

PyMethodDef weak_dropped_method = {"__del__", weak_dropped, METH_NOARGS, nullptr};
PyMethodDef event_dropped_method = {"__del__", event_dropped, METH_NOARGS, nullptr};
PyMethodDef placeholder_dropped_method = {"__del__", placeholder_dropped, METH_NOARGS, nullptr};
PyMethodDef kept_dropped_method = {"__del__", kept_dropped, METH_NOARGS, nullptr};

void set_finalizer(PyTypeObject *type, PyMethodDef *method) {
    Own function(checked(PyDescr_NewMethod(type, method)));
    checked(PyObject_SetAttrString(reinterpret_cast<PyObject *>(type), "__del__", function.at));
}

}  // namespace
