// What a call from Python comes back with. No exception may leave the library: nobody above knows what it is, and the
// process would end.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

// The names of these numbers are those of motet_kernels/cpp/library.py.
constexpr int64_t OUT_OF_MEMORY = -1, FAILED = -2;

// Why the newest call of this thread FAILED.
void note_failure(const char *reason) noexcept;

// What `compute` returns, or one of the numbers above.
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
