// Several instructions in one, as motet_kernels/cpp/peepholes brings them together. Each rounds where those rounded, and
// adds up in their order: so its results have their bits. All its numbers are of one type and lie together.
#pragma once

#include "instructions.h"

namespace {

// As if it had been stored as a T and read again.
template <typename T> INLINE floats stored(floats value) { return as_floats(rounded(value) << 16); }
template <> INLINE floats stored<float>(floats value) {
    // Otherwise the compiler makes one instruction of a product and a sum, which rounds once.
#if defined(__x86_64__) || defined(__i386__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    asm("" : "+m"(value));
#endif
    return value;
}

INLINE floats numbers(const float *from) { return load_floats(from); }
INLINE floats numbers(const bfloat *from) { return widened(reinterpret_cast<const char *>(from)); }
INLINE void put(float *to, floats value) { store_floats(to, value); }
INLINE void put(bfloat *to, floats value) { narrowed(reinterpret_cast<char *>(to), value); }

// Calls with(place, read, write) for each vector of a run; the last one may have fewer numbers.
template <typename F> INLINE void by_vectors(int64_t count, const F &with) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        with(i, [](auto *from) { return numbers(from); }, [](auto *to, floats value) { put(to, value); });
    if (const int64_t rest = count - i) {
        auto read = [=](auto *from) {
            std::remove_const_t<std::remove_pointer_t<decltype(from)>> some[LANES] = {};
            memcpy(some, from, rest * sizeof *some);
            return numbers(some);
        };
        auto write = [=](auto *to, floats value) {
            std::remove_pointer_t<decltype(to)> some[LANES];
            put(some, value);
            memcpy(to, some, rest * sizeof *some);
        };
        with(i, read, write);
    }
}

// In the order of total().
template <typename T> INLINE float sum_of_squares(const T *x, int64_t count) {
    floats sums_of[2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES)
        for (int half = 0; half < 2; ++half) {
            const floats value = numbers(x + i + half * LANES);
            sums_of[half] += stored<float>(value * value);
        }
    float sum_of = sum(sums_of[0] + sums_of[1]);
    const int64_t type = sizeof(T) == sizeof(float) ? FLOAT : BFLOAT;
    for (; i < count; ++i) {
        const floats value = all(number_at(type, reinterpret_cast<const char *>(x + i)));
        sum_of += stored<float>(value * value)[0];
    }
    return sum_of;
}

// out = (x / rms(x)) · weight
template <typename T> INLINE void modules_norm(const T *x, const T *weight, int64_t count, double epsilon, T *out) {
    const floats scale = all(inverse_root(sum_of_squares(x, count) / (float)count + (float)epsilon));
    by_vectors(count, [&](int64_t i, auto read, auto write) {
        write(out + i, stored<T>(read(x + i) * scale) * read(weight + i));
    });
}

// out = the norm of x + more, which is kept, too.
template <typename T>
INLINE void sum_and_norm(const T *x, const T *more, const T *weight, int64_t count, double epsilon, T *sum_of, T *out) {
    by_vectors(count, [&](int64_t i, auto read, auto write) { write(sum_of + i, read(x + i) + read(more + i)); });
    modules_norm(sum_of, weight, count, epsilon, out);
}

// Turns each number of the first half with its partner in the second.
template <typename T> INLINE void rotate(const T *x, const T *cosines, const T *sines, int64_t half, T *out) {
    by_vectors(half, [&](int64_t i, auto read, auto write) {
        const floats first = read(x + i), second = read(x + half + i);
        write(out + i, stored<T>(first * read(cosines + i)) + stored<T>(-second * read(sines + i)));
        write(out + half + i,
              stored<T>(second * read(cosines + half + i)) + stored<T>(first * read(sines + half + i)));
    });
}

// out = silu(gate) · up
template <typename T> INLINE void silu_times(const T *gate, const T *up, int64_t count, T *out) {
    by_vectors(count, [&](int64_t i, auto read, auto write) {
        const floats x = read(gate + i);
        write(out + i, stored<T>(x * logistic(x)) * read(up + i));
    });
}

template <typename T> void together(const Instruction &what, const Row &row) {
    const int64_t count = what.sizes[DIMENSIONS - 1];
    by_runs(what, row, row.number, [&](char *to, const char **from) {
        T *out = reinterpret_cast<T *>(to);
        const T *in[MOST_OPERANDS];
        for (int i = 0; i < MOST_OPERANDS; ++i) in[i] = reinterpret_cast<const T *>(from[i]);
        if (what.operation == MODULES_NORM) modules_norm(in[0], in[1], count, what.real, out);
        if (what.operation == SUM_AND_NORM)
            sum_and_norm(in[0], in[1], in[2], count, what.real, reinterpret_cast<T *>(row.at(what.also)), out);
        if (what.operation == ROTATE) rotate(in[0], in[1], in[2], count / 2, out);
        if (what.operation == SILU_TIMES) silu_times(in[0], in[1], count, out);
    });
}

}  // namespace
