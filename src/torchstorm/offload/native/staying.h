// What autograd holds of a tensor that stays in a settled step: a `Stay` in place of a `Kept`, and a `StayingStorage` in place of
// a `KeptStorage`, until Python asks for those (`bring_over`).

#pragma once

#include "way.h"

namespace {

struct Stay {
    PyObject_HEAD
    at::Tensor tensor;  // an alias, which shares the version counter of what was saved
    int64_t version;
    const void *pointer;
    Way *way;              // of the step; nullptr once Python has it
    size_t storage, place;  // in that way's arrays
    PyObject *kept;        // what stands for it since Python has it; nullptr before
};

PyTypeObject *stay_type;

void stay_dealloc(Stay *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->way != nullptr) {
        Staying &staying = *self->way->staying;
        staying.stays[self->place] = nullptr;
        if (!--staying.storages[self->storage].num_live) staying.released.push_back(self->storage);
        Py_DECREF(self->way);
    }
    Py_XDECREF(self->kept);
    self->tensor.~Tensor();
    type->tp_free(self);
    Py_DECREF(type);
}

// Of a storage that is among those of `way`.
PyObject *new_stay(Way *way, const at::Tensor &tensor, size_t storage) {
    Stay *self = reinterpret_cast<Stay *>(allocate(stay_type));
    new (&self->tensor) at::Tensor(tensor.tensor_data());
    self->version = version_of(tensor);
    self->pointer = tensor.data_ptr();  // not that of another storage, whose copy it is until it is written to
    self->way = reinterpret_cast<Way *>(Py_NewRef(way));
    self->storage = storage;
    self->place = way->staying->stays.size();
    way->staying->stays.push_back(self);
    ++way->staying->storages[storage].num_live;
    return reinterpret_cast<PyObject *>(self);
}

// The storage that a tensor lies in, among those that stay; nullptr for none.
StayingStorage *staying_at(const Way *way, const at::Tensor &tensor) {
    const auto found = way->staying->by_address.find(storage_of(tensor));
    return found == way->staying->by_address.end() ? nullptr : &way->staying->storages[found->second];
}

PyObject *stay_of(Way *way, const at::Tensor &tensor, const StayingStorage *storage) {
    return new_stay(way, tensor, static_cast<size_t>(storage - way->staying->storages.data()));
}

PyObject *stay_of_new(Way *way, const at::Tensor &tensor, const StayingStorage &storage) {
    Staying &staying = *way->staying;
    staying.by_address[storage.address] = staying.storages.size();
    staying.storages.push_back(storage);
    try {
        return new_stay(way, tensor, staying.storages.size() - 1);
    } catch (...) {
        staying.released.push_back(staying.storages.size() - 1);  // its bytes are counted
        throw;
    }
}

// All that stays, taken from its step, and held.
struct Leaving {
    std::vector<StayingStorage> storages;
    std::vector<Stay *> stays;
    explicit Leaving(Staying &staying) : storages(std::move(staying.storages)) {
        for (Stay *stay : staying.stays) {
            if (stay == nullptr) continue;
            stays.push_back(reinterpret_cast<Stay *>(Py_NewRef(stay)));
            Py_CLEAR(stay->way);  // whoever calls this holds it, too
        }
        staying = Staying();
    }
    Leaving(const Leaving &) = delete;
    Leaving &operator=(const Leaving &) = delete;
    ~Leaving() {
        for (Stay *stay : stays) Py_DECREF(stay);
    }
};

// Forgets the storages that autograd has let go of. Returns their bytes, which are to be uncounted.
int64_t forget_released(Staying &staying) {
    int64_t nbytes = 0;
    for (const size_t at : staying.released) {
        const StayingStorage &storage = staying.storages[at];
        nbytes += storage.counted_bytes;
        const auto found = staying.by_address.find(storage.address);
        if (found != staying.by_address.end() && found->second == at) staying.by_address.erase(found);
    }
    staying.released.clear();
    if (staying.by_address.empty()) {
        staying.storages.clear();
        staying.stays.clear();
    }
    return nbytes;
}

}  // namespace
