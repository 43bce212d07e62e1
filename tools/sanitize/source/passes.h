// What descriptions of passes over all layers, of the decoder and of programs, have in common.
#pragma once

#include "shapes.h"

// How a pass begins: what computes, the rows that it computes, and those of them that it keeps.
template <typename What, typename Of> void walk_pass(Walk &walk, const What *&what, const Of *&of) {
    walk.all(what, sizeof *what, Use::READ, "what computes a pass");
    walk.all(of, sizeof *of, Use::READ, "a pass");
    Of &o = const_cast<Of &>(*of);
    walk.threads(o.threads);
    walk.expect(what->type == FLOATS || what->type == BFLOATS, "the type of a pass");
    walk.expect(o.rows >= 0 && o.kept >= 0, "the rows of a pass");
    walk.all(o.keep, o.kept * (int64_t)sizeof *o.keep, Use::READ, "kept rows", INT64);
    for (int64_t i = 0; i < o.kept; ++i) walk.expect(o.keep[i] >= 0 && o.keep[i] < o.rows, "a kept row");
}

// What it adds to these linears.
template <typename Of> void walk_adapters(Walk &walk, int64_t type, Of &of, const List<Adapted> &linears) {
    if (of.lora)
        walk_segments(walk, type, of.lora, of.lora_count, of.rows, linears, of.lora_products, MOST_LORA_LINEARS);
}
