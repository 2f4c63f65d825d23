// Copies between a GPU and pinned memory, as `HostTier`, `PinnedArena` and the `Engine`'s queues have them made, for what every
// step has: a slot of as many bytes, in one piece, that the step before has freed. It makes the same objects, and changes
// nothing where it returns false or nullptr without an error: those are called then, as where another thread has a lock.

#pragma once

#include "locks.h"

namespace {

constexpr int by_address = 4;  // cudaMemcpyDefault

// ------------------------------------------------------------------ the CUDA runtime

template <class... Arguments>
void call_runtime(PyObject *runtime, Py_ssize_t place, const char *what, Arguments... arguments) {
    auto *function = reinterpret_cast<int (*)(Arguments...)>(PyLong_AsVoidPtr(see(runtime, place)));
    if (const int status = function(arguments...)) {
        Own error(checked(PyObject_CallMethod(runtime, "failed", "si", what, status)));
        PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.at)), error.at);
        throw Failed();
    }
}

void *handle_of(PyObject *event) { return PyLong_AsVoidPtr(see(event, event_handle)); }

void stream_waits(PyObject *runtime, void *stream, PyObject *event) {
    call_runtime<void *, void *, unsigned>(runtime, runtime_wait_at, "waiting for an event", stream, handle_of(event), 0);
}

void follow_stream(PyObject *runtime, PyObject *event, void *stream) {
    call_runtime<void *, void *>(runtime, runtime_record_at, "recording an event", handle_of(event), stream);
}

// As `Events.is_here`.
bool is_here(PyObject *events) {
    Own device(checked(PyObject_CallNoArgs(see(events, events_current_device))));
    return as_int(device.at) == see_int(events, events_index);
}

// As `Events.current_stream`.
void *current_stream(PyObject *events) {
    Own stream(checked(PyObject_CallOneArg(see(events, events_raw_stream), see(events, events_index))));
    void *found = PyLong_AsVoidPtr(stream.at);
    if (found == nullptr && PyErr_Occurred()) throw Failed();
    return found;
}

// As `Events.new`.
PyObject *new_event(PyObject *events) {
    PyObject *unused = see(events, events_unused);
    const Py_ssize_t num = PyList_GET_SIZE(unused);
    if (!num) return checked(PyObject_CallMethodNoArgs(events, s_new));
    Own event(allocate(of.event));
    put_shared(event.at, event_handle, PyList_GET_ITEM(unused, num - 1));
    put_shared(event.at, event__unused, unused);
    checked(PyList_SetSlice(unused, num - 1, num, nullptr));
    return event.give();
}

// ------------------------------------------------------------------ copies

bool is_copy(PyObject *copy) { return Py_TYPE(copy) == of.cuda_copy; }

// Whether a copy is on its stream.
bool is_queued(PyObject *copy) { return see_int(copy, cuda_copy__number) <= see_int(see(copy, cuda_copy_queue), queue_num_queued); }

// As `CudaCopy.wait`.
bool current_stream_waits(PyObject *copy) {
    if (!is_copy(copy) || !is_queued(copy)) return false;
    PyObject *queue = see(copy, cuda_copy_queue), *events = see(queue, queue_events);
    if (!is_here(events)) return false;
    stream_waits(see(queue, queue__runtime), current_stream(events), see(copy, cuda_copy__event));
    return true;
}

void wait_for(PyObject *copy) {
    if (!current_stream_waits(copy)) Own done(checked(PyObject_CallMethodNoArgs(copy, s_wait)));
}

// Whether every one of these copies can be waited for by a stream.
bool are_queued(PyObject *copies) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(copies); ++at)
        if (!is_copy(PyList_GET_ITEM(copies, at)) || !is_queued(PyList_GET_ITEM(copies, at))) return false;
    return true;
}

