// The hooks that autograd calls, as `SavedTensors` has them.

#pragma once

#include "returning.h"
#include "saving.h"
#include "watch.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace {

// Whether another mode than the step's own is active, which may have just come back.
bool is_seen_by_others() {
    if (!at::impl::torch_function_mode_enabled()) return false;
    return Modes::stack_len() > 1 || Py_TYPE(Modes::get_stack_at(0)->ptr(getPyInterpreter())) != of.watched_calls;
}

// What is called from here does not pass the step's own mode.
struct Unseen {
    at::impl::TorchFunctionDisabledState before = Modes::get_disabled_state();
    Unseen() { Modes::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
    ~Unseen() { Modes::set_disabled_state(before); }
};

bool is_closed(PyObject *saved_tensors) { return PyUnicode_GET_LENGTH(see(saved_tensors, saved_tensors_closed)) != 0; }

// When it saves a tensor.
PyObject *pack_now(PyObject *saved_tensors, PyObject *object) {
    return guarded([&]() -> PyObject * {
        const auto otherwise = [&] { return PyObject_CallMethodOneArg(saved_tensors, s_pack, object); };
        if (is_seen_by_others() || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return otherwise();
        Unseen unseen;
        if (!is_plain_type(object)) return otherwise();
        const at::Tensor &tensor = THPVariable_Unpack(object);
        if (!has_bytes(tensor)) return otherwise();
        if (Py_TYPE(object) == of.parameter) return new_untouched(object, tensor);
        Own run(take(saved_tensors, saved_tensors__run)), settled(take(run.at, running_settled)), holder;
        Way *way = way_of(settled.at, holder);
        PyObject *packed = way == nullptr ? nullptr : pack_settled(way, settled.at, object, tensor);
        return packed != nullptr ? packed : otherwise();
    });
}

// As `Settled.arrive`; false where that must be asked.
bool arrives(Way *way, PyObject *settled, int64_t ordinal, int64_t nbytes) {
    if (way->moments == nullptr) return true;
    const Locked locked(way->lock, true);
    if (!is_current(way, settled)) return false;
    const int64_t moment = see_int(way->progress, running_moment) + 1;
    if (moment >= static_cast<int64_t>(way->moments->all->size())) return false;
    const Moment &one = moment_of(way, moment);
    if (one.kind != Moment::unpacks || one.ordinal != ordinal) return false;
    if (!fits(way, nbytes, one.nbytes)) return false;
    put_int(way->progress, running_moment, moment);
    begin(way, settled, one, moment);
    finish(way, settled, one, moment);
    return true;
}

// A tensor whose moment has come.
PyObject *given_back(PyObject *saved_tensors, PyObject *kept) {
    if (see(kept, kept_placeholder) != Py_None)  // it has left the plan just now
        return PyObject_CallMethodOneArg(saved_tensors, s__give_back_late, kept);
    PyObject *tensor = see(kept, kept_tensor);
    return tensor != Py_None ? Py_NewRef(tensor) : PyObject_CallMethodNoArgs(kept, s_unpack);
}

// A tensor that stays, as backward needs it; nullptr without an error where Python must have it first.
PyObject *unpack_stay(PyObject *saved_tensors, Stay *stay) {
    if (version_of(stay->tensor) != stay->version || stay->tensor.data_ptr() != stay->pointer) return nullptr;
    if (is_closed(saved_tensors)) return nullptr;
    Own run(take(saved_tensors, saved_tensors__run)), settled(take(run.at, running_settled)), holder;
    Way *way = way_of(settled.at, holder);
    if (way == nullptr || way != stay->way || see(run.at, running_open) != Py_None) return nullptr;
    const StayingStorage &storage = way->staying->storages[stay->storage];
    if (!arrives(way, settled.at, storage.ordinal, storage.nbytes)) return nullptr;
    count_as_used(saved_tensors);
    return stay->kept != nullptr ? given_back(saved_tensors, stay->kept) : THPVariable_Wrap(stay->tensor);
}

// Python has it from now on, if not yet.
void bring_over_with(PyObject *saved_tensors, Stay *stay) {
    Own lock(get(saved_tensors, s__lock));
    const Locked locked(lock.at, true);
    if (stay->kept != nullptr) return;  // by another thread
    if (stay->way == nullptr) {  // there was no memory when it was taken over
        PyErr_NoMemory();
        throw Failed();
    }
    const Own way(Py_NewRef(reinterpret_cast<PyObject *>(stay->way)));
    bring_over(reinterpret_cast<Way *>(way.at));
}

// When backward needs a saved tensor.
PyObject *unpack_now(PyObject *saved_tensors, PyObject *packed) {
    return guarded([&]() -> PyObject * {
        const auto otherwise = [&] { return PyObject_CallMethodOneArg(saved_tensors, s_unpack, packed); };
        if (Py_TYPE(packed) == stay_type) {
            Stay *stay = reinterpret_cast<Stay *>(packed);
            if (stay->kept == nullptr) {
                PyObject *tensor = unpack_stay(saved_tensors, stay);
                if (tensor != nullptr || PyErr_Occurred()) return tensor;
                bring_over_with(saved_tensors, stay);
            }
            packed = stay->kept;
        }
        const bool is_kept = Py_TYPE(packed) == of.kept;
        if (Py_TYPE(packed) == of.placeholder) {
            Own run(take(saved_tensors, saved_tensors__run));
            Own settled(take(run.at, running_settled)), holder;
            Way *way = planned_way_of(settled.at, holder);
            if (way == nullptr || is_closed(saved_tensors)) return otherwise();
            PyObject *tensor = unpack_placeholder(way, saved_tensors, settled.at, packed);
            return tensor != nullptr ? tensor : otherwise();
        }
        if (!is_kept && Py_TYPE(packed) != of.untouched) return otherwise();
        PyObject *tensor = see(packed, is_kept ? kept_tensor : untouched_tensor);  // borrowed: it may have to leave
        if (tensor == Py_None) return otherwise();
        const at::Tensor &is = THPVariable_Unpack(tensor);
        if (version_of(is) != see_int(packed, is_kept ? kept_version : untouched_version)) return otherwise();
        if (is_kept) {
            if (see(packed, kept_placeholder) != Py_None || is_closed(saved_tensors)) return otherwise();
            if (PyLong_AsVoidPtr(see(packed, kept_pointer)) != is.data_ptr()) return otherwise();
            Own run(take(saved_tensors, saved_tensors__run)), settled(take(run.at, running_settled)), holder;
            Way *way = way_of(settled.at, holder);
            if (way == nullptr || see(run.at, running_open) != Py_None) return otherwise();
            PyObject *storage = see(packed, kept_storage);
            if (!arrives(way, settled.at, see_int(storage, kept_storage_ordinal), see_int(storage, kept_storage_nbytes))) return otherwise();
        }
        count_as_used(saved_tensors);
        return is_kept ? given_back(saved_tensors, packed) : Py_NewRef(tensor);
    });
}

// What a hook returns, whose moment has come.
PyObject *having_come(PyObject *result) {
    if ((away == nullptr && seeing == nullptr) || result == nullptr) return result;
    return guarded([&]() -> PyObject * {
        Own owned(result);
        if (seeing != nullptr) seeing->now = see_int(seeing->progress, running_moment);
        if (away != nullptr) come_back_if_due();
        return owned.give();
    });
}

PyObject *pack(PyObject *saved_tensors, PyObject *object) { return having_come(pack_now(saved_tensors, object)); }
PyObject *unpack(PyObject *saved_tensors, PyObject *packed) { return having_come(unpack_now(saved_tensors, packed)); }

PyMethodDef pack_method = {"pack", pack, METH_O, nullptr}, unpack_method = {"unpack", unpack, METH_O, nullptr};

// hooks(saved_tensors): what `torch.autograd.graph.saved_tensors_hooks` takes, in place of its `pack` and `unpack`.
PyObject *hooks(PyObject *, PyObject *saved_tensors) {
    return guarded([&]() -> PyObject * {
        if (Py_TYPE(saved_tensors) != of.saved_tensors) {
            PyErr_SetString(PyExc_TypeError, "hooks are those of a SavedTensors");
            return nullptr;
        }
        Own both(checked(PyTuple_New(2)));
        PyTuple_SET_ITEM(both.at, 0, checked(PyCFunction_New(&pack_method, saved_tensors)));
        PyTuple_SET_ITEM(both.at, 1, checked(PyCFunction_New(&unpack_method, saved_tensors)));
        return both.give();
    });
}

}  // namespace
