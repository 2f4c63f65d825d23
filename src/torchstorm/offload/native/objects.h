// Python's objects as the short way sees them: references, attributes, and what tensors say of themselves.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <ATen/Context.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

namespace {

// Of Python's own, by the names in `classes.py`.
#define TYPES(X) \
    X(tensor) X(parameter) X(kept) X(kept_storage) X(placeholder) X(untouched) X(view) X(ref) X(unfinished) \
    X(running) X(value) X(record) X(call) X(operation) X(saved) X(saved_tensors) X(settled) X(parcel) X(chain) X(weak) X(leaf) \
    X(getter) X(device_context) X(watched_calls) X(residency) X(kept_tensors) X(saved_storages) X(host_tier) \
    X(host_handle) X(arena) X(slot) X(engine) X(queue) X(cuda_copy) X(event) X(events) X(runtime)
#define OBJECTS(X) \
    X(is_given_again) X(long_way) X(nothing) X(choices) X(uint8) X(content_of) X(tensors_of) \
    X(no_block) X(is_own_thread) X(apply) X(run_again) X(product) X(label_of) X(known_functions) X(get_to_know) X(is_plain) \
    X(compiler) X(forward_ad) X(torch_function)
#define NUMBERS(X) X(num_names) X(num_counts) X(num_places) X(tiny_bytes)
struct Classes {
#define DECLARE(name) PyTypeObject *name;
    TYPES(DECLARE)
#undef DECLARE
#define DECLARE(name) PyObject *name;
    OBJECTS(DECLARE)
#undef DECLARE
#define DECLARE(name) int64_t name;
    NUMBERS(DECLARE)
#undef DECLARE
} of;
PyObject *first;  // (0,)

#define NAMES(X) \
    X(_arrived) X(_awaited) X(_backward_hooks) X(_backward_pre_hooks) X(_begin) X(_buffers) X(_current_level) \
    X(_device) X(_dropped) X(_empty) X(_finish) X(_forget_unless_new) X(_forward_hooks) X(_forward_pre_hooks) \
    X(_give_back) X(_give_back_late) X(_is_compiling_flag) X(_is_leaf) X(_lock) X(_mark) X(_modules) X(_name) \
    X(_notice) X(_num_awaited) X(_parameters) X(_records) X(_tiers) X(_within) X(acquire) X(append) X(appendleft) \
    X(begin) X(calls) X(capacity_bytes) X(discard) X(drop) X(dtype) X(fetch) X(free) X(frees) X(generator) X(get) \
    X(get_state) X(has_changed) X(idle) X(inplace) X(is_about_to_change) X(is_ready) X(kind) X(known) X(layout) \
    X(leaves) X(let_go) X(made) X(make_room) X(max_norm) X(moved_bytes) X(new) X(num_calls) X(out) X(over) X(pack) \
    X(parts) X(passed) X(phase) X(popleft) X(read_until) X(release) X(repeats) X(run) X(send) X(settle) \
    X(settle_soon) X(shape) X(sources) X(unfinished) X(unpack) X(wait) X(wanted) X(within) X(written)
#define DECLARE(name) PyObject *s_##name;
NAMES(DECLARE)
#undef DECLARE

// Attributes of classes with `__slots__`: where they lie in an object.
#define SLOTS(X) \
    X(running, fixed) X(running, has_changed) X(running, inputs) X(running, moment) X(running, num_saved) X(running, numbered) X(running, open) \
    X(running, pace) X(running, recorder) X(running, settled) X(running, table) \
    X(chain, calls) X(chain, frees) X(chain, fused) X(chain, inputs) X(chain, passed) X(chain, sources) \
    X(value, again) X(value, call) X(value, held) X(value, is_read) X(value, lost) X(value, nbytes) X(value, out) X(value, root) X(value, saved) X(value, saved_before) \
    X(value, version) X(value, view) X(value, watch) \
    X(record, call) X(record, chosen) X(record, func) X(record, given) X(record, names) X(record, places) X(record, value) \
    X(call, args) X(call, device) X(call, func) X(call, inputs) X(call, kwargs) X(call, number) X(call, operator) X(call, order) X(call, outputs) X(call, places) X(call, state) \
    X(leaf, address) X(leaf, tensor) X(leaf, version) \
    X(operation, draws) X(operation, in_place) X(operation, name) X(operation, saves) \
    X(saved, address) X(saved, base) X(saved, base_version) X(saved, block) X(saved, counter) X(saved, fingerprint) \
    X(saved, kept) X(saved, live) X(saved, lost) X(saved, nbytes) X(saved, offset) X(saved, ordinal) \
    X(saved, origin) X(saved, parcel) X(saved, pointer) X(saved, root) X(saved, stale) X(saved, value) X(saved, version) X(saved, watch) \
    X(parcel, back) X(parcel, block) X(parcel, buffer) X(parcel, filled) X(parcel, handle) X(parcel, hold) \
    X(parcel, members) X(parcel, movable) X(parcel, nbytes) X(parcel, num_joined) X(parcel, number) \
    X(parcel, order) X(parcel, recomputed) X(parcel, sealed) X(parcel, shared) X(parcel, tier) X(parcel, used) \
    X(kept, _released) X(kept, pointer) X(kept, storage) X(kept, tensor) X(kept, placeholder) X(kept, version) \
    X(kept_storage, _held) X(kept_storage, address) X(kept_storage, beside) X(kept_storage, block) \
    X(kept_storage, counted_bytes) X(kept_storage, lost) X(kept_storage, movable) X(kept_storage, nbytes) \
    X(kept_storage, num_live) X(kept_storage, ordinal) X(kept_storage, owner) X(kept_storage, saved) \
    X(kept_storage, value) \
    X(placeholder, _owner) X(placeholder, saved) X(placeholder, view) X(untouched, tensor) X(untouched, version) \
    X(residency, known) X(residency, resident_bytes) X(residency, limit_bytes) X(residency, peak_bytes) X(residency, resident) X(residency, away) X(residency, absent) X(residency, _order) X(residency, checks) X(residency, waits) \
    X(kept_tensors, by_address) X(kept_tensors, by_ordinal) X(kept_tensors, released) X(kept_tensors, awaited) X(kept_tensors, in_parts) X(saved_storages, _at) \
    X(weak, cdata) \
    X(saved_tensors, _let_go) X(saved_tensors, _run) X(saved_tensors, closed) X(saved_tensors, num_used) X(settled, native) \
    X(host_tier, _check) X(host_tier, _closed) X(host_tier, _engine) X(host_tier, arena) X(host_tier, spec) \
    X(host_handle, checksum) X(host_handle, label) X(host_handle, nbytes) X(host_handle, reads) X(host_handle, slot) X(host_handle, written) \
    X(arena, _spare) X(arena, lock) X(arena, peak_bytes) X(arena, used_bytes) X(slot, after) X(slot, extents) X(slot, pieces) \
    X(engine, _to_device) X(engine, _to_host) X(queue, _burst) X(queue, _handle) X(queue, _lock) X(queue, _newest) X(queue, _runtime) \
    X(queue, events) X(queue, num_ended) X(queue, num_queued) X(cuda_copy, _event) X(cuda_copy, _number) X(cuda_copy, queue) \
    X(event, _unused) X(event, handle) X(events, current_device) X(events, index) X(events, raw_stream) X(events, unused) \
    X(runtime, copy_at) X(runtime, record_at) X(runtime, wait_at)
#define DECLARE(type, name) Py_ssize_t type##_##name;
SLOTS(DECLARE)
#undef DECLARE

// ------------------------------------------------------------------ small things

struct Own {  // a reference of ours
    PyObject *at;
    explicit Own(PyObject *object = nullptr) : at(object) {}
    Own(const Own &) = delete;
    Own &operator=(const Own &) = delete;
    ~Own() { Py_XDECREF(at); }
    explicit operator bool() const { return at != nullptr; }
    PyObject *give() { return std::exchange(at, nullptr); }
};

struct Failed {};  // a Python error is set

PyObject *checked(PyObject *object) {
    if (object == nullptr) throw Failed();
    return object;
}

int checked(int status) {
    if (status < 0) throw Failed();
    return status;
}

int64_t as_int(PyObject *object) {
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw Failed();
    return value;
}

PyObject *an_int(int64_t value) { return checked(PyLong_FromLongLong(value)); }

// Attributes by name, of what has a dictionary.

PyObject *get(PyObject *object, PyObject *name) { return checked(PyObject_GetAttr(object, name)); }

int64_t get_int(PyObject *object, PyObject *name) {
    Own value(get(object, name));
    return as_int(value.at);
}

void set_int(PyObject *object, PyObject *name, int64_t value) {
    Own owned(an_int(value));
    checked(PyObject_SetAttr(object, name, owned.at));
}

// Attributes by place. What is seen is borrowed of the object.

PyObject *&slot(PyObject *object, Py_ssize_t place) {
    return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + place);
}

