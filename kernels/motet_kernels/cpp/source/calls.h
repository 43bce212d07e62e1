// What other parts of the library call, besides Python.
#pragma once

#include <cstdint>

extern "C" {

void motet_add_lora(int64_t type, const void *segments, int64_t count, float *products, int64_t threads, int64_t linear,
                    int64_t inputs, int64_t outputs, const void *x, int64_t x_stride, void *y, int64_t y_stride);

void motet_attention(int64_t type, const void *batch, int64_t layer, int64_t heads, const void *queries,
                     const void *keys, const void *values, int64_t query_head, int64_t query_row, int64_t key_head,
                     int64_t key_row, int64_t value_head, int64_t value_row, void *out, float scale, int64_t window,
                     float softcap);
}
