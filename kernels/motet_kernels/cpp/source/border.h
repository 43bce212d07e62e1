// The results of calls from Python. No exception may leave the library: Python's caller (ctypes) does not know C++
// exceptions, and the process would end.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

// motet_kernels/cpp/library.py has the same numbers.
constexpr int64_t OUT_OF_MEMORY = -1, FAILED = -2;

// Keeps why this thread's call FAILED.
void note_failure(const char *reason) noexcept;

// Returns the result of `compute`, or OUT_OF_MEMORY or FAILED.
template <typename Compute> int64_t answer_of(const Compute &compute) noexcept {
    try {
        return compute();
    } catch (const std::bad_alloc &) {
        return OUT_OF_MEMORY;
    } catch (const std::exception &error) {
        note_failure(error.what());
    } catch (...) {
        note_failure("an exception of an unknown type");
    }
    return FAILED;
}
