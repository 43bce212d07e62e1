// What a process asks the library about itself and the machine.
#include <cstdio>

#include "border.h"
#include "tiles.h"
#include "vectors.h"

#if defined(MOTET_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

thread_local char newest_failure[200];

}  // namespace

void note_failure(const char *reason) noexcept { snprintf(newest_failure, sizeof newest_failure, "%s", reason); }

extern "C" {

// Why the newest call of this thread failed, if it says so.
const char *motet_failure() { return newest_failure; }

// Before all others. 0: Linux refuses what the library's instructions need. It gives tiles to processes that ask.
int64_t motet_allowed() {
#if defined(MOTET_TILES)
    constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
#else
    return 1;
#endif
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
