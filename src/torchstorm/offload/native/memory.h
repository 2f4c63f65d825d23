// Memory of our own for the large tensors of a CPU, while a Session has a budget of RAM. The C library keeps what was freed, and
// where sizes change from step to step, small blocks between large ones divide it: a process came to hold ten times its budget
// (docs/decisions/0037). Here large blocks alone lie in one range of addresses, each at its lowest place that is free; what
// is free beside that goes back to the system once it is more than a part of the peak.
//
// It is called by any thread, without the GIL.

#pragma once

#include "objects.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

class OwnMemory : public c10::Allocator {
  public:
    // From now on PyTorch takes large blocks from here, or no more. Returns whether it does. Each call begins a step.
    bool use(bool whether) {
        std::lock_guard<std::mutex> guard(lock_);
        if (whether && !reserve()) return false;
        is_used_ = whether;
        peak_ = std::max(step_peak_, peak_ - peak_ / 16);  // one large step is forgotten by and by
        step_peak_ = in_use_;
        give_back();
        return whether;
    }

    c10::DataPtr allocate(size_t nbytes) override {
        c10::DataPtr own = allocate_own(nbytes);
        return own ? std::move(own) : next_->allocate(nbytes);
    }

    // Nothing for a small block, while it is not used, and where nothing is free.
    c10::DataPtr allocate_own(size_t nbytes) {
        char *at = nbytes >= least && is_used_ ? take(nbytes) : nullptr;
        if (at == nullptr) return {};
        report(at, static_cast<int64_t>(in_pages(nbytes)));
        return {at, at, &OwnMemory::free, c10::Device(c10::DeviceType::CPU)};
    }

    void copy_data(void *to, const void *from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

    // Libraries within PyTorch let go by this of what others may have allocated.
    c10::DeleterFnPtr raw_deleter() const override { return &OwnMemory::free; }

    std::pair<size_t, size_t> figures() {
        std::lock_guard<std::mutex> guard(lock_);
        return {in_use_, touched_bytes_};
    }

    static OwnMemory &only() {
        static OwnMemory *memory = new OwnMemory;  // tensors may be let go of when the process ends
        return *memory;
    }

  private:
    static constexpr size_t page = 4096, chunk = size_t(2) << 20;  // a huge page
    static constexpr size_t least = size_t(1) << 20, spare = 8 * chunk;  // smaller blocks are the C library's

    static size_t in_pages(size_t nbytes) { return (nbytes + page - 1) / page * page; }

    bool reserve() {
#ifdef __linux__
        if (base_ != nullptr) return true;
        if (sysconf(_SC_PAGESIZE) != page) return false;
        // Several times what there is, since gaps take addresses, too; no memory is behind them.
        size_ = 4 * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page / chunk * chunk;
        void *found = mmap(nullptr, size_ + chunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return false;
        base_ = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(found) + chunk - 1) / chunk * chunk);
        madvise(base_, size_, MADV_HUGEPAGE);
        gaps_[0] = size_;
        touched_.assign(size_ / chunk, false);
        next_ = c10::GetCPUAllocator();
        c10::SetCPUAllocator(this);  // for good: what came from here may be let go of by whoever is the allocator then
        pthread_atfork([] { only().lock_.lock(); }, [] { only().lock_.unlock(); }, [] { only().lock_.unlock(); });
        return true;
#else
        return false;
#endif
    }

    char *take(size_t nbytes) {
        const size_t wanted = in_pages(nbytes);
        std::lock_guard<std::mutex> guard(lock_);
        auto gap = gaps_.begin();
        while (gap != gaps_.end() && gap->second < wanted) ++gap;
        if (gap == gaps_.end()) return nullptr;
        const size_t at = gap->first, rest = gap->second - wanted;
        gaps_.erase(gap);
        if (rest != 0) gaps_[at + wanted] = rest;
        blocks_[base_ + at] = wanted;
        in_use_ += wanted;
        step_peak_ = std::max(step_peak_, in_use_);
        peak_ = std::max(peak_, in_use_);
        bool is_new = false;
        for (size_t one = at / chunk; one * chunk < at + wanted; ++one) {
            if (touched_[one]) continue;
            touched_[one] = is_new = true;
            touched_bytes_ += chunk;
            end_ = std::max(end_, one + 1);
        }
        if (is_new) give_back();
        return base_ + at;
    }

