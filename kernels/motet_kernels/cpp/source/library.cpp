// What a process may ask the library: its last failure, the CPU's width, the speed of the memory.
#include <cstdio>

#include "border.h"
#include "vectors.h"

namespace {

thread_local char newest_failure[200];

}  // namespace

void note_failure(const char *reason) noexcept { snprintf(newest_failure, sizeof newest_failure, "%s", reason); }

extern "C" {

// Why this thread's newest failed call returned FAILED.
const char *motet_failure() { return newest_failure; }

// How many floats a vector has: 16 with AVX-512, 8 with AVX2, 4 with NEON.
int64_t motet_lanes() { return LANES; }

// Reads all bytes once, as fast as this machine can: the reference of benchmarks. The address is a multiple of 64.
uint64_t motet_read(const uint8_t *from, int64_t bytes) {
    words sums[8] = {};
    const int64_t step = sizeof sums;
    int64_t at = 0;
    for (; at + step <= bytes; at += step)
        for (int i = 0; i < 8; ++i) {
            words next;
            memcpy(&next, from + at + i * sizeof next, sizeof next);
            sums[i] ^= next;
        }
    uint64_t result = 0;
    for (; at < bytes; ++at) result ^= from[at];
    for (const words &vector : sums)
        for (int lane = 0; lane < LANES; ++lane) result ^= vector[lane];
    return result;
}
}