// As `Queue.copy`, which begins at once: behind what the current stream was given, and other copies. Where something fails
// on the way, what was queued is no more than waiting.
PyObject *begin_copy(PyObject *queue, void *target, void *source, int64_t nbytes, PyObject *after) {
    PyObject *runtime = see(queue, queue__runtime), *events = see(queue, queue_events);
    void *stream = PyLong_AsVoidPtr(see(queue, queue__handle));
    Own ended(new_event(events)), copy(allocate(of.cuda_copy));
    follow_stream(runtime, ended.at, current_stream(events));
    stream_waits(runtime, stream, ended.at);  // for what it follows now; it follows the copy afterwards
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(after); ++at) {
        PyObject *other = PyList_GET_ITEM(after, at), *its_queue = see(other, cuda_copy_queue);
        const bool has_ended = see_int(other, cuda_copy__number) <= see_int(its_queue, queue_num_ended);
        if (its_queue != queue && !has_ended) stream_waits(runtime, stream, see(other, cuda_copy__event));
    }
    call_runtime<void *, const void *, size_t, int, void *>(
        runtime, runtime_copy_at, "a copy between host and device", target, source, static_cast<size_t>(nbytes), by_address, stream);
    follow_stream(runtime, ended.at, stream);
    put_int(queue, queue_num_queued, see_int(queue, queue_num_queued) + 1);
    put_shared(queue, queue__newest, ended.at);
    put_shared(copy.at, cuda_copy_queue, queue);
    put_shared(copy.at, cuda_copy__event, ended.at);
    put_shared(copy.at, cuda_copy__number, see(queue, queue_num_queued));
    return copy.give();
}

// ------------------------------------------------------------------ the tier

// Whether a tier is pinned memory whose copies run on an engine, and that neither checks nor is closed.
bool is_plain_host_tier(PyObject *tier) {
    return Py_TYPE(tier) == of.host_tier && see(tier, host_tier__engine) != Py_None &&
           Py_TYPE(see(tier, host_tier__engine)) == of.engine && see(tier, host_tier__check) == Py_False &&
           see(tier, host_tier__closed) == Py_False;
}

bool is_in_one_piece(PyObject *slot) {
    return PyList_GET_SIZE(see(slot, slot_pieces)) == 1 && PyList_GET_SIZE(see(slot, slot_extents)) == 1;
}

void *memory_of(PyObject *slot) { return THPVariable_Unpack(PyList_GET_ITEM(see(slot, slot_pieces), 0)).mutable_data_ptr(); }

int64_t bytes_taken(PyObject *slot) { return as_int(PyTuple_GET_ITEM(PyList_GET_ITEM(see(slot, slot_extents), 0), 2)); }

// As `HostTier.put`; nullptr without an error where that must be called.
PyObject *put_into(PyObject *tier, const at::Tensor &row, PyObject *label) {
    if (!is_plain_host_tier(tier)) return nullptr;
    PyObject *arena = see(tier, host_tier_arena), *queue = see(see(tier, host_tier__engine), engine__to_host);
    const Locked tier_lock(see(arena, arena_lock), false), queue_lock(see(queue, queue__lock), false);
    if (!tier_lock.is_held || !queue_lock.is_held || see(queue, queue__burst) != Py_None) return nullptr;
    if (!is_here(see(queue, queue_events))) return nullptr;
    Own size(an_int(static_cast<int64_t>(row.nbytes())));
    PyObject *spare = find(see(arena, arena__spare), size.at);
    if (spare == nullptr || !size_of(spare)) return nullptr;
    Own oldest(checked(PySequence_GetItem(spare, 0)));
    if (!is_in_one_piece(oldest.at) || !are_queued(see(oldest.at, slot_after))) return nullptr;
    Own spec(take(tier, host_tier_spec));
    if (see_int(arena, arena_used_bytes) + bytes_taken(oldest.at) > get_int(spec.at, s_capacity_bytes)) return nullptr;
    Own slot(checked(PyObject_CallMethodNoArgs(spare, s_popleft))), handle(allocate(of.host_handle)), written;
    try {
        written.at = begin_copy(queue, memory_of(slot.at), row.mutable_data_ptr(), row.nbytes(), see(slot.at, slot_after));
    } catch (const Failed &) {  // what comes into the slot next is queued behind whatever was queued
        const ErrorAside aside;
        Own back(PyObject_CallMethodOneArg(spare, s_appendleft, slot.at));
        throw;
    }
    put(slot.at, slot_after, PyList_New(0));  // this copy ends after them
    const int64_t used_bytes = see_int(arena, arena_used_bytes) + bytes_taken(slot.at);  // what was made may have freed some
    put_int(arena, arena_used_bytes, used_bytes);
    if (used_bytes > see_int(arena, arena_peak_bytes)) put_int(arena, arena_peak_bytes, used_bytes);
    put_shared(handle.at, host_handle_slot, slot.at);
    put_shared(handle.at, host_handle_nbytes, size.at);
    put_shared(handle.at, host_handle_written, written.at);
    put_shared(handle.at, host_handle_label, label);
    put_shared(handle.at, host_handle_checksum, Py_None);
    put(handle.at, host_handle_reads, PyList_New(0));
    return handle.give();
}

