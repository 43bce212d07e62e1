// The kernels' common products: of several rows with a matrix that is used row by row.
#pragma once

#include "vectors.h"

constexpr int64_t LINE = 64;  // bytes of a cache line

template <typename T> INLINE const uint8_t *bytes_of(const T *from) { return reinterpret_cast<const uint8_t *>(from); }
INLINE int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

// Calls with(T{}), for the type of elements that `type` stands for.
template <typename With> void with_type(int64_t type, const With &with) {
    if (type == 0) with(float{});
    if (type == 1) with(bfloat{});
    if (type == 2) with(half{});
}

// Calls `work` with a number of rows that is a constant for the compiler: the smaller one of R and `left`.
template <int R, typename Work> INLINE void with_rows(int64_t left, const Work &work) {
    if constexpr (R > 1) {
        if (left < R) return with_rows<R - 1>(left, work);
    }
    work(std::integral_constant<int, R>{});
}

// How several rows are multiplied with a matrix B: STEP rows of B at once, each times its factor. A row of B is a rank
// in add_lora, and the values of a token in attention.
template <typename T> struct Steps {
    using Factor = float;
    using Columns = Pair;
    static constexpr int STEP = 1;
    // `buffer` has room for `count` numbers and a Pair.
    static const float *factors(const float *numbers, int64_t, Factor *) { return numbers; }
    // `count` columns, at most a Pair.
    template <typename Count> static INLINE Columns columns(const T *b, int64_t, Count count) { return load(b, count); }
    static INLINE void add(Pair &sum, Columns b, Factor factor) {
        sum.a += b.a * factor;
        sum.b += b.b * factor;
    }
};

#if defined(__AVX512BF16__)
// One instruction multiplies two rows of B by their factors, rounded to bfloat, and adds in fp32.
template <> struct Steps<bfloat> {
    using Factor = uint32_t;
    using Columns = Pair;
    static constexpr int STEP = 2;
    static const Factor *factors(const float *numbers, int64_t count, Factor *buffer) {
        for (int64_t i = 0; i < count; i += LANES) {
            float some[LANES] = {};
            memcpy(some, numbers + i, smaller(LANES, count - i) * sizeof(float));
            __m256bh narrow = _mm512_cvtneps_pbh((__m512)load_floats(some));
            memcpy(reinterpret_cast<uint16_t *>(buffer) + i, &narrow, sizeof narrow);
        }
        return buffer;
    }
    template <typename Count> static INLINE Columns columns(const bfloat *b, int64_t stride, Count count) {
        const words first = load_raw(b, count).value, second = load_raw(b + stride, count).value;
        words even = (first & 0xffffu) | (second << 16), odd = (first >> 16) | (second & 0xffff0000u);
        return {as_floats(even), as_floats(odd)};
    }
    static INLINE void add(Pair &sum, Columns b, Factor factor) {
        __m512bh of_row = (__m512bh)all_words(factor);
        sum.a = (floats)_mm512_dpbf16_ps((__m512)sum.a, (__m512bh)b.a, of_row);
        sum.b = (floats)_mm512_dpbf16_ps((__m512)sum.b, (__m512bh)b.b, of_row);
    }
};
#endif
