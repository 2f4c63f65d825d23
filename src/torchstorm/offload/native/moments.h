// What a settled step looks up, in arrays: the moments of a plan (`Moments`, of a `Table`).

#pragma once

#include "objects.h"

#include <vector>

namespace {

struct Moment {
    enum Kind { leaves, stays, unpacks } kind = leaves;
    int64_t ordinal = 0, nbytes = 0, counted_bytes = 0;
    PyObject *movable = nullptr, *block = nullptr, *stay = nullptr;  // borrowed of the table's tuples
    bool is_noticed = false, is_read = false, is_busy = false, is_turn = false;
    std::vector<PyObject *> drops, fetches;  // numbers of parcels, likewise borrowed
    // What is computed again or moves, where that is saved.
    PyObject *maker = nullptr, *name = nullptr, *parcel = nullptr, *left_block = nullptr;  // borrowed likewise
    PyObject *tier = nullptr;  // to which it moves, alone; nullptr for all else
    bool is_saved_again = false;
    int64_t made_ordinal = 0, made_bytes = 0;
};

struct Moments {
    PyObject_HEAD
    std::vector<Moment> *all;
    PyObject *sources;  // the table's lists, which hold what is borrowed
};

int moments_traverse(Moments *self, visitproc visit, void *arg) {
    Py_VISIT(self->sources);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

void moments_dealloc(Moments *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    delete self->all;
    Py_XDECREF(self->sources);
    type->tp_free(self);
    Py_DECREF(type);
}

// What a dictionary of lists has at a key.
void read_numbers(std::vector<PyObject *> &numbers, PyObject *of_moments, PyObject *moment) {
    PyObject *some = find(of_moments, moment);
    for (Py_ssize_t at = 0; some != nullptr && at < PyList_GET_SIZE(some); ++at) numbers.push_back(PyList_GET_ITEM(some, at));
}

void read_moments(
    Moments *self, PyObject *signatures, PyObject *stayers, PyObject *made, PyObject *leaving, PyObject *busy,
    PyObject *saved_again, PyObject *drops, PyObject *fetches, int64_t turn, PyObject *unpack) {
    const Py_ssize_t num = PyList_Size(signatures);
    if (num < 0) throw Failed();
    self->all = new std::vector<Moment>(static_cast<size_t>(num));
    for (Py_ssize_t at = 0; at < num; ++at) {
        Moment &one = (*self->all)[static_cast<size_t>(at)];
        Own number(an_int(at));
        one.is_busy = checked(PySet_Contains(busy, number.at));
        one.is_turn = at == turn;
        read_numbers(one.drops, drops, number.at);
        read_numbers(one.fetches, fetches, number.at);
        PyObject *signature = PyList_GET_ITEM(signatures, at), *stay = PyList_GET_ITEM(stayers, at);
        if (stay != Py_None) {
            one.kind = Moment::stays;
            one.stay = stay;
            one.ordinal = as_int(PyTuple_GET_ITEM(stay, 0));
            one.nbytes = as_int(PyTuple_GET_ITEM(stay, 1));
            one.counted_bytes = as_int(PyTuple_GET_ITEM(stay, 2));
            one.movable = PyTuple_GET_ITEM(stay, 3);
            one.block = PyTuple_GET_ITEM(stay, 4);
            one.is_noticed = PyTuple_GET_ITEM(stay, 5) == Py_True;
            one.is_read = PyTuple_GET_ITEM(stay, 6) == Py_True;
        } else {
            if (equal(PyTuple_GET_ITEM(signature, 0), unpack)) one.kind = Moment::unpacks;
            one.ordinal = as_int(PyTuple_GET_ITEM(signature, 1));
            one.nbytes = as_int(PyTuple_GET_ITEM(signature, 2));
        }
        if (PyObject *again = find(made, number.at)) {
            one.made_ordinal = as_int(PyTuple_GET_ITEM(again, 0));
            one.maker = PyTuple_GET_ITEM(PyTuple_GET_ITEM(again, 1), 0);
            one.name = PyTuple_GET_ITEM(PyTuple_GET_ITEM(again, 1), 1);
            one.made_bytes = as_int(PyTuple_GET_ITEM(again, 2));
        }
        if (one.kind != Moment::leaves) continue;
        PyObject *left = find(leaving, PyTuple_GET_ITEM(signature, 1));
        if (left == nullptr) continue;
        one.is_saved_again = checked(PySet_Contains(saved_again, PyTuple_GET_ITEM(signature, 1)));
        one.parcel = PyTuple_GET_ITEM(left, 0);
        one.left_block = PyTuple_GET_ITEM(left, 4);
        if (one.maker == nullptr && PyTuple_GET_ITEM(left, 2) == Py_False) one.tier = PyTuple_GET_ITEM(left, 1);
    }
}

PyObject *moments_new(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *signatures, *stayers, *made, *leaving, *busy, *saved_again, *drops, *fetches, *unpack;
    Py_ssize_t turn;
    if (!PyArg_ParseTuple(
            args, "O!O!O!O!O!O!O!O!nO", &PyList_Type, &signatures, &PyList_Type, &stayers, &PyDict_Type, &made, &PyDict_Type,
            &leaving, &PySet_Type, &busy, &PySet_Type, &saved_again, &PyDict_Type, &drops, &PyDict_Type, &fetches, &turn, &unpack))
        return nullptr;
    Moments *self = reinterpret_cast<Moments *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->sources = Py_NewRef(args);
    try {
        read_moments(self, signatures, stayers, made, leaving, busy, saved_again, drops, fetches, turn, unpack);
    } catch (const Failed &) {
        Py_DECREF(self);
        return nullptr;
    }
    return reinterpret_cast<PyObject *>(self);
}

PyTypeObject *moments_type;

}  // namespace
