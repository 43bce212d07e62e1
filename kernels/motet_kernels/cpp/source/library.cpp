// What every process that loads the library calls first.
#include "parallel.h"
#include "vectors.h"

Threads threads;

extern "C" {

// The functions of the OpenMP library that torch has loaded.
void motet_use_threads(void *parallel, void *barrier, void *number, void *count) {
    threads.parallel = reinterpret_cast<decltype(threads.parallel)>(parallel);
    threads.barrier = reinterpret_cast<decltype(threads.barrier)>(barrier);
    threads.number = reinterpret_cast<decltype(threads.number)>(number);
    threads.count = reinterpret_cast<decltype(threads.count)>(count);
}

// Numbers that one instruction computes with: 16 with AVX-512, 8 with AVX2, 4 with NEON.
int64_t motet_lanes() { return LANES; }

// Reads all bytes once, as fast as this machine can: what benchmarks compare with. The address is a multiple of 64.
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
