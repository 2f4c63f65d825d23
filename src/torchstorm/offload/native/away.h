// The mode that sees PyTorch's functions is away where a step calls none that is to be recorded: PyTorch's way to a mode
// takes the host longer than most functions do. What operations write to is seen all the same, below Python.

#pragma once

#include "objects.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <memory>
#include <unordered_map>
#include <vector>

namespace {

struct Entry;
struct Operators;

// In place of `WatchedCalls.__torch_function__` of one mode: it has the same attributes, which Dynamo asks for.
struct Watch {
    PyObject_HEAD
    PyObject *mode, *tape, *progress, *counts;
    PyObject *numbers, *names, *moments;  // of the calls within which operations are recorded
    PyObject *present;                    // moments after which the mode has to be there; None as long as that is not known
    PyObject *within;                     // moments that have come within functions that may call others
    PyObject *moment;                     // after which the counted calls come
    PyObject *operators;                  // which the recorded functions call; nullptr where that is not to be learnt
    Entry *runs;                          // what was learnt of the function that runs
    int64_t now;                          // the latest moment
    vectorcallfunc call;
    bool has_seen;  // a call
    bool is_asked;  // to go
    bool is_over;
};

using Modes = at::impl::PythonTorchFunctionTLS;
// Above autograd and autocast. PyTorch itself uses the key in tests alone.
constexpr c10::DispatchKey writing = c10::DispatchKey::TESTING_ONLY_GenericMode;
thread_local Watch *away = nullptr;  // whose mode would be the first of this thread's; owned
thread_local Watch *seeing = nullptr;  // of the step that this thread runs, where operators are learnt; owned

bool is_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

bool is_first(PyObject *mode) { return Modes::stack_len() && Modes::get_stack_at(0)->ptr(getPyInterpreter()) == mode; }

bool is_present_now(Watch *self) { return checked(PySet_Contains(self->present, see(self->progress, running_moment))); }

// Puts a mode before all others of this thread, but for the one that says on which device new tensors are made: PyTorch has
// that at the bottom.
void put_first(PyObject *mode) {
    std::vector<std::shared_ptr<c10::SafePyObject>> others;
    while (Modes::stack_len()) others.push_back(Modes::pop_stack());
    if (!others.empty() && Py_TYPE(others.back()->ptr(getPyInterpreter())) == of.device_context) {
        Modes::push_onto_stack(others.back());
        others.pop_back();
    }
    Modes::push_onto_stack(std::make_shared<c10::SafePyObject>(Py_NewRef(mode), getPyInterpreter()));
    for (; !others.empty(); others.pop_back()) Modes::push_onto_stack(others.back());
}

void take_first() {
    std::vector<std::shared_ptr<c10::SafePyObject>> all;
    while (Modes::stack_len()) all.push_back(Modes::pop_stack());
    for (all.pop_back(); !all.empty(); all.pop_back()) Modes::push_onto_stack(all.back());
}

// Not in backward: what PyTorch's engine found when it was entered is restored when it returns.
void come_back() {
    if (away == nullptr || is_backward()) return;
    Own self(reinterpret_cast<PyObject *>(std::exchange(away, nullptr)));
    PyObject *mode = reinterpret_cast<Watch *>(self.at)->mode;
    if (!is_first(mode)) put_first(mode);
}

// Called at every moment that has come.
void come_back_if_due() {
    if (is_backward()) return;
    if (away->is_over || is_present_now(away)) come_back();
}

// ------------------------------------------------------------------ what operations write to

// Tensors that an operation is about to change, and of whose bytes the tape knows.
PyObject *known_among_written(PyObject *tape, const c10::FunctionSchema &schema, const torch::jit::Stack &stack) {
    Own known(get(tape, s_known)), leaves(get(tape, s_leaves)), found(checked(PyList_New(0)));
    const auto add = [&](const at::Tensor &tensor) {
        if (!has_bytes(tensor)) return;
        Own address(address_of(tensor));
        if (find(known.at, address.at) == nullptr && find(leaves.at, address.at) == nullptr) return;
        Own object(checked(THPVariable_Wrap(tensor)));
        checked(PyList_Append(found.at, object.at));
    };
    const auto &arguments = schema.arguments();
    for (size_t at = 0; at < arguments.size(); ++at) {
        if (arguments[at].alias_info() == nullptr || !arguments[at].alias_info()->isWrite()) continue;
        const c10::IValue &given = stack[stack.size() - arguments.size() + at];
        if (given.isTensor())
            add(given.toTensor());
        else if (given.isTensorList())
            for (const at::Tensor &one : given.toTensorVector()) add(one);
    }
    return PyList_GET_SIZE(found.at) ? found.give() : nullptr;
}

void tell(PyObject *tape, PyObject *name, PyObject *written) {
    Own said(checked(PyObject_CallMethodOneArg(tape, name, written)));
}

// The Python error that is set, as PyTorch takes it from a kernel.
[[noreturn]] void throw_to_pytorch() {
    python_error error;
    error.persist();
    throw error;
}

// An operation that may write, called while a mode is away: what `Tape.dispatch` does about that.
void write(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard once(writing);
    const auto run = [&] { op.callBoxed(stack); };
    if (away == nullptr || is_backward()) return run();
    const auto with_python = [](auto body) {
        pybind11::gil_scoped_acquire gil;
        try {
            at::AutoDispatchBelowADInplaceOrView below;
            return body();
        } catch (const Failed &) {
            throw_to_pytorch();
        }
    };
    PyObject *tape = nullptr, *written = nullptr;
    with_python([&] {
        Own idle(get(away->tape, s_idle));
        if (checked(PyObject_IsTrue(idle.at))) return;
        written = known_among_written(away->tape, op.schema(), *stack);
        if (written == nullptr) return;
        tape = Py_NewRef(away->tape);
        tell(tape, s_is_about_to_change, written);
    });
    if (written == nullptr) return run();
    const auto forget = [&] { Py_DECREF(written), Py_DECREF(tape); };
    try {
        run();
    } catch (...) {
        pybind11::gil_scoped_acquire gil;
        forget();
        throw;
    }
    with_python([&] {
        Own owned_tape(tape), owned(written);
        tell(tape, s_has_changed, written);
    });
}

std::atomic<bool> has_new_operators = true;

struct Listener : c10::OpRegistrationListener {
    void onOperatorRegistered(const c10::OperatorHandle &) override { has_new_operators = true; }
    void onOperatorDeregistered(const c10::OperatorHandle &) override {}
};

// Whether what operations write to can be seen: from the first time on, which takes some milliseconds.
bool can_see_writes() {
    static auto &registered = *new std::unordered_map<c10::OperatorName, c10::RegistrationHandleRAII>();
    static c10::Dispatcher &dispatcher = c10::Dispatcher::singleton();
    static const bool is_ours = [] {
        if (dispatcher.hasBackendFallbackForDispatchKey(writing)) return false;
        // For whatever does not write there is no such key.
        static auto &others = *new c10::RegistrationHandleRAII(
            dispatcher.registerFallback(writing, c10::KernelFunction::makeFallthrough(), "torchstorm"));
        static auto &listener = *new c10::RegistrationHandleRAII(dispatcher.addRegistrationListener(std::make_unique<Listener>()));
        return true;
    }();
    if (!is_ours || !has_new_operators.exchange(false)) return is_ours;
    for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findSchema(name);
        if (!op || !op->schema().is_mutable() || registered.count(name) || op->hasKernelForDispatchKey(writing)) continue;
        registered.emplace(
            name, dispatcher.registerImpl(
                      name, writing, c10::KernelFunction::makeFromBoxedFunction<&write>(), std::nullopt, nullptr, "torchstorm"));
    }
    return true;
}

