// Operations that run again, as `replay.run` and `View.over` have them.

#pragma once

#include "objects.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace {

std::vector<int64_t> ints(PyObject *tuple) {
    std::vector<int64_t> found(static_cast<size_t>(PyTuple_GET_SIZE(tuple)));
    for (size_t at = 0; at < found.size(); ++at) found[at] = as_int(PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(at)));
    return found;
}

// As `View.over`; nullptr without an error where that must be called.
PyObject *seen_over(PyObject *view, PyObject *object) {
    if (Py_TYPE(object) != of.tensor) return nullptr;
    PyObject *dtype = PyTuple_GET_ITEM(view, 0);
    Own has(get(object, s_dtype));
    if (dtype == of.uint8 || (has.at != dtype && has.at != of.uint8)) return nullptr;
    const at::ScalarType type = reinterpret_cast<THPDtype *>(dtype)->scalar_type;
    const int64_t itemsize = static_cast<int64_t>(c10::elementSize(type));
    int64_t offset = as_int(PyTuple_GET_ITEM(view, 3)) / itemsize;
    at::NoGradGuard no_grad;
    at::Tensor base = THPVariable_Unpack(object);
    if (has.at == of.uint8) {
        offset += base.storage_offset() / itemsize;
        const int64_t rest = base.numel() % itemsize;
        base = (rest ? base.slice(0, 0, base.numel() - rest) : base).view(type);
    }
    const at::Tensor tensor = base.as_strided(ints(PyTuple_GET_ITEM(view, 1)), ints(PyTuple_GET_ITEM(view, 2)), offset);
    if (tensor.is_conj() != (PyTuple_GET_ITEM(view, 4) == Py_True)) return nullptr;
    if (tensor.is_neg() != (PyTuple_GET_ITEM(view, 5) == Py_True)) return nullptr;
    return checked(THPVariable_Wrap(tensor));
}

// over(view, base): the tensor; None where `View.over` must make it.
PyObject *over(PyObject *, PyObject *const *given, Py_ssize_t) {
    return guarded([&]() -> PyObject * {
        PyObject *tensor = seen_over(given[0], given[1]);
        return tensor != nullptr ? tensor : Py_NewRef(Py_None);
    });
}

// As `replay._argument`; nullptr without an error where that must be called.
PyObject *argument(PyObject *item, PyObject *there) {
    if (Py_TYPE(item) == of.ref) {
        PyObject *base = find(there, PyTuple_GET_ITEM(item, 0));
        return base == nullptr ? nullptr : seen_over(PyTuple_GET_ITEM(item, 1), base);
    }
    if (Py_TYPE(item) == of.leaf) {
        PyObject *object = see(item, leaf_tensor);
        if (!is_plain_type(object)) return nullptr;
        const at::Tensor &tensor = THPVariable_Unpack(object);
        if (!has_bytes(tensor) || tensor.is_inference() || version_of(tensor) != see_int(item, leaf_version)) return nullptr;
        const auto *address = PyLong_AsVoidPtr(see(item, leaf_address));
        return address != nullptr && address != storage_of(tensor) ? nullptr : Py_NewRef(object);
    }
    if (!PyList_CheckExact(item) && !PyTuple_CheckExact(item)) return Py_NewRef(item);
    const Py_ssize_t num = PySequence_Fast_GET_SIZE(item);
    Own all(checked(PyList_New(num)));
    for (Py_ssize_t at = 0; at < num; ++at) {
        PyObject *one = argument(PySequence_Fast_GET_ITEM(item, at), there);
        if (one == nullptr) return nullptr;
        PyList_SET_ITEM(all.at, at, one);
    }
    return PyList_CheckExact(item) ? all.give() : checked(PyList_AsTuple(all.at));
}

