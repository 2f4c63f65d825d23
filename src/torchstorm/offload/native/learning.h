// The operators that recorded functions call, learnt while the mode sees the functions.

#pragma once

#include "away.h"
#include "records.h"

#include <ATen/record_function.h>

#include <map>
#include <utility>

namespace {

// How an argument of an operator comes about.
struct Input {
    enum Kind { tensor, tensors, number, constant } kind = constant;
    Py_ssize_t place = -1;  // among what the function is given, of tensors
    bool is_list = false;   // of several, whether they are in a list
    c10::IValue is;         // of all others
};

// A recorded function's operator, when it is called.
struct Entry {
    int64_t number = 0, moment = 0;  // of the record
    const c10::OperatorName *name = nullptr;
    std::vector<Input> inputs;
    PyObject *func = nullptr, *names = nullptr;  // what is called, and what it is given by name; owned
    PyObject *others = nullptr;                  // what it is given beside tensors, which are None here; owned
    int64_t count = 0;  // as the how manieth of its name after the moment; 0 where that is not known
    bool has_come = false;
    int num_missed = 0;  // steps in a row
};

constexpr int MOST_MISSED = 3;

// Of the calls that a plan has recorded.
struct Operators {
    PyObject_HEAD
    std::unordered_map<int64_t, Entry> *entries;                                         // by number
    std::map<std::tuple<int64_t, const c10::OperatorName *, int64_t>, Entry *> *placed;  // by moment, name and count
    std::unordered_map<int64_t, int64_t> *left;  // calls of a moment without a place; -1 where that is of no use
    std::unordered_map<const c10::OperatorName *, int64_t> *num_calls;  // since a moment
    int64_t counted_at;                                                 // that moment
    bool has_changed;
};

PyTypeObject *operators_type;

int64_t moment_of_record(int64_t number) { return number / of.num_places / (of.num_names * of.num_counts); }

// Operators(numbers): of the calls within which operations are recorded.
PyObject *operators_new(PyTypeObject *type, PyObject *args, PyObject *) {
    PyObject *numbers;
    if (!PyArg_ParseTuple(args, "O", &numbers)) return nullptr;
    return guarded([&]() -> PyObject * {
        Own self(checked(type->tp_alloc(type, 0)));
        auto *made = reinterpret_cast<Operators *>(self.at);
        made->entries = new std::remove_pointer_t<decltype(made->entries)>();
        made->placed = new std::remove_pointer_t<decltype(made->placed)>();
        made->left = new std::remove_pointer_t<decltype(made->left)>();
        made->num_calls = new std::remove_pointer_t<decltype(made->num_calls)>();
        made->counted_at = -1;
        Own each(checked(PyObject_GetIter(numbers)));
        while (Own one{PyIter_Next(each.at)}) ++(*made->left)[moment_of_record(as_int(one.at) * of.num_places)];
        if (PyErr_Occurred()) throw Failed();
        return self.give();
    });
}

void operators_dealloc(Operators *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->entries != nullptr)
        for (auto &[_, entry] : *self->entries)
            for (PyObject *one : {entry.func, entry.names, entry.others}) Py_XDECREF(one);
    delete self->entries;
    delete self->placed;
    delete self->left;
    delete self->num_calls;
    type->tp_free(self);
    Py_DECREF(type);
}

Operators *operators_of(const Watch *self) { return reinterpret_cast<Operators *>(self->operators); }

// The calls of a moment are seen as functions again.
void give_up(Operators *self, int64_t moment) {
    self->has_changed |= (*self->left)[moment] == 0;
    (*self->left)[moment] = -1;
    std::erase_if(*self->placed, [&](const auto &one) { return one.second->moment == moment; });
}

// covered(): the moments all of whose calls are seen as operators; None where these are the same as when it was last asked.
PyObject *operators_covered(PyObject *object, PyObject *) {
    return guarded([&]() -> PyObject * {
        Operators *self = reinterpret_cast<Operators *>(object);
        if (!std::exchange(self->has_changed, false)) Py_RETURN_NONE;
        Own found(checked(PyList_New(0)));
        for (const auto &[moment, num_left] : *self->left) {
            Own number(an_int(moment));
            if (!num_left) checked(PyList_Append(found.at, number.at));
        }
        return found.give();
    });
}

// A step is over whose last moment was `now`: where what was learnt did not come, although its moment did, it is of no use.
void count_missed(Operators *self, int64_t now) {
    for (auto &[_, entry] : *self->entries) {
        const bool has_come = std::exchange(entry.has_come, false);
        if (!entry.count || entry.moment >= now) continue;
        entry.num_missed = has_come ? 0 : entry.num_missed + 1;
        if (entry.num_missed == MOST_MISSED) give_up(self, entry.moment);
    }
}

