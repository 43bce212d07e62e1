// The products of attention on vectors: of queries with the keys of a page, and of weights with the values of a block.
#pragma once

#include "products.h"
#include "transpose.h"

namespace {

constexpr int PAGE = 16;             // tokens
constexpr int PAGES_IN_BLOCK = 8;
constexpr int KEYS_IN_BLOCK = PAGE * PAGES_IN_BLOCK;
constexpr int VECTORS_OF_PAGE = PAGE / LANES;

// 32-bit parts of a row: numbers, or pairs of bfloats if an instruction multiplies pairs.
template <typename T> struct Parts {
    static constexpr int VECTORS = 2;  // of a Pair
    template <typename Count> static INLINE void load(const T *from, Count count, words *into) {
        Pair value = ::load(from, count);
        into[0] = as_words(value.a);
        into[1] = as_words(value.b);
    }
    static INLINE floats add(floats sum, words keys, uint32_t query) {
        float factor;
        memcpy(&factor, &query, sizeof factor);
        return sum + as_floats(keys) * factor;
    }
};
#if defined(__AVX512BF16__)
template <> struct Parts<bfloat> {
    static constexpr int VECTORS = 1;
    template <typename Count> static INLINE void load(const bfloat *from, Count count, words *into) {
        *into = load_raw(from, count).value;
    }
    static INLINE floats add(floats sum, words keys, uint32_t query) {
        return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)keys, (__m512bh)all_words(query));
    }
};
#endif

// Transposes the keys of a page: one part of all tokens becomes contiguous.
template <typename T> INLINE void transpose_page(const T *keys, int64_t width, uint32_t *into) {
    constexpr int VECTORS = Parts<T>::VECTORS;
    by_pairs(width, [&](int64_t i, auto count) {
        for (int first = 0; first < PAGE; first += LANES) {
            words block[VECTORS][LANES];
            for (int token = 0; token < LANES; ++token) {
                words parts[VECTORS];
                Parts<T>::load(keys + (first + token) * width + i, count, parts);
                for (int v = 0; v < VECTORS; ++v) block[v][token] = parts[v];
            }
            for (int v = 0; v < VECTORS; ++v) {
                transpose(block[v]);
                uint32_t *part = into + (i / PAIR * VECTORS + v) * LANES * PAGE;
                for (int lane = 0; lane < LANES; ++lane)
                    memcpy(part + lane * PAGE + first, &block[v][lane], sizeof(words));
            }
        }
    });
}

// Scores of R queries with a page; a query has `parts` parts, and `keys` is the result of transpose_page.
template <int R, typename T>
INLINE void scores_of_page(const uint32_t *queries, int64_t parts, const uint32_t *keys, float *into) {
    floats sums_of[R][VECTORS_OF_PAGE] = {};
    for (int64_t part = 0; part < parts; ++part)
        for (int v = 0; v < VECTORS_OF_PAGE; ++v) {
            words of_keys;
            memcpy(&of_keys, keys + part * PAGE + v * LANES, sizeof of_keys);
            for (int r = 0; r < R; ++r)
                sums_of[r][v] = Parts<T>::add(sums_of[r][v], of_keys, queries[r * parts + part]);
        }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECTORS_OF_PAGE; ++v) store_floats(into + r * KEYS_IN_BLOCK + v * LANES, sums_of[r][v]);
}

// Like scores_of_page, for few queries: `keys` is not transposed, because that would take longer than it saves.
template <int R, typename T>
INLINE void scores_of_few(const T *const *queries, const T *keys, int64_t width, float *into) {
    constexpr int TOKENS = LANES / R;
    for (int first = 0; first < PAGE; first += TOKENS) {
        floats sums_of[LANES] = {};
        by_pairs(width, [&](int64_t i, auto count) {
            Raw<T> of_queries[R];
            for (int r = 0; r < R; ++r) of_queries[r] = load_raw(queries[r] + i, count);
            for (int t = 0; t < TOKENS; ++t) {
                Raw<T> of_keys = load_raw(keys + (first + t) * width + i, count);
                for (int r = 0; r < R; ++r)
                    sums_of[r * TOKENS + t] = add_product(sums_of[r * TOKENS + t], of_queries[r], of_keys);
            }
        });
        float totals[LANES];
        store_floats(totals, sums(sums_of));
        for (int r = 0; r < R; ++r)
            memcpy(into + r * KEYS_IN_BLOCK + first, totals + r * TOKENS, TOKENS * sizeof(float));
    }
}

// Adds the weighted values of a block to the results of R queries: to C Pairs of columns, from column `first` on.
template <int R, int C, typename T, typename Count>
INLINE void add_values(float *into, int64_t padded, const typename Steps<T>::Factor *weights, const T *const *values,
                       int pages, int64_t width, int64_t first, Count count) {
    constexpr int STEP = Steps<T>::STEP;
    Pair sums_of[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums_of[r][c] = load(into + r * padded + first + c * PAIR);
    for (int page = 0; page < pages; ++page)
        for (int t = 0; t < PAGE; t += STEP) {
            const T *of_token = values[page] + t * width + first;
            for (int c = 0; c < C; ++c) {
                auto columns = Steps<T>::columns(of_token + c * PAIR, width, count);
                for (int r = 0; r < R; ++r)
                    Steps<T>::add(sums_of[r][c], columns, weights[(r * KEYS_IN_BLOCK + page * PAGE + t) / STEP]);
            }
        }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(into + r * padded + first + c * PAIR, sums_of[r][c]);
}

}  // namespace
