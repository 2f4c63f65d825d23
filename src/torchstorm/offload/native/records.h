// Records of an earlier step, used again, as `Repeats.run` does it.

#pragma once

#include "objects.h"

namespace {

enum Answer { no, yes, unknown };

// As `Value.renew`.
void renew(PyObject *value, const at::Tensor &tensor, PyObject *before) {
    put(value, value_watch, before == nullptr ? watch_of(tensor) : take(before, value_watch));
    put_int(value, value_version, version_of(tensor));
    put_int(value, value_nbytes, static_cast<int64_t>(tensor.storage().nbytes()));
    for (const Py_ssize_t place : {value_saved, value_held, value_lost}) put_shared(value, place, Py_None);
}

// Whether a tensor's bytes are those that a storage is known for, as `Tape.value_of` asks; of nullptr they are not.
bool is_as_known(PyObject *found, const at::Tensor &tensor) {
    return found != nullptr && see_int(found, value_version) == version_of(tensor);
}

// As `Tape.is_made_outside`.
Answer is_made_outside(PyObject *tape, const at::Tensor &tensor, PyObject *address) {
    if (static_cast<int64_t>(tensor.storage().nbytes()) < of.tiny_bytes) return yes;
    Own device(get(tape, s__device));
    if (!THPDevice_Check(device.at)) return unknown;
    if (reinterpret_cast<THPDevice *>(device.at)->device != tensor.device()) return yes;
    Own is_leaf(get(tape, s__is_leaf));
    PyObject *owner = PyMethod_Check(is_leaf.at) ? PyMethod_GET_SELF(is_leaf.at) : nullptr;
    if (owner != nullptr && Py_TYPE(owner) == of.saved_tensors) {  // as `SavedTensors.is_leaf`
        Own run(take(owner, saved_tensors__run));
        const bool is_fixed = checked(PySet_Contains(see(run.at, running_fixed), address));
        return is_fixed || find(see(run.at, running_inputs), address) != nullptr ? yes : no;
    }
    Own said(checked(PyObject_CallOneArg(is_leaf.at, address)));
    return said.at == Py_True ? yes : no;
}

// As `described._is_source_again`, however the bytes are looked at.
Answer is_source_again(PyObject *tape, PyObject *source, PyObject *arg) {
    if (Py_TYPE(arg) != of.tensor) return no;
    const at::Tensor &tensor = THPVariable_Unpack(arg);
    if (!has_bytes(tensor) || !is_of_numbers(tensor) || tensor.is_inference()) return no;
    Own address(address_of(tensor)), known(get(tape, s_known));
    const int64_t version = version_of(tensor);
    PyObject *there = find(known.at, address.at);
    if (there != source || see_int(source, value_version) != version) {
        const bool is_new = there == nullptr || see_int(there, value_version) != version;
        if (see(source, value_call) != Py_None || see(source, value_watch) != Py_None || !is_new) return no;
        const Answer is_outside = there == nullptr ? is_made_outside(tape, tensor, address.at) : no;
        if (is_outside != no) return is_outside == yes ? no : unknown;
        renew(source, tensor, there);
        checked(PyDict_SetItem(known.at, address.at, source));
    }
    if (see(source, value_call) == Py_None && see(source, value_saved) == Py_None && see(source, value_held) == Py_None) {
        Own held(checked(PyTuple_New(2)));
        PyTuple_SET_ITEM(held.at, 0, Py_NewRef(arg));
        PyTuple_SET_ITEM(held.at, 1, an_int(version));
        put(source, value_held, held.give());
    }
    return yes;
}

// As `described._is_leaf_again`.
Answer is_leaf_again(PyObject *tape, PyObject *leaf, PyObject *arg) {
    const bool is_same = see(leaf, leaf_tensor) == arg;
    if (is_same ? !is_plain_type(arg) : see(leaf, leaf_tensor) != of.nothing || Py_TYPE(arg) != of.tensor)
        return is_same ? unknown : no;
    const at::Tensor &tensor = THPVariable_Unpack(arg);
    if (!has_bytes(tensor)) return unknown;
    Own address(address_of(tensor)), known(get(tape, s_known)), leaves(get(tape, s_leaves));
    if (find(known.at, address.at) != nullptr) return no;
    if (is_same) {
        if (!equal(address.at, see(leaf, leaf_address))) return no;
    } else {
        if (!is_of_numbers(tensor) || tensor.is_inference()) return no;
        const Answer is_outside = is_made_outside(tape, tensor, address.at);
        if (is_outside != yes) return is_outside;
        put_shared(leaf, leaf_tensor, arg);
        put_shared(leaf, leaf_address, address.at);
    }
    put_int(leaf, leaf_version, version_of(tensor));
    append_at(leaves.at, address.at, leaf);
    return yes;
}

// As `described.is_given_again`.
bool is_given_again(PyObject *tape, PyObject *item, PyObject *arg) {
    Own again(checked(PyObject_CallFunctionObjArgs(of.is_given_again, tape, item, arg, nullptr)));
    return again.at == Py_True;
}

// Whether two floats are one to a function: zeros of both signs are not, and one that is no number is none.
bool is_same_number(double one, double other) { return one == other && std::signbit(one) == std::signbit(other); }

// What a record is to say of an argument now: the same, or, where the same bytes have another shape or other strides,
// these. nullptr without an error for anything else.
PyObject *described_now(PyObject *tape, PyObject *item, PyObject *arg);

PyObject *described_now_of_ref(PyObject *tape, PyObject *item, PyObject *arg) {
    PyObject *source = PyTuple_GET_ITEM(item, 0), *view = PyTuple_GET_ITEM(item, 1);
    const auto seen_as = [&](PyObject *owned) {
        Own look(owned), now(checked(of.ref->tp_alloc(of.ref, 2)));
        PyTuple_SET_ITEM(now.at, 0, Py_NewRef(source));
        PyTuple_SET_ITEM(now.at, 1, look.give());
        return now.give();
    };
    PyObject *made = referent(see(source, value_out)), *its_view = see(source, value_view);
    if (made != nullptr && made == arg && is_plain_type(arg) && its_view != Py_None) {
        const at::Tensor &tensor = THPVariable_Unpack(arg);
        if (has_bytes(tensor) && version_of(tensor) == see_int(source, value_version) && is_at(see(source, value_watch), tensor))
            return its_view == view ? Py_NewRef(item) : seen_as(Py_NewRef(its_view));
    }
    Answer answer = is_source_again(tape, source, arg);
    if (answer == unknown) {
        if (is_given_again(tape, item, arg)) return Py_NewRef(item);
        answer = is_source_again(tape, source, arg);  // now that it has been met
    }
    if (answer != yes) return nullptr;
    const at::Tensor &tensor = THPVariable_Unpack(arg);
    return looks_so(view, tensor) ? Py_NewRef(item) : seen_as(view_of(arg, tensor));
}

PyObject *described_now(PyObject *tape, PyObject *item, PyObject *arg) {
    if (Py_TYPE(item) == of.ref) return described_now_of_ref(tape, item, arg);
    if (arg == item) return Py_NewRef(item);
    if (PyLong_CheckExact(item) && PyLong_CheckExact(arg)) return equal(item, arg) ? Py_NewRef(item) : nullptr;
    if (PyFloat_CheckExact(item) && PyFloat_CheckExact(arg)) return is_same_number(PyFloat_AS_DOUBLE(item), PyFloat_AS_DOUBLE(arg)) ? Py_NewRef(item) : nullptr;
    const bool are_lists = PyList_CheckExact(item) && PyList_CheckExact(arg);
    if (!are_lists && !(PyTuple_CheckExact(item) && PyTuple_CheckExact(arg))) {
        const Answer answer = Py_TYPE(item) == of.leaf ? is_leaf_again(tape, item, arg) : unknown;
        return answer == yes || (answer == unknown && is_given_again(tape, item, arg)) ? Py_NewRef(item) : nullptr;
    }
    const Py_ssize_t num = PySequence_Fast_GET_SIZE(item);
    if (num != PySequence_Fast_GET_SIZE(arg)) return nullptr;
    Own all(checked(PyList_New(num)));
    bool differs = false;
    for (Py_ssize_t at = 0; at < num; ++at) {
        PyObject *one = described_now(tape, PySequence_Fast_GET_ITEM(item, at), PySequence_Fast_GET_ITEM(arg, at));
        if (one == nullptr) return nullptr;
        PyList_SET_ITEM(all.at, at, one);
        differs |= one != PySequence_Fast_GET_ITEM(item, at);
    }
    if (!differs) return Py_NewRef(item);
    return are_lists ? all.give() : checked(PyList_AsTuple(all.at));
}

// What a function is given as it takes it: `args`, and `kwargs`, which is nullptr for none.
void separate(PyObject *names, PyObject *all, Own &args, Own &kwargs) {
    const Py_ssize_t num_named = PyTuple_GET_SIZE(names), num = PyTuple_GET_SIZE(all) - num_named;
    args.at = checked(PyTuple_GetSlice(all, 0, num));
    if (!num_named) return;
    kwargs.at = checked(PyDict_New());
    for (Py_ssize_t at = 0; at < num_named; ++at)
        checked(PyDict_SetItem(kwargs.at, PyTuple_GET_ITEM(names, at), PyTuple_GET_ITEM(all, num + at)));
}

// Has a record say what the function is given now: of the same values, so what its operation reads stays as it is.
void describe_anew(PyObject *record, PyObject *call, PyObject *given) {
    PyObject *places = see(record, record_places);
    put_shared(record, record_given, given);
    if (places != Py_None) {
        PyObject *before = see(call, call_args);
        Own args(checked(PyTuple_New(PyTuple_GET_SIZE(before))));
        for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(before); ++at) {
            const int64_t place = as_int(PyTuple_GET_ITEM(places, at));
            PyTuple_SET_ITEM(args.at, at, Py_NewRef(place < 0 ? PyTuple_GET_ITEM(before, at) : PyTuple_GET_ITEM(given, place)));
        }
        put(call, call_args, args.give());
        return;
    }
    Own args, kwargs;
    separate(see(record, record_names), given, args, kwargs);
    put(call, call_args, args.give());
    if (kwargs) put(call, call_kwargs, kwargs.give());
}

// Whether a tensor lies in the storage of one among what a function is given; unknown where one's is not known.
Answer is_among(const at::Tensor &tensor, PyObject *items) {
    if (!PyList_Check(items) && !PyTuple_Check(items)) return unknown;
    Answer answer = no;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(items); ++at) {
        PyObject *item = PySequence_Fast_GET_ITEM(items, at);
        Answer one = no;
        if (PyList_Check(item) || PyTuple_Check(item)) {
            one = is_among(tensor, item);
        } else if (THPVariable_Check(item)) {
            const at::Tensor &given = THPVariable_Unpack(item);
            if (!has_bytes(given)) one = unknown;
            else if (storage_of(given) == storage_of(tensor)) one = yes;
        }
        if (one == yes) return yes;
        if (one == unknown) answer = unknown;
    }
    return answer;
}

// What a function is given, by name last; nullptr without an error where a record has other names.
PyObject *everything(PyObject *record, PyObject *args, PyObject *kwargs) {
    PyObject *names = see(record, record_names);
    const Py_ssize_t num = PyTuple_GET_SIZE(args), num_named = kwargs == nullptr ? 0 : PyDict_GET_SIZE(kwargs);
    if (PyTuple_GET_SIZE(names) != num_named) return nullptr;
    if (!num_named) return Py_NewRef(args);
    Own all(checked(PyTuple_New(num + num_named)));
    for (Py_ssize_t at = 0; at < num; ++at) PyTuple_SET_ITEM(all.at, at, Py_NewRef(PyTuple_GET_ITEM(args, at)));
    PyObject *name, *value;
    Py_ssize_t next = 0;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs, &next, &name, &value); ++at) {
        if (!equal(name, PyTuple_GET_ITEM(names, at))) return nullptr;
        PyTuple_SET_ITEM(all.at, num + at, Py_NewRef(value));
    }
    return all.give();
}

// The state of what an operation draws from.
PyObject *state_before(PyObject *tape, PyObject *kwargs) {
    Own device(get(tape, s__device));
    if (at::Generator found = generator_of(device.at, kwargs); found.defined()) {
        const std::scoped_lock<std::mutex> lock(found.mutex());
        return checked(THPVariable_Wrap(found.get_state()));
    }
    Own source(checked(PyObject_CallMethodOneArg(tape, s_generator, kwargs == nullptr ? Py_None : kwargs)));
    return checked(PyObject_CallMethodNoArgs(source.at, s_get_state));
}

// A function is recorded as it was the last time while `call` runs it, and what that returns is returned; `LONG_WAY` where it
// must be recorded anew, and did not run. `all` is what it is given, and `choice` asks what it would choose.
template <class Choice, class Call>
PyObject *run_record(PyObject *repeats, PyObject *tape, PyObject *record, PyObject *all, PyObject *kwargs, Choice choice, Call run_it) {
    const auto otherwise = [] { return Py_NewRef(of.long_way); };
    Own before(take(record, record_given));
    if (PyTuple_GET_SIZE(before.at) != PyTuple_GET_SIZE(all)) return otherwise();
    Own call(take(record, record_call)), value(take(record, record_value));
    PyObject *operation = see(call.at, call_operator), *chosen = see(record, record_chosen);
    Own now(described_now(tape, before.at, all));
    if (!now) return otherwise();
    const bool differs = now.at != before.at;
    if (chosen != Py_None) {
        Own is(choice());
        if (!equal(chosen, is.at)) return otherwise();
    }
    if (differs) describe_anew(record, call.at, now.at);
    PyObject *saves = see(operation, operation_saves);
    if (value.at == Py_None) {  // it has made nothing so far
        put(call.at, call_outputs, PyList_New(0));
        put(call.at, call_places, PyList_New(0));
    } else if (!equal(saves, first)) {
        Own outputs(checked(PyList_New(1))), places(checked(PyList_New(1)));
        PyList_SET_ITEM(outputs.at, 0, weak_reference(value.at));
        PyList_SET_ITEM(places.at, 0, an_int(0));
        put(call.at, call_outputs, outputs.give());
        put(call.at, call_places, places.give());
    }
    if (see(operation, operation_draws) != Py_False) {
        put(call.at, call_state, state_before(tape, kwargs));
    }
    const int64_t order = get_int(tape, s_num_calls);
    put_int(call.at, call_order, order);
    set_int(tape, s_num_calls, order + 1);
    Own unfinished(checked(of.unfinished->tp_alloc(of.unfinished, 5)));
    PyTuple_SET_ITEM(unfinished.at, 0, Py_NewRef(call.at));
    PyTuple_SET_ITEM(unfinished.at, 1, Py_NewRef(all));
    PyTuple_SET_ITEM(unfinished.at, 2, checked(PyObject_GetIter(saves)));
    PyTuple_SET_ITEM(unfinished.at, 3, Py_NewRef(value.at));
    PyTuple_SET_ITEM(unfinished.at, 4, Py_NewRef(chosen != Py_None ? Py_True : Py_False));
    checked(PyObject_SetAttr(tape, s_unfinished, unfinished.at));
    Own out;
    try {
        out.at = checked(run_it());
    } catch (...) {
        const ErrorAside aside;
        if (PyObject_SetAttr(tape, s_unfinished, Py_None) < 0) PyErr_Clear();
        throw;
    }
    checked(PyObject_SetAttr(tape, s_unfinished, Py_None));
    if (Py_TYPE(out.at) != of.tensor) return out.give();
    const at::Tensor &tensor = THPVariable_Unpack(out.at);
    Own address(address_of(tensor)), known(get(tape, s_known));
    PyObject *found = find(known.at, address.at);
    const bool was_there = is_as_known(found, tensor);
    if (value.at == Py_None) {
        if (!was_there) {
            Own made(alone(out.at)), arguments(tensors_of(all));
            Own done(checked(PyObject_CallMethodObjArgs(tape, s_made, call.at, made.at, arguments.at, nullptr)));
        }
        return out.give();
    }
    if (found != value.at) {
        if (was_there || (differs && is_among(tensor, all) != no)) {
            Own done(checked(PyObject_CallMethodOneArg(repeats, s__forget_unless_new, record)));
            return out.give();
        }
        renew(value.at, tensor, found);
        checked(PyDict_SetItem(known.at, address.at, value.at));
    }
    put(value.at, value_out, weak_reference(out.at));
    put(value.at, value_root, weak_root_of(out.at, tensor));
    PyObject *view = see(value.at, value_view);
    if (view == Py_None || !looks_so(view, tensor)) put(value.at, value_view, view_of(out.at, tensor));
    return out.give();
}

// As `run`; `call` calls the function.
template <class Call>
PyObject *run_function(PyObject *const *given, Call call) {
    PyObject *repeats = given[0], *tape = given[1], *func = given[3], *args = given[4];
    PyObject *kwargs = given[5] == Py_None ? nullptr : given[5];
    Own records(get(repeats, s__records)), record(Py_XNewRef(find(records.at, given[2])));
    if (!record || see(record.at, record_func) != func) return Py_NewRef(of.long_way);
    Own all(everything(record.at, args, kwargs));
    if (!all) return Py_NewRef(of.long_way);
    const auto choice = [&] { return checked(PyObject_Call(checked(find(of.choices, func)), args, kwargs)); };
    return run_record(repeats, tape, record.at, all.at, kwargs, choice, call);
}

// run(repeats, tape, number, func, args, kwargs): what the function returns; `LONG_WAY` where `Repeats.run` must run it.
PyObject *run(PyObject *, PyObject *const *given, Py_ssize_t) {
    return guarded([&]() -> PyObject * {
        return run_function(given, [&] { return PyObject_Call(given[3], given[4], given[5] == Py_None ? nullptr : given[5]); });
    });
}

}  // namespace
