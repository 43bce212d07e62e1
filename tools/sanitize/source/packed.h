// The memory of packed weights.
#pragma once

#include "linear.h"
#include "walk.h"

inline int64_t packed_bytes(int64_t type, int64_t outputs, int64_t inputs) {
    return panels_of(outputs) * panel_size(inputs) * size_of_type(type);
}