PyObject *see(PyObject *object, Py_ssize_t place) {
    PyObject *found = slot(object, place);
    if (found == nullptr) {
        PyErr_SetString(PyExc_AttributeError, "an attribute was not set");
        throw Failed();
    }
    return found;
}

PyObject *take(PyObject *object, Py_ssize_t place) { return Py_NewRef(see(object, place)); }

int64_t see_int(PyObject *object, Py_ssize_t place) { return as_int(see(object, place)); }

void put(PyObject *object, Py_ssize_t place, PyObject *owned) {  // takes the reference over
    PyObject *before = std::exchange(slot(object, place), checked(owned));
    Py_XDECREF(before);
}

void put_shared(PyObject *object, Py_ssize_t place, PyObject *value) { put(object, place, Py_NewRef(value)); }

void put_int(PyObject *object, Py_ssize_t place, int64_t value) { put(object, place, an_int(value)); }

PyObject *find(PyObject *dict, PyObject *key) {  // borrowed; nullptr for none
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == nullptr && PyErr_Occurred()) throw Failed();
    return found;
}

PyObject *alone(PyObject *item) {  // [item]
    PyObject *list = checked(PyList_New(1));
    PyList_SET_ITEM(list, 0, Py_NewRef(item));
    return list;
}

// dict.setdefault(key, []).append(item)
void append_at(PyObject *dict, PyObject *key, PyObject *item) {
    PyObject *there = find(dict, key);
    if (there != nullptr) {
        checked(PyList_Append(there, item));
        return;
    }
    Own list(alone(item));
    checked(PyDict_SetItem(dict, key, list.at));
}

