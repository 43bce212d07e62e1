// What descriptions of calls have in common.
#pragma once

#include "walk.h"

// A linear that adapters may change.
struct Adapted {
    int64_t index, inputs, outputs;
};

// What add_lora calls its segments, of adapters that change these linears. The products of `at_once` linears have room.
void walk_segments(Walk &walk, int64_t type, const void *&segments, int64_t count, int64_t rows,
                   const List<Adapted> &linears, float *&products, int64_t at_once);

struct KeyShape {
    int64_t heads = 0, width = 0;
};

// What attention calls its batch, of `rows` rows. `layers`: those that the pages have at least. `window`: of the layer
// that sees most; 0: all tokens before. Without rows of a sequence, the pages are not looked at.
KeyShape walk_batch(Walk &walk, int64_t type, const void *&batch, int64_t rows, int64_t layers, int64_t window);
