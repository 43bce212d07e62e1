// The bytes that are prefetched for later work.
#pragma once

#include <cstdint>

// Bytes that the work after a linear reads. They are prefetched while the linear multiplies.
struct Later {
    const uint8_t *from;
    int64_t bytes;
};
