// What one step needs beside the moments of its plan (`Way`, of a `Settled`), and what stays in it.

#pragma once

#include "moments.h"

#include <c10/util/flat_hash_map.h>

namespace {

struct Stay;

struct StayingStorage {
    const c10::StorageImpl *address;
    int64_t ordinal, nbytes, counted_bytes, num_live;
    PyObject *movable, *block;  // borrowed of the plan's table
};

// All that stays so in a step. Autograd may let go of a `Stay` in the midst of anything that calls Python or lets go of an
// object: that changes a count and adds to two arrays' ends, and no more.
struct Staying {
    std::vector<StayingStorage> storages;
    std::vector<Stay *> stays;  // borrowed; nullptr once let go
    std::vector<size_t> released;  // storages to uncount
    ska::flat_hash_map<const c10::StorageImpl *, size_t> by_address;
};

struct Way {
    PyObject_HEAD
    Staying *staying;
    Moments *moments;  // nullptr where everything stays
    PyObject *progress, *lock, *fixed, *kept, *residency, *repeats, *tape, *owner;
    int device;  // as `Tensor.get_device()`
    bool is_exact;
};

#define EACH_OF_WAY(X) X(moments) X(progress) X(lock) X(fixed) X(kept) X(residency) X(repeats) X(tape) X(owner)

COLLECTED(Way, way, EACH_OF_WAY)

void way_gone(Way *self) {
    delete std::exchange(self->staying, nullptr);
    way_dealloc(self);
}

PyTypeObject *way_type;

PyObject *way_new(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *moments, *progress, *lock, *fixed, *kept, *residency, *repeats, *tape, *owner;
    int device, is_exact;
    if (!PyArg_ParseTuple(
            args, "OOOO!OOOOOip", &moments, &progress, &lock, &PySet_Type, &fixed, &kept, &residency,
            &repeats, &tape, &owner, &device, &is_exact))
        return nullptr;
    const bool is_planned = moments != Py_None;
    if ((is_planned && Py_TYPE(moments) != moments_type) || !PyObject_TypeCheck(residency, of.residency) ||
        !PyObject_TypeCheck(kept, of.kept_tensors) || Py_TYPE(owner) != of.saved_tensors) {
        PyErr_SetString(PyExc_TypeError, "a way needs Moments or None, a Residency, its KeptTensors and SavedTensors");
        return nullptr;
    }
    Way *self = reinterpret_cast<Way *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->moments = is_planned ? reinterpret_cast<Moments *>(Py_NewRef(moments)) : nullptr;
#define KEEP(name) self->name = Py_NewRef(name);
    KEEP(progress) KEEP(lock) KEEP(fixed) KEEP(kept) KEEP(residency) KEEP(repeats) KEEP(tape) KEEP(owner)
#undef KEEP
    self->staying = new Staying;
    self->device = device;
    self->is_exact = is_exact;
    return reinterpret_cast<PyObject *>(self);
}

}  // namespace