// ------------------------------------------------------------------ learning

// What a function calls.
struct Seen {
    int num = 0;
    std::optional<c10::OperatorName> name;
    std::vector<c10::IValue> inputs, outputs;
};

// While it is there, what this thread calls is seen, but for what that calls in its turn.
struct Seeing {
    static thread_local Seeing *now;
    Seen seen;
    int depth = 0;
    at::CallbackHandle handle;

    Seeing() {
        now = this;
        at::RecordFunctionCallback callback(&begins, &ends);
        callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION});
        handle = at::addThreadLocalCallback(callback);
    }
    Seeing(const Seeing &) = delete;
    Seeing &operator=(const Seeing &) = delete;
    ~Seeing() {
        at::removeCallback(handle);
        now = nullptr;
    }
    static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction &call) {
        if (now == nullptr || now->depth++) return nullptr;
        ++now->seen.num;
        now->seen.name = call.operator_name();
        now->seen.inputs.assign(call.inputs().begin(), call.inputs().end());
        return nullptr;
    }
    static void ends(const at::RecordFunction &call, at::ObserverContext *) {
        if (now == nullptr || --now->depth) return;
        now->seen.outputs.assign(call.outputs().begin(), call.outputs().end());
    }
};

thread_local Seeing *Seeing::now = nullptr;

void operate(const c10::OperatorHandle &op, torch::jit::Stack *stack);

// Whether calls of an operator are seen from now on, or by now.
bool see_calls(const c10::OperatorHandle &op) {
    static auto &registered = *new std::unordered_map<const c10::OperatorName *, c10::RegistrationHandleRAII>();
    const c10::OperatorName *name = &op.operator_name();
    if (registered.count(name)) return true;
    const auto &schema = op.schema();
    const auto &made = schema.returns();
    if (schema.is_mutable() || made.size() != 1 || !made[0].type()->isSubtypeOf(*c10::TensorType::get())) return false;
    if (op.hasKernelForDispatchKey(writing)) return false;
    auto &dispatcher = c10::Dispatcher::singleton();
    registered.emplace(
        name, dispatcher.registerImpl(
                  *name, writing, c10::KernelFunction::makeFromBoxedFunction<&operate>(), std::nullopt, nullptr, "torchstorm"));
    return true;
}

bool is_number(const at::Tensor &tensor) { return tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

// Whether two numbers that became tensors are one to an operator.
bool is_same_number(const at::Tensor &one, const at::Tensor &other) {
    if (one.scalar_type() != other.scalar_type() || one.nbytes() != other.nbytes()) return false;
    return one.is_cpu() && other.is_cpu() && memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

// Whether two arguments without tensors are the same: zeros of both signs are not.
bool is_same_constant(const c10::IValue &one, const c10::IValue &other) {
    if (one.tagKind() != other.tagKind()) return false;
    if (one.isNone()) return true;
    if (one.isDouble()) return is_same_number(one.toDouble(), other.toDouble());
    if (one.isDoubleList()) {
        const auto is = one.toDoubleVector(), was = other.toDoubleVector();
        return std::equal(is.begin(), is.end(), was.begin(), was.end(), [](double is, double was) { return is_same_number(is, was); });
    }
    if (one.isInt()) return one.toInt() == other.toInt();
    if (one.isBool()) return one.toBool() == other.toBool();
    if (one.isIntList()) return one.toIntVector() == other.toIntVector();
    if (one.isDevice()) return one.toDevice() == other.toDevice();
    return one.isString() && one.toStringRef() == other.toStringRef();
}

// The only place at which a function is given a tensor, or a list of these; -1 where there is none, or several.
Py_ssize_t given_at(PyObject *all, const c10::IValue &is) {
    Py_ssize_t found = -1;
    const auto is_it = [](PyObject *object, const at::Tensor &tensor) {
        return is_plain_type(object) && THPVariable_Unpack(object).is_same(tensor);
    };
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(all); ++at) {
        PyObject *item = PyTuple_GET_ITEM(all, at);
        bool is_here = is.isTensor() && is_it(item, is.toTensor());
        if (is.isTensorList() && (PyList_CheckExact(item) || PyTuple_CheckExact(item))) {
            const auto tensors = is.toTensorVector();
            is_here = static_cast<Py_ssize_t>(tensors.size()) == PySequence_Fast_GET_SIZE(item);
            for (size_t one = 0; is_here && one < tensors.size(); ++one)
                is_here = is_it(PySequence_Fast_GET_ITEM(item, static_cast<Py_ssize_t>(one)), tensors[one]);
        }
        if (!is_here) continue;
        if (found >= 0) return -1;
        found = at;
    }
    return found;
}

bool has_tensors(PyObject *item) {
    if (THPVariable_Check(item)) return true;
    if (!PyList_Check(item) && !PyTuple_Check(item)) return false;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(item); ++at)
        if (has_tensors(PySequence_Fast_GET_ITEM(item, at))) return true;
    return false;
}

