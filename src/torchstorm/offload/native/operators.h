// Where the operators are known that recorded functions call, a kernel of the dispatcher takes the place of the mode that sees
// functions: PyTorch's way to a mode takes the host longer than most functions do.

#pragma once

#include "learning.h"

#include <ATen/autocast_mode.h>

namespace {

// An operator is called, and counted. Returns what was learnt of this call; nullptr for none.
Entry *arrive(Watch *self, const c10::OperatorName *name) {
    Operators *operators = operators_of(self);
    if (operators->counted_at != self->now) {
        operators->counted_at = self->now;
        operators->num_calls->clear();
    }
    const auto left = operators->left->find(self->now);
    if (left == operators->left->end() || left->second < 0) return nullptr;
    const int64_t count = ++(*operators->num_calls)[name];
    Entry *runs = self->runs;
    if (runs != nullptr && runs->name == name && runs->moment == self->now) {
        self->runs = nullptr;
        if (!runs->count) {
            runs->count = count;
            operators->placed->emplace(std::tuple(runs->moment, name, count), runs);
            operators->has_changed |= !--left->second;
        } else if (runs->count != count) {  // it differs from step to step
            give_up(operators, runs->moment);
            return nullptr;
        }
    }
    const auto found = operators->placed->find({self->now, name, count});
    if (found == operators->placed->end()) return nullptr;
    found->second->has_come = true;
    return found->second;
}

// Whether an operator is given what it was when it was learnt, but for tensors.
bool is_given_the_same(const Entry &entry, const torch::jit::Stack &stack) {
    const size_t num = entry.inputs.size();
    for (size_t at = 0; at < num; ++at) {
        const Input &input = entry.inputs[at];
        const c10::IValue &is = stack[stack.size() - num + at];
        const bool is_tensor = is.isTensor() && is.toTensor().defined(), is_a_number = is_tensor && is_number(is.toTensor());
        if (input.kind == Input::tensor && (!is_tensor || is_a_number)) return false;
        if (input.kind == Input::tensors && !is.isTensorList()) return false;
        if (input.kind == Input::number && !(is_a_number && is_same_number(is.toTensor(), input.is.toTensor()))) return false;
        if (input.kind == Input::constant && !is_same_constant(is, input.is)) return false;
    }
    return true;
}

// What the function would be given, by what its operator is: `everything` of a record.
PyObject *everything_of(const Entry &entry, const torch::jit::Stack &stack) {
    Own all(checked(PyTuple_New(PyTuple_GET_SIZE(entry.others))));
    const auto put_at = [&](Py_ssize_t place, PyObject *owned) { PyTuple_SET_ITEM(all.at, place, owned); };
    const size_t num = entry.inputs.size();
    for (size_t at = 0; at < num; ++at) {
        const Input &input = entry.inputs[at];
        const c10::IValue &is = stack[stack.size() - num + at];
        if (input.kind == Input::tensor) put_at(input.place, checked(THPVariable_Wrap(is.toTensor())));
        if (input.kind != Input::tensors) continue;
        Own list(checked(PyList_New(0)));
        for (const at::Tensor &one : is.toTensorVector()) {
            Own object(checked(THPVariable_Wrap(one)));
            checked(PyList_Append(list.at, object.at));
        }
        put_at(input.place, input.is_list ? list.give() : checked(PyList_AsTuple(list.at)));
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(entry.others); ++at)
        if (PyTuple_GET_ITEM(all.at, at) == nullptr) put_at(at, Py_NewRef(PyTuple_GET_ITEM(entry.others, at)));
    return all.give();
}

// As `watched.is_plain`, of the device of a tape.
bool is_plain(PyObject *tape) {
    Own device(get(tape, s__device));
    if (Modes::stack_len() || !THPDevice_Check(device.at)) {
        Own kind(get(tape, s_kind)), plain(checked(PyObject_CallOneArg(of.is_plain, kind.at)));
        return plain.at == Py_True;
    }
    return !is_backward() && as_int(checked(find(of.forward_ad, s__current_level))) < 0 && at::GradMode::is_enabled() &&
           !at::autocast::is_autocast_enabled(reinterpret_cast<THPDevice *>(device.at)->device.type()) &&
           !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Runs an operator as the function that is recorded would have it; false where it has not run.
bool run_recorded(Watch *self, const Entry &entry, const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    Own idle(get(self->tape, s_idle)), repeats(get(self->tape, s_repeats)), record;
    if (idle.at != Py_False || checked(PyObject_IsTrue(checked(find(of.compiler, s__is_compiling_flag))))) return false;
    if (repeats.at != Py_None) {
        Own records(get(repeats.at, s__records)), first(an_int(entry.number));
        record.at = Py_XNewRef(find(records.at, first.at));
    }
    Own all(everything_of(entry, *stack)), args, kwargs;
    // The mode may have seen another call since this was learnt, and recorded that under the same number.
    const bool is_same = record && see(record.at, record_func) == entry.func && equal(see(record.at, record_names), entry.names);
    if (is_same && is_plain(self->tape)) {
        const auto choice = [&] {
            separate(entry.names, all.at, args, kwargs);
            return checked(PyObject_Call(checked(find(of.choices, entry.func)), args.at, kwargs.at));
        };
        Own out(checked(run_record(repeats.at, self->tape, record.at, all.at, nullptr, choice, [&] {
            {
                pybind11::gil_scoped_release no_gil;
                op.callBoxed(stack);
            }
            return checked(THPVariable_Wrap(stack->back().toTensor()));
        })));
        if (out.at != of.long_way) return true;
    }
    if (!args) separate(entry.names, all.at, args, kwargs);
    Own number(an_int(entry.number / of.num_places));
    PyObject *named = kwargs ? kwargs.at : Py_None;
    Own out(checked(PyObject_CallMethodObjArgs(self->mode, s__within, number.at, entry.func, Py_False, args.at, named, nullptr)));
    if (!THPVariable_Check(out.at)) {
        PyErr_SetString(PyExc_TypeError, "a recorded function returned something else than its operator");
        throw Failed();
    }
    torch::jit::drop(*stack, entry.inputs.size());
    torch::jit::push(*stack, THPVariable_Unpack(out.at));
    return true;
}

// An operator that a recorded function calls.
void operate(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard once(writing);
    Watch *self = seeing;
    if (self == nullptr || self->is_over || is_backward()) return op.callBoxed(stack);
    Entry *entry = arrive(self, &op.operator_name());
    if (entry == nullptr || away != self) return op.callBoxed(stack);  // the mode sees the function
    if (!is_given_the_same(*entry, *stack)) {
        give_up(operators_of(self), entry->moment);
        return op.callBoxed(stack);
    }
    bool has_run;
    {
        pybind11::gil_scoped_acquire gil;
        Own owned(Py_NewRef(reinterpret_cast<PyObject *>(self)));
        try {
            has_run = run_recorded(self, *entry, op, stack);
        } catch (const Failed &) {
            throw_to_pytorch();
        }
    }
    if (!has_run) op.callBoxed(stack);
}

}  // namespace