// see_writes(whether): from now on, in this thread, what operations write to is seen while a mode is away, or no more. Returns
// whether it is. The first is called when a step begins, and the other when it ends: so whatever has been set within, as by
// `torch.inference_mode`, is left by then.
PyObject *see_writes(PyObject *, PyObject *whether) {
    return guarded([&]() -> PyObject * {
        const bool sees = whether == Py_True && can_see_writes();
        c10::impl::tls_set_dispatch_key_included(writing, sees);
        return PyBool_FromLong(sees);
    });
}

// ------------------------------------------------------------------ going

// Python calls it between two of its instructions, outside of any function that has passed the mode.
int go(void *object) {
    Own owned(static_cast<PyObject *>(object));
    Watch *self = static_cast<Watch *>(object);
    self->is_asked = false;
    try {
        if (away != nullptr || self->is_over || is_backward() || !is_first(self->mode)) return 0;
        if (is_present_now(self) || !can_see_writes()) return 0;
        take_first();
        away = reinterpret_cast<Watch *>(owned.give());
        return 0;
    } catch (const Failed &) {
        return -1;
    } catch (const std::exception &) {
        self->is_asked = true;  // it stays
        return 0;
    }
}

void note_within(Watch *self, int64_t first, int64_t last) {
    for (int64_t at = first; at <= last; ++at) {
        Own moment(an_int(at));
        checked(PyList_Append(self->within, moment.at));
    }
}

// A function was called that had come with `before` as the latest moment.
void see_what_comes(Watch *self, PyObject *func, int64_t before) {
    if (self->present == Py_None) {
        const bool is_in_c = PyCFunction_Check(func) || Py_TYPE(func) == &PyMethodDescr_Type || Py_TYPE(func) == &PyWrapperDescr_Type;
        const int64_t after = see_int(self->progress, running_moment);
        if (!is_in_c) note_within(self, before + 1, after);
    } else if (!self->is_asked && !self->is_over && !is_present_now(self)) {
        self->is_asked = true;
        if (Py_AddPendingCall(go, Py_NewRef(self)) < 0) {  // there are too many
            self->is_asked = false;
            Py_DECREF(self);
        }
    }
}

void count_missed(Operators *self, int64_t now);

// leave(): the mode stays, or is there again as soon as backward is over. Returns the moments that have come within functions that may call others.
PyObject *watch_leave(PyObject *object, PyObject *) {
    return guarded([&]() -> PyObject * {
        Watch *self = reinterpret_cast<Watch *>(object);
        self->is_over = true;
        if (seeing == self) {
            Own owned(reinterpret_cast<PyObject *>(std::exchange(seeing, nullptr)));
            count_missed(reinterpret_cast<Operators *>(self->operators), self->now);
        }
        if (away != nullptr && away->mode == self->mode) {
            away->is_over = true;
            come_back();
        }
        return Py_NewRef(self->within == nullptr ? Py_None : self->within);
    });
}

}  // namespace
