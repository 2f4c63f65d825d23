// What is asked at each call of a compiled block: whether it has hooks, and how what it is given looks.

#pragma once

#include "objects.h"

namespace {

constexpr int most_levels = 32;  // of modules within modules, and of arguments within arguments

// Whether a module, or one within it, may have hooks.
bool is_hooked(PyObject *module, int level) {
    if (level > most_levels) return true;
    for (PyObject *name : {s__forward_pre_hooks, s__forward_hooks, s__backward_pre_hooks, s__backward_hooks}) {
        Own hooks(get(module, name));
        if (!PyDict_Check(hooks.at) || PyDict_GET_SIZE(hooks.at)) return true;
    }
    Own inner(get(module, s__modules));
    if (!PyDict_Check(inner.at)) return true;
    PyObject *one;
    for (Py_ssize_t at = 0; PyDict_Next(inner.at, &at, nullptr, &one);)
        if (one != Py_None && is_hooked(one, level + 1)) return true;
    return false;
}

// may_have_hooks(module): `torch_private.hook_numbers` tells which.
PyObject *may_have_hooks(PyObject *, PyObject *module) {
    return guarded([&] { return PyBool_FromLong(is_hooked(module, 0)); });
}

void append_sizes(PyObject *sizes, c10::IntArrayRef numbers) {
    for (const int64_t number : numbers) {
        Own size(an_int(number));
        checked(PyList_Append(sizes, size.at));
    }
}

// As `agreement.kinds_of` without C++, which is called for everything else.
PyObject *kind_of(PyObject *value, PyObject *sizes, PyObject *otherwise, int level) {
    if (value == Py_None || PyBool_Check(value) || PyLong_Check(value) || PyFloat_Check(value) || PyUnicode_Check(value))
        return Py_NewRef(value);
    if (Py_TYPE(value) == of.tensor) {
        const at::Tensor &tensor = THPVariable_Unpack(value);
        if (tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
            append_sizes(sizes, tensor.sizes());
            append_sizes(sizes, tensor.strides());
            Own layout(get(value, s_layout)), dtype(get(value, s_dtype)), dim(an_int(tensor.dim()));
            return checked(PyTuple_Pack(4, dim.at, layout.at, dtype.at, tensor.requires_grad() ? Py_True : Py_False));
        }
    } else if (PyTuple_CheckExact(value) && level < most_levels) {
        Own found(checked(PyTuple_New(PyTuple_GET_SIZE(value))));
        for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(value); ++at)
            PyTuple_SET_ITEM(found.at, at, kind_of(PyTuple_GET_ITEM(value, at), sizes, otherwise, level + 1));
        return found.give();
    } else if (PyDict_CheckExact(value) && level < most_levels) {
        Own items(checked(PyDict_Items(value))), found(checked(PyTuple_New(PyList_GET_SIZE(items.at))));
        for (Py_ssize_t at = 0; at < PyList_GET_SIZE(items.at); ++at) {
            PyObject *item = PyList_GET_ITEM(items.at, at);
            Own kind(kind_of(PyTuple_GET_ITEM(item, 1), sizes, otherwise, level + 1));
            PyTuple_SET_ITEM(found.at, at, checked(PyTuple_Pack(2, PyTuple_GET_ITEM(item, 0), kind.at)));
        }
        return found.give();
    }
    return checked(PyObject_CallFunctionObjArgs(otherwise, value, sizes, nullptr));
}

// kinds(value, sizes, otherwise)
PyObject *kinds(PyObject *, PyObject *const *given, Py_ssize_t num) {
    return guarded([&]() -> PyObject * {
        if (num != 3 || !PyList_CheckExact(given[1])) {
            PyErr_SetString(PyExc_TypeError, "kinds(value, sizes, otherwise)");
            return nullptr;
        }
        return kind_of(given[0], given[1], given[2], 0);
    });
}

}  // namespace