// How an operator's arguments come about; nothing where that is not clear.
std::optional<std::vector<Input>> inputs_of(const std::vector<c10::IValue> &given, PyObject *all) {
    std::vector<Input> found;
    std::vector<bool> is_taken(static_cast<size_t>(PyTuple_GET_SIZE(all)));
    for (const c10::IValue &one : given) {
        Input input;
        const bool is_tensor = one.isTensor() && one.toTensor().defined();
        if (is_tensor && is_number(one.toTensor())) {
            input.kind = Input::number;
            input.is = one;
        } else if (is_tensor || one.isTensorList()) {
            input.kind = is_tensor ? Input::tensor : Input::tensors;
            input.place = given_at(all, one);
            if (input.place < 0 || is_taken[static_cast<size_t>(input.place)]) return std::nullopt;
            is_taken[static_cast<size_t>(input.place)] = true;
            input.is_list = PyList_CheckExact(PyTuple_GET_ITEM(all, input.place));
        } else {
            if (!is_same_constant(one, one)) return std::nullopt;  // of a kind that is not known
            input.is = one;
        }
        found.push_back(std::move(input));
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(all); ++at)
        if (!is_taken[static_cast<size_t>(at)] && has_tensors(PyTuple_GET_ITEM(all, at))) return std::nullopt;
    return found;
}

// What a record is given beside tensors, which are None here. What may be changed is the record's own.
PyObject *others_of(PyObject *record, const std::vector<Input> &inputs) {
    PyObject *given = see(record, record_given);
    Own others(checked(PyTuple_New(PyTuple_GET_SIZE(given))));
    for (const Input &input : inputs)
        if (input.place >= 0) PyTuple_SET_ITEM(others.at, input.place, Py_NewRef(Py_None));
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(given); ++at)
        if (PyTuple_GET_ITEM(others.at, at) == nullptr) PyTuple_SET_ITEM(others.at, at, Py_NewRef(PyTuple_GET_ITEM(given, at)));
    return others.give();
}

// A function that is recorded under this number has run, and was seen to call this.
void learn(Operators *self, int64_t number, const Seen &seen, PyObject *record, PyObject *all, PyObject *out) {
    Entry &entry = (*self->entries)[number];  // also where there is nothing to learn: it is looked at once
    entry.number = number;
    entry.moment = moment_of_record(number);
    if (seen.num != 1 || !seen.name || seen.outputs.size() != 1 || Py_TYPE(out) != of.tensor) return;
    if (!seen.outputs[0].isTensor() || !seen.outputs[0].toTensor().is_same(THPVariable_Unpack(out))) return;
    const auto op = c10::Dispatcher::singleton().findSchema(*seen.name);
    if (!op || op->schema().arguments().size() != seen.inputs.size()) return;
    auto inputs = inputs_of(seen.inputs, all);
    if (!inputs || !see_calls(*op)) return;
    entry.others = others_of(record, *inputs);
    entry.inputs = std::move(*inputs);
    entry.func = take(record, record_func);
    entry.names = take(record, record_names);
    entry.name = &op->operator_name();
}

// `run` for a function that the mode sees, and whose operator is learnt, and then the place of that.
PyObject *run_and_learn(Watch *self, PyObject *repeats, PyObject *first, PyObject *func, PyObject *args, PyObject *kwargs) {
    PyObject *given[] = {repeats, self->tape, first, func, args, kwargs == nullptr ? Py_None : kwargs};
    Operators *operators = operators_of(self);
    if (operators == nullptr) return run(nullptr, given, 6);
    const int64_t number = as_int(first);
    const auto found = operators->entries->find(number);
    if (found == operators->entries->end()) {
        Seen seen;
        Own out(checked(run_function(given, [&] {
            Seeing here;
            Own made(PyObject_Call(func, args, kwargs));
            std::swap(seen, here.seen);
            return made.give();
        })));
        if (out.at == of.long_way) return out.give();
        Own records(get(repeats, s__records));
        PyObject *record = find(records.at, first);
        Own all(record == nullptr ? nullptr : everything(record, args, kwargs));
        if (all) learn(operators, number, seen, record, all.at, out.at);
        return out.give();
    }
    self->runs = found->second.name == nullptr ? nullptr : &found->second;
    PyObject *out = run(nullptr, given, 6);
    self->runs = nullptr;
    return out;
}

}  // namespace