// As `HostTier.get`; nullptr without an error where that must be called.
PyObject *get_from(PyObject *tier, PyObject *handle, const at::Tensor &row) {
    if (!is_plain_host_tier(tier) || Py_TYPE(handle) != of.host_handle) return nullptr;
    PyObject *slot = see(handle, host_handle_slot), *engine = see(tier, host_tier__engine);
    PyObject *out = see(engine, engine__to_host), *queue = see(engine, engine__to_device);
    if (slot == Py_None || !is_in_one_piece(slot) || PyList_GET_SIZE(see(handle, host_handle_reads))) return nullptr;
    if (static_cast<int64_t>(row.nbytes()) != see_int(handle, host_handle_nbytes)) return nullptr;
    const Locked tier_lock(see(see(tier, host_tier_arena), arena_lock), false);
    const Locked out_lock(see(out, queue__lock), false), lock(see(queue, queue__lock), false);
    if (!tier_lock.is_held || !out_lock.is_held || !lock.is_held || !is_here(see(queue, queue_events))) return nullptr;
    if (see(out, queue__burst) != Py_None || see(queue, queue__burst) != Py_None) return nullptr;
    Own after(checked(PyList_New(1)));
    PyList_SET_ITEM(after.at, 0, take(handle, host_handle_written));
    if (!are_queued(after.at)) return nullptr;
    Own copy(begin_copy(queue, row.mutable_data_ptr(), memory_of(slot), row.nbytes(), after.at));
    checked(PyList_Append(see(handle, host_handle_reads), copy.at));
    return copy.give();
}

// As `HostTier.free`; false where that must be called.
bool free_in(PyObject *tier, PyObject *handle) {
    if (!is_plain_host_tier(tier) || Py_TYPE(handle) != of.host_handle) return false;
    Own slot(take(handle, host_handle_slot)), written(take(handle, host_handle_written));
    if (slot.at == Py_None || !is_in_one_piece(slot.at) || !is_copy(written.at) || !is_queued(written.at)) return false;
    PyObject *arena = see(tier, host_tier_arena), *reads = see(handle, host_handle_reads);
    const Locked lock(see(arena, arena_lock), false);
    PyObject *spare = find(see(arena, arena__spare), see(handle, host_handle_nbytes));
    if (!lock.is_held || spare == nullptr) return false;
    Own after(checked(PySequence_List(see(slot.at, slot_after))));
    if (PyList_GET_SIZE(reads))
        checked(PyList_SetSlice(after.at, PyList_GET_SIZE(after.at), PyList_GET_SIZE(after.at), reads));
    else
        checked(PyList_Append(after.at, written.at));
    put_shared(handle, host_handle_slot, Py_None);
    put_shared(slot.at, slot_after, after.at);
    put_int(arena, arena_used_bytes, see_int(arena, arena_used_bytes) - bytes_taken(slot.at));
    Own done(checked(PyObject_CallMethodOneArg(spare, s_append, slot.at)));
    return true;
}

}  // namespace
