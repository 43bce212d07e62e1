// The place of the largest number of a row, for greedy sampling.
#pragma once

#include <algorithm>
#include "vectors.h"

// Integers in the order of the numbers: a NaN is above infinity or below minus infinity, and -0 comes just before 0.
// The compiler vectorizes the loops below for integers, but not for floats.
INLINE int16_t ordered(bfloat number) {
    const int16_t bits = (int16_t)number.bits;
    return (int16_t)(bits ^ ((bits >> 15) & 0x7fff));
}
INLINE int32_t ordered(float number) {
    int32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The first place of the largest number; -1 if the largest number is infinite, or if any number is a NaN.
template <typename T> INLINE int64_t place_of_largest(const T *row, int64_t count) {
    typedef decltype(ordered(*row)) Key;
    constexpr Key infinity = sizeof(Key) == 2 ? 0x7f80 : 0x7f800000;
    constexpr int64_t BLOCK = 256;
    Key most = ordered(row[0]), least = most;
    for (int64_t i = 0; i < count; ++i) {
        const Key key = ordered(row[i]);
        most = std::max(most, key);
        least = std::min(least, key);
    }
    const Key minus_infinity = (Key)(-infinity - 1);
    if (most >= infinity || most <= minus_infinity || least < minus_infinity) return -1;
    const Key wanted = most == 0 ? -1 : most;  // 0 and -0 are equal
    int64_t from = 0;
    for (; from + BLOCK < count; from += BLOCK) {
        Key found = 0;
        for (int64_t i = 0; i < BLOCK; ++i) found |= (Key)(ordered(row[from + i]) >= wanted);
        if (found) break;
    }
    for (int64_t i = from;; ++i)
        if (ordered(row[i]) >= wanted) return i;
}
