// The results of calls from Python. No exception may leave the library: nobody above knows its type, and the process
// would end.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

// motet_kernels/cpp/library.py has the same names of these numbers.
constexpr int64_t OUT_OF_MEMORY = -1, FAILED = -2;

// Why the newest call of this thread FAILED.
void note_failure(const char *reason) noexcept;

// Returns the result of `compute`, or one of the numbers above.
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
