// Transposing LANES × LANES words.
#pragma once

#include "vectors.h"

template <int S, size_t... L> INLINE void swap_lanes(words &x, words &y, std::index_sequence<L...>) {
    floats upper = SHUFFLE(as_floats(x), as_floats(y), ((int)L & S ? (int)L - S + LANES : (int)L)...);
    floats lower = SHUFFLE(as_floats(x), as_floats(y), ((int)L & S ? (int)L + LANES : (int)L + S)...);
    x = as_words(upper);
    y = as_words(lower);
}
// Lane j of vector i becomes lane i of vector j.
template <int S = 1> INLINE void transpose(words *vectors) {
    if constexpr (S < LANES) {
        for (int i = 0; i < LANES; ++i)
            if (!(i & S)) swap_lanes<S>(vectors[i], vectors[i + S], std::make_index_sequence<LANES>{});
        transpose<2 * S>(vectors);
    }
}