    static void free(void *at) {
        OwnMemory &memory = only();
        char *block = static_cast<char *>(at);
        if (block < memory.base_ || block >= memory.base_ + memory.size_) return memory.next_->raw_deallocate(at);
        memory.report(at, -static_cast<int64_t>(memory.put(block)));
    }

    size_t put(char *block) {
        std::lock_guard<std::mutex> guard(lock_);
        const auto found = blocks_.find(block);
        const size_t nbytes = found->second;
        blocks_.erase(found);
        in_use_ -= nbytes;
        size_t at = block - base_, size = nbytes;
        auto next = gaps_.lower_bound(at);
        if (next != gaps_.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second == at) {
                at = before->first;
                size += before->second;
                gaps_.erase(before);
            }
        }
        if (next != gaps_.end() && at + size == next->first) {
            size += next->second;
            gaps_.erase(next);
        }
        gaps_[at] = size;
        if (!is_used_) give_back();
        return nbytes;
    }

    // Of what is free, gives the highest to the system while there is more than a part of the peak.
    void give_back() {
        const size_t most = is_used_ ? peak_ + peak_ / 4 + spare : in_use_;
        for (auto gap = gaps_.rbegin(); gap != gaps_.rend() && touched_bytes_ > most; ++gap) {
            const size_t first = (gap->first + chunk - 1) / chunk;
            size_t one = std::min((gap->first + gap->second) / chunk, end_);
            while (one-- > first && touched_bytes_ > most) {
                if (!touched_[one]) continue;
                madvise(base_ + one * chunk, chunk, MADV_DONTNEED);
                touched_[one] = false;
                touched_bytes_ -= chunk;
            }
        }
    }

    void report(void *at, int64_t nbytes) {
        if (!c10::memoryProfilingEnabled()) return;
        const auto [in_use, touched] = figures();
        c10::reportMemoryUsageToProfiler(at, nbytes, in_use, touched, c10::Device(c10::DeviceType::CPU));
    }

    std::mutex lock_;
    std::map<size_t, size_t> gaps_;               // by where they begin: bytes
    std::unordered_map<char *, size_t> blocks_;   // bytes
    std::vector<bool> touched_;                   // of the chunks, whether the system has given memory
    c10::Allocator *next_ = nullptr;              // the one before
    char *base_ = nullptr;
    size_t size_ = 0, end_ = 0, in_use_ = 0, touched_bytes_ = 0, step_peak_ = 0, peak_ = 0;
    std::atomic<bool> is_used_ = false;
};

// own_memory(whether)
PyObject *own_memory(PyObject *, PyObject *whether) {
    return guarded([&]() -> PyObject * { return PyBool_FromLong(OwnMemory::only().use(checked(PyObject_IsTrue(whether)))); });
}

// own_memory_figures(): bytes of blocks, and of what the system has given for them.
PyObject *own_memory_figures(PyObject *, PyObject *) {
    return guarded([&]() -> PyObject * {
        const auto [in_use, touched] = OwnMemory::only().figures();
        return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(in_use), static_cast<Py_ssize_t>(touched));
    });
}

// own_memory_of(nbytes): a tensor (nbytes,) uint8 that begins with a page, which nothing has filled; None where PyTorch's
// own would not come from here.
PyObject *own_memory_of(PyObject *, PyObject *number) {
    return guarded([&]() -> PyObject * {
        const size_t nbytes = PyLong_AsSize_t(number);
        if (nbytes == static_cast<size_t>(-1) && PyErr_Occurred()) return nullptr;
        OwnMemory &memory = OwnMemory::only();
        c10::DataPtr data = memory.allocate_own(nbytes);
        if (!data) Py_RETURN_NONE;
        c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), &memory, true);
        at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
            std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
        tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(nbytes)});
        return THPVariable_Wrap(std::move(tensor));
    });
}

}  // namespace
