// What PyTorch calls in place of every function of its own, as `WatchedCalls.__torch_function__` does it.

#pragma once

#include "operators.h"

namespace {

#define EACH_OF_WATCH(X) X(mode) X(tape) X(progress) X(counts) X(numbers) X(names) X(moments) X(present) X(within) X(moment) X(operators)

COLLECTED(Watch, watch, EACH_OF_WATCH)

// As `watched._is_to_write`.
bool is_to_write(PyObject *kwargs) {
    if (find(kwargs, s_out) != nullptr) return true;
    PyObject *in_place = find(kwargs, s_inplace), *norm = find(kwargs, s_max_norm);
    return (in_place != nullptr && checked(PyObject_IsTrue(in_place))) || (norm != nullptr && norm != Py_None);
}

// The number of this call, which is counted.
PyObject *number_of_call(Watch *self, PyObject *name) {
    PyObject *moment = see(self->progress, running_moment);
    if (self->moment != moment && !equal(self->moment, moment)) PyDict_Clear(self->counts);
    Py_SETREF(self->moment, Py_NewRef(moment));
    PyObject *before = find(self->counts, name);
    const int64_t count = (before == nullptr ? 0 : as_int(before)) + 1;
    Own now(an_int(count));
    checked(PyDict_SetItem(self->counts, name, now.at));
    return an_int((as_int(moment) * of.num_counts + count) * of.num_names + as_int(name));
}

PyObject *watched_call(Watch *self, PyObject *func, PyObject *args, PyObject *kwargs) {
    const auto plainly = [&] { return PyObject_Call(func, args, kwargs); };
    if (checked(PyObject_IsTrue(checked(find(of.compiler, s__is_compiling_flag))))) return plainly();
    Own known(Py_XNewRef(find(of.known_functions, func)));
    if (!known) known.at = checked(PyObject_CallOneArg(of.get_to_know, func));
    PyObject *name = PyTuple_GET_ITEM(known.at, 0);
    const bool writes = PyTuple_GET_ITEM(known.at, 1) == Py_True || (kwargs != nullptr && is_to_write(kwargs));
    PyObject *moment = see(self->progress, running_moment);
    if (!writes && (!checked(PySet_Contains(self->moments, moment)) || !checked(PySet_Contains(self->names, name))))
        return plainly();
    Own idle(get(self->tape, s_idle));
    if (checked(PyObject_IsTrue(idle.at))) return plainly();
    Own number(number_of_call(self, name));
    if (!writes && !checked(PySet_Contains(self->numbers, number.at))) return plainly();
    Own repeats(get(self->tape, s_repeats)), named(kwargs == nullptr ? Py_NewRef(Py_None) : Py_NewRef(kwargs));
    if (!writes && repeats.at != Py_None) {
        if (is_plain(self->tape)) {
            Own first(an_int(as_int(number.at) * of.num_places));
            Own out(checked(run_and_learn(self, repeats.at, first.at, func, args, kwargs)));
            if (out.at != of.long_way) return out.give();
        }
    }
    return PyObject_CallMethodObjArgs(
        self->mode, s__within, number.at, func, writes ? Py_True : Py_False, args, named.at, nullptr);
}

PyObject *watch_call(PyObject *object, PyObject *const *given, size_t num_given, PyObject *given_names) {
    Watch *self = reinterpret_cast<Watch *>(object);
    const Py_ssize_t num = PyVectorcall_NARGS(num_given);
    if (num < 3 || num > 4 || given_names != nullptr || !PyTuple_Check(given[2]) || self->mode == nullptr) {
        PyErr_SetString(PyExc_TypeError, "__torch_function__ takes a function, types, a tuple and a dictionary");
        return nullptr;
    }
    PyObject *func = given[0], *args = given[2], *kwargs = num > 3 && PyDict_Check(given[3]) ? given[3] : nullptr;
    if (kwargs != nullptr && !PyDict_GET_SIZE(kwargs)) kwargs = nullptr;
    if (Py_TYPE(func) == of.getter) return PyObject_Call(func, args, kwargs);
    return guarded([&]() -> PyObject * {
        const int64_t before = see_int(self->progress, running_moment);
        if (!std::exchange(self->has_seen, true) && self->present == Py_None)
            note_within(self, 0, before);  // nobody knows within what these have come
        Own out(checked(watched_call(self, func, args, kwargs)));
        see_what_comes(self, func, before);
        return out.give();
    });
}

PyTypeObject *watch_type;

// watch(mode, tape, progress, moment, counts, numbers, names, moments, present, operators): what the mode is to have as its method; None
// where it does not know the progress. Without `present`, it finds out what that may be.
PyObject *watch(PyObject *, PyObject *const *given, Py_ssize_t num) {
    if (num != 10 || Py_TYPE(given[2]) != of.running || !PyDict_Check(given[4]) || !PyAnySet_Check(given[5]) ||
        !PyAnySet_Check(given[6]) || !PyAnySet_Check(given[7]) ||
        (given[8] != Py_None && !PyAnySet_Check(given[8])) || (given[9] != Py_None && Py_TYPE(given[9]) != operators_type))
        Py_RETURN_NONE;
    Watch *self = reinterpret_cast<Watch *>(watch_type->tp_alloc(watch_type, 0));
    if (self == nullptr) return nullptr;
    self->call = watch_call;
    self->mode = Py_NewRef(given[0]);
    self->tape = Py_NewRef(given[1]);
    self->progress = Py_NewRef(given[2]);
    self->moment = Py_NewRef(given[3]);
    self->counts = Py_NewRef(given[4]);
    self->numbers = Py_NewRef(given[5]);
    self->names = Py_NewRef(given[6]);
    self->moments = Py_NewRef(given[7]);
    self->present = Py_NewRef(given[8]);
    if (given[9] != Py_None && seeing == nullptr) {
        self->operators = Py_NewRef(given[9]);
        self->now = see_int(self->progress, running_moment);
        operators_of(self)->counted_at = -1;
        seeing = reinterpret_cast<Watch *>(Py_NewRef(self));
    }
    if (given[8] == Py_None && (self->within = PyList_New(0)) == nullptr) {
        Py_DECREF(self);
        return nullptr;
    }
    return reinterpret_cast<PyObject *>(self);
}

PyObject *watch_func(PyObject *, void *) { return Py_NewRef(of.torch_function); }

PyMethodDef watch_methods[] = {{"leave", watch_leave, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMemberDef watch_members[] = {
    {"__self__", T_OBJECT_EX, offsetof(Watch, mode), READONLY, nullptr},
    {"moment", T_OBJECT_EX, offsetof(Watch, moment), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Watch, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef watch_getters[] = {{"__func__", watch_func, nullptr, nullptr, nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace
