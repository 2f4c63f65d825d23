// What has left in a settled step, when backward asks for it, as `SavedTensors` and `Residency` do it.

#pragma once

#include "again.h"
#include "moving.h"

namespace {

bool is_absent(PyObject *parcel) { return see(parcel, parcel_buffer) == Py_None && see(parcel, parcel_handle) == Py_None; }

void wait_until_back(PyObject *parcel) {
    Own back(take(parcel, parcel_back));
    if (back.at == Py_None) return;
    wait_for(back.at);
    put_shared(parcel, parcel_back, Py_None);
}

// As `Residency._is_back`.
void is_back(const Way *way, PyObject *saved, PyObject *base) {
    const at::Tensor &tensor = THPVariable_Unpack(base);
    put_shared(saved, saved_base, base);
    put_int(saved, saved_base_version, version_of(tensor));
    Own at(saved_at(way)), address(address_of(tensor));
    if (!equal(address.at, see(saved, saved_address))) append_at(at.at, address.at, saved);
}

// ------------------------------------------------------------------ computed again

// As `Chain.serves`.
bool serves(PyObject *chain, PyObject *value) {
    PyObject *calls = see(chain, chain_calls), *inputs = see(chain, chain_inputs);
    const Py_ssize_t num = PyList_GET_SIZE(calls);
    if (!num || see(value, value_call) != PyList_GET_ITEM(calls, num - 1)) return false;
    for (Py_ssize_t at = 0; at < num; ++at)
        if (see(PyList_GET_ITEM(calls, at), call_inputs) != PyList_GET_ITEM(inputs, at)) return false;
    Own each(checked(PyObject_GetIter(see(chain, chain_passed))));
    while (Own one{PyIter_Next(each.at)}) {
        PyObject *saved = see(one.at, value_saved);
        if (see(one.at, value_held) != Py_None || (saved != Py_None && !is_absent(see(saved, saved_parcel)))) return false;
    }
    if (PyErr_Occurred()) throw Failed();
    return true;
}

// What holds the bytes of a value, as `replay._find` asks; nullptr without an error where Python must be asked.
PyObject *bytes_of(const Way *way, PyObject *value) {
    Own saved(take(value, value_saved));
    if (saved.at == Py_None) {
        PyObject *held = see(value, value_held);
        if (held == Py_None || has_changed(PyTuple_GET_ITEM(held, 0), PyTuple_GET_ITEM(held, 1))) return nullptr;
        PyObject *tensor = PyTuple_GET_ITEM(held, 0);
        return THPVariable_Unpack(tensor).scalar_type() == at::kByte ? nullptr : Py_NewRef(tensor);
    }
    Own parcel(take(saved.at, saved_parcel));
    if (see(saved.at, saved_stale) != Py_False || see(parcel.at, parcel_shared) != Py_False) return nullptr;
    if (is_absent(parcel.at)) return nullptr;
    if (has_changed(see(parcel.at, parcel_hold), see(saved.at, saved_version))) return nullptr;
    if (has_changed(see(saved.at, saved_base), see(saved.at, saved_base_version))) return nullptr;
    if (see(parcel.at, parcel_buffer) == Py_None) fetch(way, parcel.at);
    wait_until_back(parcel.at);
    PyObject *base = see(saved.at, saved_base);
    return Py_NewRef(base != Py_None ? base : see(parcel.at, parcel_buffer));
}

// As `Residency._arrived`.
void arrived(const Way *way, PyObject *saved, PyObject *content, PyObject *wanted) {
    Own parcel(take(saved, saved_parcel));
    const at::Tensor &tensor = THPVariable_Unpack(content);
    const bool is_row = tensor.scalar_type() == at::kByte;
    const int64_t nbytes = static_cast<int64_t>(is_row ? tensor.nbytes() : tensor.storage().nbytes());
    const int64_t resident_bytes = see_int(way->residency, residency_resident_bytes), limit = see_int(way->residency, residency_limit_bytes);
    const bool is_tight = way->device < 0 && resident_bytes + std::max(nbytes, see_int(parcel.at, parcel_nbytes)) > limit;
    if (nbytes != see_int(saved, saved_nbytes) || see(saved, saved_fingerprint) != Py_None || is_tight) {
        Own function(get(way->residency, s__arrived)), args(PyTuple_Pack(2, saved, content)), kwargs(PyDict_New());
        checked(PyDict_SetItem(checked(kwargs.at), s_wanted, wanted));
        Own done(checked(PyObject_Call(function.at, checked(args.at), kwargs.at)));
        return;
    }
    Own absent(take(way->residency, residency_absent));
    put_shared(parcel.at, parcel_buffer, content);
    checked(PySet_Discard(absent.at, parcel.at));
    make_resident(way, parcel.at);
    is_back(way, saved, content);
}

// As `replay._spread`.
void spread(const Way *way, PyObject *outputs, PyObject *contents, PyObject *there, PyObject *passed, PyObject *wanted) {
    if (PyList_GET_SIZE(outputs) != PyList_GET_SIZE(contents)) {
        PyErr_SetString(PyExc_ValueError, "an operation gave other outputs than it was recorded with");
        throw Failed();
    }
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(outputs); ++at) {
        Own made(Py_XNewRef(referent(PyList_GET_ITEM(outputs, at))));
        if (!made) continue;
        PyObject *content = PyList_GET_ITEM(contents, at);
        if (checked(PySet_Contains(passed, made.at))) checked(PyDict_SetItem(there, made.at, content));
        Own saved(take(made.at, value_saved));
        if (saved.at != Py_None && is_absent(see(saved.at, saved_parcel))) arrived(way, saved.at, content, wanted);
    }
}

void let_go_of(PyObject *there, PyObject *done) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(done); ++at) checked(PyDict_DelItem(there, PyList_GET_ITEM(done, at)));
}

// As `replay._run_at`.
void run_at(const Way *way, PyObject *chain, Py_ssize_t at, PyObject *there, PyObject *wanted) {
    Own call(Py_NewRef(PyList_GET_ITEM(see(chain, chain_calls), at)));
    PyObject *of_call[] = {call.at, there};
    Own contents(checked(again(nullptr, of_call, 2)));
    if (contents.at == of.long_way) {
        Own run(PyObject_CallFunctionObjArgs(of.run_again, call.at, there, nullptr));
        std::swap(contents.at, run.at);
        checked(contents.at);
    }
    Own outputs(take(call.at, call_outputs));
    spread(way, outputs.at, contents.at, there, see(chain, chain_passed), wanted);
    let_go_of(there, PyList_GET_ITEM(see(chain, chain_frees), at));
}

// As `replay._run_fused`.
void run_fused(const Way *way, PyObject *chain, PyObject *fused, PyObject *there, PyObject *wanted) {
    Own parts(get(fused, s_parts));
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(parts.at); ++number) {
        PyObject *part = PyList_GET_ITEM(parts.at, number);
        if (PyLong_Check(part)) {
            run_at(way, chain, as_int(part), there, wanted);
            continue;
        }
        Own contents(checked(PyObject_CallMethodOneArg(part, s_run, there)));
        if (contents.at == Py_None) {
            Own calls(get(part, s_calls));
            const int64_t begin = get_int(part, s_begin), num = PyList_GET_SIZE(calls.at);
            for (int64_t at = begin; at < begin + num; ++at) run_at(way, chain, at, there, wanted);
            continue;
        }
        Own made(get(part, s_made)), passed(get(part, s_passed)), frees(get(part, s_frees));
        spread(way, made.at, contents.at, there, passed.at, wanted);
        let_go_of(there, frees.at);
    }
}

// As `replay.compute_again`, where the operations are known that make a value; false where that must be called.
bool compute_again(const Way *way, PyObject *saved) {
    Own value(take(saved, saved_value));
    if (value.at == Py_None || Py_TYPE(see(value.at, value_again)) != of.chain) return false;
    Own chain(take(value.at, value_again)), fused(take(chain.at, chain_fused)), there(checked(PyDict_New()));
    if (!serves(chain.at, value.at)) return false;
    if (fused.at != Py_None) {
        Own is_ready(checked(PyObject_CallMethodNoArgs(fused.at, s_is_ready)));
        if (is_ready.at != Py_True) return false;
    }
    PyObject *sources = see(chain.at, chain_sources), *calls = see(chain.at, chain_calls);
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(sources); ++at) {
        Own found(bytes_of(way, PyList_GET_ITEM(sources, at)));
        if (!found) return false;
        checked(PyDict_SetItem(there.at, PyList_GET_ITEM(sources, at), found.at));
    }
    if (fused.at != Py_None) {
        run_fused(way, chain.at, fused.at, there.at, saved);
    } else {
        for (Py_ssize_t at = 0; at < PyList_GET_SIZE(calls); ++at) run_at(way, chain.at, at, there.at, saved);
    }
    return true;
}

// Whether a storage that was let go, to be computed again, was changed since.
bool has_changed_since(PyObject *saved) {
    PyObject *counter = see(saved, saved_counter), *origin = see(saved, saved_origin);
    if (counter == Py_None && origin != Py_None) counter = referent(origin);
    return counter != nullptr && has_changed(counter, see(saved, saved_version));
}

// ------------------------------------------------------------------ all of it

// As `Residency.rebuild`; nullptr without an error where that must be called.
PyObject *rebuild(const Way *way, PyObject *saved, PyObject *view) {
    Own parcel(take(saved, saved_parcel));
    if (see(saved, saved_lost) != Py_None || see(saved, saved_stale) != Py_False || PyDict_GET_SIZE(see(saved, saved_kept)))
        return nullptr;
    if (has_other_memory(saved)) return nullptr;
    if (is_absent(parcel.at) && (has_changed_since(saved) || !compute_again(way, saved))) return nullptr;
    PyObject *buffer = see(parcel.at, parcel_buffer);
    if (buffer == Py_None || Py_TYPE(buffer) != of.tensor) return nullptr;
    if (has_changed(see(parcel.at, parcel_hold), see(saved, saved_version))) return nullptr;
    if (has_changed(see(saved, saved_base), see(saved, saved_base_version))) return nullptr;
    const at::Tensor row = THPVariable_Unpack(buffer);
    const bool is_new = see(saved, saved_base) == Py_None;
    if (is_new && (row.scalar_type() != at::kByte || see(parcel.at, parcel_shared) != Py_False)) return nullptr;
    wait_until_back(parcel.at);
    if (is_new) {
        Own bytes(bytes_in(row, see_int(saved, saved_offset), see_int(saved, saved_nbytes)));
        is_back(way, saved, bytes.at);
    }
    Own there(take(saved, saved_base));
    PyObject *tensor = seen_over(view, there.at);
    return tensor != nullptr ? tensor : checked(PyObject_CallMethodOneArg(view, s_over, there.at));
}

void count_as_used(PyObject *saved_tensors) {
    put_int(saved_tensors, saved_tensors_num_used, see_int(saved_tensors, saved_tensors_num_used) + 1);
}

// As `SavedTensors.unpack` for a placeholder; nullptr without an error where that must be called.
PyObject *unpack_placeholder(Way *way, PyObject *saved_tensors, PyObject *settled, PyObject *placeholder) {
    Own saved(take(placeholder, placeholder_saved)), tensor;
    Holding holding(way, saved_tensors);
    holding.take(true);
    if (!is_current(way, settled) || see(way->progress, running_pace) != Py_None) return nullptr;
    if (see(way->progress, running_open) != Py_None) return nullptr;
    settle(way, holding.let_go.at);
    const int64_t moment = see_int(way->progress, running_moment) + 1;
    if (moment >= static_cast<int64_t>(way->moments->all->size())) return nullptr;
    const Moment &one = moment_of(way, moment);
    if (one.kind != Moment::unpacks || one.ordinal != see_int(saved.at, saved_ordinal)) return nullptr;
    if (!fits(way, see_int(saved.at, saved_nbytes), one.nbytes)) return nullptr;
    count_as_used(saved_tensors);
    put_int(way->progress, running_moment, moment);
    begin(way, settled, one, moment);
    tensor.at = rebuild(way, saved.at, see(placeholder, placeholder_view));
    if (!tensor) {
        tensor.at = checked(PyObject_CallMethodOneArg(saved_tensors, s__give_back, placeholder));  // which ends the moment, too
    } else {
        put_shared(see(saved.at, saved_parcel), parcel_used, Py_True);
        finish(way, settled, one, moment);
    }
    settle(way, holding.let_go.at);
    holding.release();
    if (size_at(holding.let_go.at, s__dropped) || is_waiting(way))
        Own done(checked(PyObject_CallMethodNoArgs(saved_tensors, s_settle_soon)));
    return tensor.give();
}

}  // namespace