Py_ssize_t size_of(PyObject *object) { return checked(static_cast<int>(PyObject_Size(object))); }

bool equal(PyObject *one, PyObject *other) { return checked(PyObject_RichCompareBool(one, other, Py_EQ)); }

PyObject *referent(PyObject *weak) {  // borrowed as long as the GIL is held; nullptr for none
    if (weak == Py_None) return nullptr;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = nullptr;
    checked(PyWeakref_GetRef(weak, &found));
    Py_XDECREF(found);  // somebody else holds it, too
    return found;
#else
    PyObject *found = PyWeakref_GET_OBJECT(weak);
    return found == Py_None ? nullptr : found;
#endif
}

PyObject *weak_reference(PyObject *object) { return checked(PyWeakref_NewRef(object, nullptr)); }

PyObject *allocate(PyTypeObject *type) { return checked(type->tp_alloc(type, 0)); }

c10::StorageImpl *storage_of(const at::Tensor &tensor) { return tensor.storage().unsafeGetStorageImpl(); }

PyObject *address_of(const at::Tensor &tensor) { return checked(PyLong_FromVoidPtr(storage_of(tensor))); }

// What `views.weak_reference` returns.
PyObject *watch_of(const at::Tensor &tensor) {
    Own watch(allocate(of.weak));
    c10::StorageImpl *storage = storage_of(tensor);
    PyObject *address = checked(PyLong_FromVoidPtr(storage));
    c10::raw::weak_intrusive_ptr::incref(storage);
    put(watch.at, weak_cdata, address);
    return watch.give();
}

// In place of its `__del__`.
PyObject *weak_dropped(PyObject *watch, PyObject *) {
    PyObject *address = slot(watch, weak_cdata);
    if (address != nullptr) c10::raw::weak_intrusive_ptr::decref(static_cast<c10::StorageImpl *>(PyLong_AsVoidPtr(address)));
    Py_RETURN_NONE;
}

bool is_at(PyObject *watch, const at::Tensor &tensor) {
    return watch != Py_None && PyLong_AsVoidPtr(see(watch, weak_cdata)) == storage_of(tensor);
}

int64_t version_of(const at::Tensor &tensor) { return static_cast<int64_t>(tensor._version()); }

bool is_plain_type(PyObject *object) { return Py_TYPE(object) == of.tensor || Py_TYPE(object) == of.parameter; }

bool has_bytes(const at::Tensor &tensor) {
    return tensor.defined() && tensor.layout() == at::kStrided && tensor.unsafeGetTensorImpl()->has_storage();
}

bool is_of_numbers(const at::Tensor &tensor) {
    return !tensor.is_nested() && !tensor.is_quantized() && !tensor._is_zerotensor();
}

// What an operation draws from, as `Tape.generator` has it; undefined where that must be asked.
at::Generator generator_of(PyObject *device, PyObject *kwargs) {
    if (!THPDevice_Check(device) || (kwargs != nullptr && find(kwargs, s_generator) != nullptr)) return {};
    const at::Device &is = reinterpret_cast<THPDevice *>(device)->device;
    return is.is_cpu() || is.is_cuda() ? at::globalContext().defaultGenerator(is) : at::Generator();
}

// As `tensors.tensors_of`.
PyObject *tensors_of(PyObject *out) {
    if (Py_TYPE(out) == of.tensor) return alone(out);
    bool are_plain = PyTuple_CheckExact(out);
    for (Py_ssize_t at = 0; are_plain && at < PyTuple_GET_SIZE(out); ++at) are_plain = Py_TYPE(PyTuple_GET_ITEM(out, at)) == of.tensor;
    return checked(are_plain ? PySequence_List(out) : PyObject_CallOneArg(of.tensors_of, out));
}

// What a tensor is a view of, or itself.
const at::TensorBase &root_of(const at::Tensor &tensor) { return tensor.is_view() ? tensor._base() : tensor; }

// As `views.root_of`, of a tensor and its object.
PyObject *weak_root_of(PyObject *object, const at::Tensor &tensor) {
    Own root(tensor.is_view() ? checked(THPVariable_Wrap(tensor._base())) : Py_NewRef(object));
    return weak_reference(root.at);
}

bool is_of_parameter(PyObject *object, const at::Tensor &tensor) {
    if (!tensor.is_view()) return Py_TYPE(object) == of.parameter;
    const at::TensorBase &base = tensor._base();
    if (!base.is_leaf()) return false;
    Own wrapped(checked(THPVariable_Wrap(base)));
    return PyObject_TypeCheck(wrapped.at, of.parameter);
}

// What `View.of` returns.
PyObject *view_of(PyObject *object, const at::Tensor &tensor) {
    Own view(checked(of.view->tp_alloc(of.view, 6)));
    const auto item = [&](Py_ssize_t place, PyObject *owned) { PyTuple_SET_ITEM(view.at, place, checked(owned)); };
    item(0, PyObject_GetAttr(object, s_dtype));
    item(1, PyObject_GetAttr(object, s_shape));
    const auto strides = tensor.strides();
    PyObject *stride = checked(PyTuple_New(static_cast<Py_ssize_t>(strides.size())));
    PyTuple_SET_ITEM(view.at, 2, stride);
    for (size_t at = 0; at < strides.size(); ++at)
        PyTuple_SET_ITEM(stride, static_cast<Py_ssize_t>(at), an_int(strides[at]));
    item(3, an_int(tensor.storage_offset() * static_cast<int64_t>(tensor.element_size())));
    item(4, PyBool_FromLong(tensor.is_conj()));
    item(5, PyBool_FromLong(tensor.is_neg()));
    return view.give();
}

bool are_ints(PyObject *tuple, at::IntArrayRef numbers) {
    if (PyTuple_GET_SIZE(tuple) != static_cast<Py_ssize_t>(numbers.size())) return false;
    for (size_t at = 0; at < numbers.size(); ++at)
        if (as_int(PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(at))) != numbers[at]) return false;
    return true;
}

// Whether a tensor looks at its storage like that: `View.of(tensor) == view`.
bool looks_so(PyObject *view, const at::Tensor &tensor) {
    return reinterpret_cast<THPDtype *>(PyTuple_GET_ITEM(view, 0))->scalar_type == tensor.scalar_type() &&
           are_ints(PyTuple_GET_ITEM(view, 1), tensor.sizes()) && are_ints(PyTuple_GET_ITEM(view, 2), tensor.strides()) &&
           as_int(PyTuple_GET_ITEM(view, 3)) == tensor.storage_offset() * static_cast<int64_t>(tensor.element_size()) &&
           tensor.is_conj() == (PyTuple_GET_ITEM(view, 4) == Py_True) && tensor.is_neg() == (PyTuple_GET_ITEM(view, 5) == Py_True);
}

struct ErrorAside {  // what is raised, while something else is called
    PyObject *type, *value, *trace;
    ErrorAside() { PyErr_Fetch(&type, &value, &trace); }
    ~ErrorAside() { PyErr_Restore(type, value, trace); }
};

// What the collector asks of a type of ours, which refers to each of `EACH`: `prefix_traverse`, `_clear` and `_dealloc`.
#define VISIT(name) Py_VISIT(self->name);
#define CLEAR(name) Py_CLEAR(self->name);
#define COLLECTED(Type, prefix, EACH) \
    int prefix##_traverse(Type *self, visitproc visit, void *arg) { \
        EACH(VISIT) \
        Py_VISIT(Py_TYPE(self)); \
        return 0; \
    } \
    int prefix##_clear(Type *self) { \
        EACH(CLEAR) \
        return 0; \
    } \
    void prefix##_dealloc(Type *self) { \
        PyTypeObject *type = Py_TYPE(self); \
        PyObject_GC_UnTrack(self); \
        prefix##_clear(self); \
        type->tp_free(self); \
        Py_DECREF(type); \
    }

template <class Body>
PyObject *guarded(Body body) {
    try {
        return body();
    } catch (const Failed &) {
        return nullptr;
    } catch (...) {  // PyTorch's own, such as torch.OutOfMemoryError
        if (!PyErr_Occurred()) torch::translate_exception_to_python(std::current_exception());
        return nullptr;
    }
}

}  // namespace
