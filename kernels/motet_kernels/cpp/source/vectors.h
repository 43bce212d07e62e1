// Vectors of floats, by the vector extensions of g++ and clang++: one source for AVX-512, AVX2, NEON and the rest.
//
// Elements of a matrix are float, bfloat or half. load() converts 2 · LANES of them to a Pair of vectors in fp32. The
// order of the numbers within a Pair depends only on the type: so products of two Pairs of one type multiply the right
// partners, and store() puts each number back where load() found it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a Pair of bfloats is two halves of a little-endian word"
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PAIR = 2 * LANES;

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));

#define INLINE inline __attribute__((always_inline))

struct bfloat {
    uint16_t bits;
};
struct half {
    uint16_t bits;
};

struct Pair {
    floats a, b;
};

template <typename T> struct Matrix {
    T *data;
    int64_t stride;  // numbers from one row to the next
    INLINE T *row(int64_t i) const { return data + i * stride; }
};

INLINE floats all(float value) { return value - floats{}; }
INLINE words all_words(uint32_t value) { return value - words{}; }
INLINE floats as_floats(words bits) { return (floats)bits; }
INLINE words as_words(floats value) { return (words)value; }
INLINE floats choose(ints mask, floats yes, floats no) {
    return as_floats((as_words(yes) & (words)mask) | (as_words(no) & ~(words)mask));
}
INLINE words choose(ints mask, words yes, words no) { return (yes & (words)mask) | (no & ~(words)mask); }

INLINE floats load_floats(const float *from) {
    floats value;
    memcpy(&value, from, sizeof value);
    return value;
}
INLINE void store_floats(float *to, floats value) { memcpy(to, &value, sizeof value); }

// -- one load: twice LANES elements -----------------------------------------------------------------------------------

INLINE Pair load(const float *from) { return {load_floats(from), load_floats(from + LANES)}; }
INLINE void store(float *to, Pair value) {
    store_floats(to, value.a);
    store_floats(to + LANES, value.b);
}

INLINE Pair load(const bfloat *from) {
    words both;
    memcpy(&both, from, sizeof both);
    return {as_floats(both << 16), as_floats(both & 0xffff0000u)};
}

// The bfloat nearest to a float, ties to even, in the lower half of the word.
#if defined(__AVX512BF16__)
INLINE words rounded(floats value) {
    return (words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)value));
}
#else
INLINE words rounded(floats value) {
    words bits = as_words(value);
    words up = bits + 0x7fffu + ((bits >> 16) & 1u);
    return choose(value != value, all_words(0x7fc00000u), up) >> 16;
}
#endif
INLINE void store(bfloat *to, Pair value) {
    words both = rounded(value.a) | (rounded(value.b) << 16);
    memcpy(to, &both, sizeof both);
}

#if defined(__AVX512F__)
INLINE floats widen(const half *from) { return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
INLINE void narrow(half *to, floats value) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__) && defined(__AVX2__)
INLINE floats widen(const half *from) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
INLINE void narrow(half *to, floats value) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
}
#else
INLINE floats widen(const half *from) {
    shorts packed;
    memcpy(&packed, from, sizeof packed);
    words bits = __builtin_convertvector(packed, words);
    words magnitude = (bits & 0x7fffu) << 13;
    // Changes the exponent bias from a half's (15) to a float's (127) by a product, which is right for subnormal
    // numbers, too.
    words scaled = as_words(as_floats(magnitude) * 0x1p112f);
    scaled = choose(magnitude >= 0x0f800000u, scaled | 0x7f800000u, scaled);
    return as_floats(scaled | ((bits & 0x8000u) << 16));
}
INLINE void narrow(half *to, floats value) {
    words bits = as_words(value), sign = bits & 0x80000000u, magnitude = bits ^ sign;
    words special = choose(magnitude > 0x7f800000u, all_words(0x7e00u), all_words(0x7c00u));
    words subnormal = as_words(as_floats(magnitude) + 0.5f) - 0x3f000000u;
    words normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    words result = choose(magnitude >= 0x47800000u, special, choose(magnitude < 0x38800000u, subnormal, normal));
    shorts packed = __builtin_convertvector(result | (sign >> 16), shorts);
    memcpy(to, &packed, sizeof packed);
}
#endif
INLINE Pair load(const half *from) { return {widen(from), widen(from + LANES)}; }
INLINE void store(half *to, Pair value) {
    narrow(to, value.a);
    narrow(to + LANES, value.b);
}

INLINE Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }

// Stands for the number of elements of a whole Pair. For a smaller number, load() fills the rest with zeros.
struct Whole {};

template <typename T> INLINE Pair load(const T *from, Whole) { return load(from); }
template <typename T> INLINE Pair load(const T *from, int count) {
    T buffer[PAIR] = {};
    memcpy(buffer, from, count * sizeof(T));
    return load(buffer);
}
template <typename T> INLINE void store(T *to, Pair value, Whole) { store(to, value); }
template <typename T> INLINE void store(T *to, Pair value, int count) {
    T buffer[PAIR];
    store(buffer, value);
    memcpy(to, buffer, count * sizeof(T));
}

// Calls with(i, Whole) for each Pair of `count` elements, and with(i, rest) for the rest.
template <typename F> INLINE void by_pairs(int64_t count, const F &with) {
    int64_t i = 0;
    for (; i + PAIR <= count; i += PAIR) with(i, Whole{});
    if (i < count) with(i, (int)(count - i));
}

// -- products of elements in memory order -----------------------------------------------------------------------------

template <typename T> struct Raw {
    Pair value;
};
template <typename T> INLINE Raw<T> load_raw(const T *from) { return {load(from)}; }
template <typename T> INLINE floats add_product(floats sum, Raw<T> x, Raw<T> y) {
    sum += x.value.a * y.value.a;
    return sum + x.value.b * y.value.b;
}

#if defined(__AVX512BF16__)
template <> struct Raw<bfloat> {
    words value;
};
template <> INLINE Raw<bfloat> load_raw(const bfloat *from) {
    Raw<bfloat> raw;
    memcpy(&raw, from, sizeof raw);
    return raw;
}
template <> INLINE floats add_product(floats sum, Raw<bfloat> x, Raw<bfloat> y) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x.value, (__m512bh)y.value);
}
#endif

template <typename T> INLINE Raw<T> load_raw(const T *from, Whole) { return load_raw(from); }
template <typename T> INLINE Raw<T> load_raw(const T *from, int count) {
    T buffer[PAIR] = {};
    memcpy(buffer, from, count * sizeof(T));
    return load_raw(buffer);
}

// -- sums, maxima, functions -----------------------------------------------------------------------------------------

// If x or y is NaN: y.
INLINE floats larger(floats x, floats y) { return choose(x > y, x, y); }

// Adds in the order of sums().
INLINE float sum(floats value) {
    float numbers[LANES];
    memcpy(numbers, &value, sizeof value);
    for (int step = 1; step < LANES; step *= 2)
        for (int i = 0; i < LANES; i += 2 * step) numbers[i] += numbers[i + step];
    return numbers[0];
}
INLINE float largest(floats value) {
    float numbers[LANES];
    memcpy(numbers, &value, sizeof value);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) numbers[i] = numbers[i] > numbers[i + width] ? numbers[i] : numbers[i + width];
    return numbers[0];
}

#if defined(__clang__)
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, ints{__VA_ARGS__})
#endif

// Lane L gets x[L] + x[L + S] if L's bit S is 0, else y[L] + y[L - S].
template <int S, size_t... L> INLINE floats sums_of_neighbours(floats x, floats y, std::index_sequence<L...>) {
    floats own = SHUFFLE(x, y, ((int)L & S ? (int)L + LANES : (int)L)...);
    floats other = SHUFFLE(x, y, ((int)L & S ? (int)L - S + LANES : (int)L + S)...);
    return own + other;
}
template <int S> INLINE void add_neighbours(floats *vectors) {
    if constexpr (S < LANES) {
        for (int i = 0; i < LANES / S; i += 2)
            vectors[i / 2] = sums_of_neighbours<S>(vectors[i], vectors[i + 1], std::make_index_sequence<LANES>{});
        add_neighbours<2 * S>(vectors);
    }
}
// Lane i gets the sum of all lanes of vector i. Overwrites the vectors.
INLINE floats sums(floats *vectors) {
    add_neighbours<1>(vectors);
    return vectors[0];
}

// e^x for x <= 0, within two units in the last place; below -87 it is 0. NaN stays NaN.
INLINE floats exponential(floats x) {
    const float to_integer = 12582912.0f;  // 1.5 · 2^23: adding it rounds
    floats bounded = larger(all(-87.0f), x);
    floats shifted = bounded * 1.44269504f + to_integer;
    floats whole = shifted - to_integer;
    floats rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats power = all(1.9875691500e-4f);
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    words scale = (as_words(shifted) - 0x4b400000u + 127u) << 23;
    return choose(x < -87.0f, floats{}, power * as_floats(scale));
}

INLINE floats hyperbolic_tangent(floats x) {
    words sign = as_words(x) & 0x80000000u;
    floats decay = exponential(as_floats(as_words(x) | 0x80000000u) * 2.0f);
    return as_floats(as_words((1.0f - decay) / (1.0f + decay)) | sign);
}

// Prefetches into the L2 cache. On AMD, a prefetch into L1 alone (NTA) is slower than none.
INLINE void prefetch(const void *address) { __builtin_prefetch(address, 0, 2); }
