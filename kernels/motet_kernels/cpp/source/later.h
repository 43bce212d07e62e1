// What is prefetched for later work.
#pragma once

#include <cstdint>

// Bytes that the work after a linear reads. While the linear multiplies, memory has time to send them.
struct Later {
    const uint8_t *from;
    int64_t bytes;
};
