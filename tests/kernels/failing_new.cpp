// Takes the place of operator new in a process that loads it before all else, and fails where it is told to: among the
// allocations of one library, which are counted.
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

uintptr_t first = 0, end = 0;  // addresses of that library
pthread_t caller;
std::atomic<bool> only_others{false};
std::atomic<long> left{-1};  // allocations before the one that fails
std::atomic<long> counted{0};

bool is_counted(void *from) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(from);
    return first <= address && address < end && (!only_others || !pthread_equal(pthread_self(), caller));
}

void *allocate(size_t size, size_t alignment, void *from) {
    if (is_counted(from)) {
        ++counted;
        if (left-- == 0) throw std::bad_alloc();
    }
    void *memory = nullptr;
    if (posix_memalign(&memory, alignment, size ? size : 1)) throw std::bad_alloc();
    return memory;
}

}  // namespace

extern "C" {

void watch(void *function_of_library) {
    dl_iterate_phdr(
        [](dl_phdr_info *library, size_t, void *function) {
            for (int i = 0; i < library->dlpi_phnum; ++i) {
                const auto &part = library->dlpi_phdr[i];
                const uintptr_t begin = library->dlpi_addr + part.p_vaddr, address = (uintptr_t)function;
                if (part.p_type != PT_LOAD || address < begin || address >= begin + part.p_memsz) continue;
                first = begin;
                end = begin + part.p_memsz;
            }
            return 0;
        },
        function_of_library);
}

// From now on, the allocation of this number fails, from 0; -1: none does. `of_others`: only those of other threads than
// this one count.
void fail_allocation(long number, bool of_others) {
    caller = pthread_self();
    only_others = of_others;
    counted = 0;
    left = number;
}

// Since then.
long allocations() { return counted; }
}

void *operator new(size_t size) { return allocate(size, alignof(std::max_align_t), __builtin_return_address(0)); }
void *operator new[](size_t size) { return allocate(size, alignof(std::max_align_t), __builtin_return_address(0)); }
void *operator new(size_t size, std::align_val_t alignment) {
    return allocate(size, (size_t)alignment, __builtin_return_address(0));
}
void operator delete(void *memory) noexcept { free(memory); }
void operator delete[](void *memory) noexcept { free(memory); }
void operator delete(void *memory, size_t) noexcept { free(memory); }
void operator delete[](void *memory, size_t) noexcept { free(memory); }
void operator delete(void *memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void *memory, size_t, std::align_val_t) noexcept { free(memory); }
