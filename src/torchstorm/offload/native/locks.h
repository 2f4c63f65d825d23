// A lock that C++ takes without a call of Python, and Python as it does a `threading.Lock`.

#pragma once

#include "objects.h"

#include <pythread.h>

namespace {

struct Lock {
    PyObject_HEAD
    PyThread_type_lock lock;
    bool is_held;
};

PyTypeObject *lock_type;

// Takes the lock; false where another has it and it is not waited for.
bool take_lock(PyObject *object, bool waits) {
    if (Py_TYPE(object) != lock_type) {
        Own taken(checked(PyObject_CallMethodOneArg(object, s_acquire, waits ? Py_True : Py_False)));
        return taken.at == Py_True;
    }
    Lock *self = reinterpret_cast<Lock *>(object);
    if (PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) return self->is_held = true;
    while (waits) {
        PyLockStatus status;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(self->lock, -1, 1);
        Py_END_ALLOW_THREADS
        if (status == PY_LOCK_ACQUIRED) return self->is_held = true;
        if (status == PY_LOCK_INTR) checked(Py_MakePendingCalls());  // a signal, as Control-C
    }
    return false;
}

// Gives the lock back; false, with an error set, where nobody has it.
bool give_lock_back(PyObject *object) {
    if (Py_TYPE(object) != lock_type) {
        Own released(PyObject_CallMethodNoArgs(object, s_release));
        return static_cast<bool>(released);
    }
    Lock *self = reinterpret_cast<Lock *>(object);
    if (!std::exchange(self->is_held, false)) {
        PyErr_SetString(PyExc_RuntimeError, "release unlocked lock");
        return false;
    }
    PyThread_release_lock(self->lock);
    return true;
}

// Held for as long as this is there, or until it is released. One that is not waited for may not be held.
struct Locked {
    PyObject *lock;
    bool is_held = false;
    explicit Locked(PyObject *given) : lock(given) {}
    explicit Locked(PyObject *given, bool waits) : lock(given), is_held(take_lock(given, waits)) {}
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;
    bool take(bool waits) { return is_held = take_lock(lock, waits); }
    void release() {
        if (std::exchange(is_held, false) && !give_lock_back(lock)) throw Failed();
    }
    ~Locked() {
        if (!is_held) return;
        const ErrorAside aside;
        if (!give_lock_back(lock)) PyErr_WriteUnraisable(lock);
    }
};

PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *) {
    if (!PyArg_ParseTuple(args, "")) return nullptr;
    Lock *self = reinterpret_cast<Lock *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    if ((self->lock = PyThread_allocate_lock()) == nullptr) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return reinterpret_cast<PyObject *>(self);
}

void lock_dealloc(Lock *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->is_held) PyThread_release_lock(self->lock);
    if (self->lock != nullptr) PyThread_free_lock(self->lock);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *lock_acquire(PyObject *self, PyObject *args, PyObject *named) {
    return guarded([&]() -> PyObject * {
        static const char *names[] = {"blocking", nullptr};
        int waits = 1;
        if (!PyArg_ParseTupleAndKeywords(args, named, "|p", const_cast<char **>(names), &waits)) return nullptr;
        return PyBool_FromLong(take_lock(self, waits));
    });
}

PyObject *lock_enter(PyObject *self, PyObject *) {
    return guarded([&] { return PyBool_FromLong(take_lock(self, true)); });
}

PyObject *lock_release(PyObject *self, PyObject *) { return give_lock_back(self) ? Py_NewRef(Py_None) : nullptr; }

PyMethodDef lock_methods[] = {
    {"acquire", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(lock_acquire)), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"release", lock_release, METH_NOARGS, nullptr}, {"__enter__", lock_enter, METH_NOARGS, nullptr},
    {"__exit__", lock_release, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace
