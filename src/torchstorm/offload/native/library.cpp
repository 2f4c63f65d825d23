// The short way through a settled step in C++: what `Settled`, `Saver`, `Repeats`, `Residency` and `SavedTensors` do in Python
// for what a step has most of. It makes the same objects, and hands everything else to those.
//
// Every function runs under the GIL. One that finds nothing it knows changes nothing: Python's own is called then.

#include "again.h"
#include "blocks.h"
#include "hooks.h"
#include "letting_go.h"
#include "memory.h"
#include "records.h"
#include "watch.h"

namespace {

Py_ssize_t place_of(PyTypeObject *type, const char *name) {
    Own found(checked(PyObject_GetAttrString(reinterpret_cast<PyObject *>(type), name)));
    if (Py_TYPE(found.at) != &PyMemberDescr_Type) {
        PyErr_Format(PyExc_TypeError, "%s.%s is not in __slots__", type->tp_name, name);
        throw Failed();
    }
    return reinterpret_cast<PyMemberDescrObject *>(found.at)->d_member->offset;
}

// use(classes, functions): Python's own, by the names in `TYPES`, `OBJECTS` and `NUMBERS`.
PyObject *use(PyObject *, PyObject *args) {
    return guarded([&]() -> PyObject * {
        PyObject *found;
        if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &found)) return nullptr;
        const auto named = [&](const char *name) {
            Own key(checked(PyUnicode_FromString(name)));
            PyObject *item = find(found, key.at);
            if (item == nullptr) {
                PyErr_SetObject(PyExc_KeyError, key.at);
                throw Failed();
            }
            return Py_NewRef(item);
        };
#define FIND(name) of.name = reinterpret_cast<PyTypeObject *>(named(#name));
        TYPES(FIND)
#undef FIND
#define FIND(name) of.name = named(#name);
        OBJECTS(FIND)
#undef FIND
#define FIND(name) of.name = as_int(named(#name));
        NUMBERS(FIND)
#undef FIND
#define PLACE(type, name) type##_##name = place_of(of.type, #name);
        SLOTS(PLACE)
#undef PLACE
        set_finalizer(of.placeholder, &placeholder_dropped_method);
        set_finalizer(of.kept, &kept_dropped_method);
        set_finalizer(of.event, &event_dropped_method);
        set_finalizer(of.weak, &weak_dropped_method);
        Py_RETURN_NONE;
    });
}

// Asks the processor for an object of a list, if it is that long: at a step's begin none of a model is in its caches.
void fetch_soon(PyObject *list, Py_ssize_t at) {
    if (at < PyList_GET_SIZE(list)) __builtin_prefetch(PyList_GET_ITEM(list, at));
}

// look(tensors...): a number that is another one where any of a model's tensors, in these lists, is another, lies
// elsewhere, or is of another kind; None where one of them is more than numbers in a storage.
PyObject *look(PyObject *, PyObject *const *given, Py_ssize_t num) {
    return guarded([&]() -> PyObject * {
        uint64_t seen = 0xcbf29ce484222325;  // FNV-1a
        const auto add = [&seen](uint64_t part) { seen = (seen ^ part) * 0x100000001b3; };
        for (PyObject *const *tensors = given; tensors < given + num; ++tensors) {
            if (!PyList_CheckExact(*tensors)) Py_RETURN_NONE;
            for (Py_ssize_t at = 0; at < PyList_GET_SIZE(*tensors); ++at) {
                fetch_soon(*tensors, at + 16);
                if (at + 8 < PyList_GET_SIZE(*tensors) && is_plain_type(PyList_GET_ITEM(*tensors, at + 8)))
                    __builtin_prefetch(THPVariable_Unpack(PyList_GET_ITEM(*tensors, at + 8)).unsafeGetTensorImpl());
                PyObject *object = PyList_GET_ITEM(*tensors, at);
                if (!is_plain_type(object)) Py_RETURN_NONE;
                const at::Tensor &tensor = THPVariable_Unpack(object);
                if (!has_bytes(tensor)) Py_RETURN_NONE;
                add(reinterpret_cast<uint64_t>(object));
                add(reinterpret_cast<uint64_t>(storage_of(tensor)));
                add(static_cast<uint64_t>(tensor.scalar_type()));
                add(static_cast<uint64_t>(tensor.device().type()));
                add(static_cast<uint64_t>(tensor.device().index()));
                add(static_cast<uint64_t>(tensor.numel()));
                add(tensor.requires_grad());
            }
        }
        return PyLong_FromUnsignedLongLong(seen);
    });
}

// holds(modules, held, items): whether these modules still hold their tensors and modules in these dictionaries, and in
// them these.
PyObject *holds(PyObject *, PyObject *const *given, Py_ssize_t num) {
    return guarded([&]() -> PyObject * {
        for (Py_ssize_t at = 0; at < 3; ++at)
            if (num != 3 || !PyList_CheckExact(given[at])) Py_RETURN_FALSE;
        PyObject *modules = given[0], *held = given[1], *items = given[2], *item;
        Py_ssize_t num_held = 0, num_items = 0;
        for (Py_ssize_t at = 0; at < PyList_GET_SIZE(modules); ++at) {
            fetch_soon(modules, at + 8);
            for (Py_ssize_t place = 0; place < 3; ++place) fetch_soon(held, 3 * (at + 8) + place);
            for (PyObject *name : {s__parameters, s__buffers, s__modules}) {
                Own dict(get(PyList_GET_ITEM(modules, at), name));
                if (num_held >= PyList_GET_SIZE(held) || PyList_GET_ITEM(held, num_held++) != dict.at) Py_RETURN_FALSE;
                if (!PyDict_Check(dict.at)) Py_RETURN_FALSE;
                for (Py_ssize_t next = 0; PyDict_Next(dict.at, &next, nullptr, &item);)
                    if (num_items >= PyList_GET_SIZE(items) || PyList_GET_ITEM(items, num_items++) != item) Py_RETURN_FALSE;
            }
        }
        return PyBool_FromLong(num_held == PyList_GET_SIZE(held) && num_items == PyList_GET_SIZE(items));
    });
}

#define METHOD(name, flags) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(name)), flags, nullptr}
PyMethodDef methods[] = {
    METHOD(use, METH_VARARGS), METHOD(look, METH_FASTCALL), METHOD(holds, METH_FASTCALL), METHOD(may_have_hooks, METH_O), METHOD(kinds, METH_FASTCALL), METHOD(hooks, METH_O), METHOD(run, METH_FASTCALL), METHOD(again, METH_FASTCALL),
    METHOD(over, METH_FASTCALL), METHOD(watch, METH_FASTCALL), METHOD(see_writes, METH_O), METHOD(own_memory, METH_O),
    METHOD(own_memory_figures, METH_NOARGS), METHOD(own_memory_of, METH_O),
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "torchstorm_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMethodDef way_methods[] = {
    {"holds", way_holds, METH_O, nullptr}, {"is_waiting", way_is_waiting, METH_NOARGS, nullptr}, {"settle", way_settle, METH_NOARGS, nullptr},
    {"bring_over", way_bring_over, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot moments_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(moments_new)}, {Py_tp_dealloc, reinterpret_cast<void *>(moments_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(moments_traverse)}, {0, nullptr}};
PyType_Slot way_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(way_new)}, {Py_tp_dealloc, reinterpret_cast<void *>(way_gone)},
    {Py_tp_traverse, reinterpret_cast<void *>(way_traverse)}, {Py_tp_clear, reinterpret_cast<void *>(way_clear)},
    {Py_tp_methods, way_methods},
    {0, nullptr}};
PyMethodDef operators_methods[] = {{"covered", operators_covered, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot operators_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(operators_new)}, {Py_tp_dealloc, reinterpret_cast<void *>(operators_dealloc)},
    {Py_tp_methods, operators_methods}, {0, nullptr}};
PyType_Slot watch_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void *>(watch_dealloc)}, {Py_tp_traverse, reinterpret_cast<void *>(watch_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(watch_clear)}, {Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
    {Py_tp_members, watch_members}, {Py_tp_methods, watch_methods}, {Py_tp_getset, watch_getters}, {0, nullptr}};
constexpr unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
PyType_Slot stay_slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(stay_dealloc)}, {0, nullptr}};
PyType_Slot lock_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(lock_new)}, {Py_tp_dealloc, reinterpret_cast<void *>(lock_dealloc)},
    {Py_tp_methods, lock_methods}, {0, nullptr}};
PyType_Spec stay_spec = {
    "torchstorm_native.Stay", sizeof(Stay), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, stay_slots};
PyType_Spec lock_spec = {"torchstorm_native.Lock", sizeof(Lock), 0, Py_TPFLAGS_DEFAULT, lock_slots};
PyType_Spec moments_spec = {"torchstorm_native.Moments", sizeof(Moments), 0, flags, moments_slots};
PyType_Spec way_spec = {"torchstorm_native.Way", sizeof(Way), 0, flags, way_slots};
PyType_Spec operators_spec = {"torchstorm_native.Operators", sizeof(Operators), 0, Py_TPFLAGS_DEFAULT, operators_slots};
PyType_Spec watch_spec = {
    "torchstorm_native.Watch", sizeof(Watch), 0, flags | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, watch_slots};

}  // namespace

PyMODINIT_FUNC PyInit_torchstorm_native(void) {
#define INTERN(name) s_##name = PyUnicode_InternFromString(#name);
    NAMES(INTERN)
#undef INTERN
    PyObject *module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    first = Py_BuildValue("(i)", 0);
    moments_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&moments_spec));
    way_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&way_spec));
    stay_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&stay_spec));
    lock_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&lock_spec));
    watch_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&watch_spec));
    operators_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&operators_spec));
    if (stay_type == nullptr || lock_type == nullptr || watch_type == nullptr || operators_type == nullptr || first == nullptr || moments_type == nullptr || way_type == nullptr) return nullptr;
    if (PyModule_AddObjectRef(module, "Lock", reinterpret_cast<PyObject *>(lock_type)) < 0 ||
        PyModule_AddObjectRef(module, "Moments", reinterpret_cast<PyObject *>(moments_type)) < 0 ||
        PyModule_AddObjectRef(module, "Way", reinterpret_cast<PyObject *>(way_type)) < 0 ||
        PyModule_AddObjectRef(module, "Operators", reinterpret_cast<PyObject *>(operators_type)) < 0)
        return nullptr;
    return module;
}