// While it is there, a generator draws from a state; afterwards from its own again. As `replay._call` has it.
struct DrawsFrom {
    at::Generator generator;
    at::Tensor before;
    DrawsFrom(const at::Generator &source, PyObject *state) : generator(source) {
        const std::scoped_lock<std::mutex> lock(generator.mutex());
        before = generator.get_state();
        generator.set_state(THPVariable_Unpack(state));
    }
    ~DrawsFrom() {
        const std::scoped_lock<std::mutex> lock(generator.mutex());
        generator.set_state(before);
    }
};

// As `operators.product`; nullptr without an error for other arguments.
PyObject *product(PyObject *args) {
    Py_ssize_t num = PyTuple_GET_SIZE(args);
    if (num < 2 || num > 3) return nullptr;
    if (num == 3 && PyTuple_GET_ITEM(args, 2) == Py_None) num = 2;
    for (Py_ssize_t at = 0; at < num; ++at)
        if (!is_plain_type(PyTuple_GET_ITEM(args, at))) return nullptr;
    const at::Tensor &given = THPVariable_Unpack(PyTuple_GET_ITEM(args, 0)), &weight = THPVariable_Unpack(PyTuple_GET_ITEM(args, 1));
    const at::Tensor rows = given.view({-1, given.size(-1)});
    if (num == 2) return checked(THPVariable_Wrap(at::mm(rows, weight.t())));
    return checked(THPVariable_Wrap(at::addmm(THPVariable_Unpack(PyTuple_GET_ITEM(args, 2)), rows, weight.t())));
}

// again(call, there): what holds each output's bytes, in a list; `LONG_WAY` where `replay.run` must run it.
PyObject *again(PyObject *, PyObject *const *given, Py_ssize_t) {
    return guarded([&]() -> PyObject * {
        PyObject *call = given[0], *there = given[1], *operation = see(call, call_operator);
        const auto otherwise = [] { return Py_NewRef(of.long_way); };
        if (see(operation, operation_in_place) != Py_False) return otherwise();
        if (!PyDict_CheckExact(there) || at::autocast::is_autocast_enabled(at::kCPU) ||
            at::autocast::is_autocast_enabled(at::kCUDA))
            return otherwise();
        Own args(argument(see(call, call_args), there)), kwargs;
        if (!args) return otherwise();
        PyObject *named = see(call, call_kwargs), *name, *item;
        if (PyDict_GET_SIZE(named)) {
            kwargs.at = checked(PyDict_New());
            for (Py_ssize_t next = 0; PyDict_Next(named, &next, &name, &item);) {
                Own value(argument(item, there));
                if (!value) return otherwise();
                checked(PyDict_SetItem(kwargs.at, name, value.at));
            }
        }
        PyObject *state = see(call, call_state), *func = see(call, call_func);
        const at::Generator generator = state == Py_None ? at::Generator() : generator_of(see(call, call_device), named);
        if (state != Py_None && !generator.defined()) return otherwise();
        Own out;
        {
            std::optional<DrawsFrom> draws;
            if (generator.defined()) draws.emplace(generator, state);
            // With gradients on, which some operations look at, but below autograd: `replay._call`.
            at::AutoGradMode with_gradients(true);
            at::AutoDispatchBelowAutograd below;
            if (func == of.product && !kwargs) out.at = product(args.at);
            if (!out) out.at = checked(PyObject_Call(func, args.at, kwargs.at));
        }
        Own places(take(call, call_places));
        const Py_ssize_t num = PyList_GET_SIZE(places.at);
        Own tensors(tensors_of(out.at));
        Own found(checked(PyList_New(num)));
        for (Py_ssize_t at = 0; at < num; ++at) {
            const int64_t place = as_int(PyList_GET_ITEM(places.at, at));
            if (place >= PyList_GET_SIZE(tensors.at)) return otherwise();
            PyObject *tensor = PyList_GET_ITEM(tensors.at, place);
            const bool is_bytes = THPVariable_Unpack(tensor).scalar_type() == at::kByte;
            PyList_SET_ITEM(found.at, at, is_bytes ? checked(PyObject_CallOneArg(of.content_of, tensor)) : Py_NewRef(tensor));
        }
        return found.give();
    });
}

}  // namespace
