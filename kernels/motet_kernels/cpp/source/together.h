// Fused instructions, see motet_kernels/cpp/peepholes. A fused instruction rounds where the separate ones round, and
// adds in their order, so it gives the same bits. Its numbers are contiguous; all have one type, except a norm's
// weight.
#pragma once

#include "instructions.h"

namespace {

// Rounds like a store as a T.
template <typename T> INLINE floats stored(floats value) { return as_floats(rounded(value) << 16); }
template <> INLINE floats stored<float>(floats value) {
    // Without the assembly, the compiler fuses a product and a sum into one instruction, which rounds only once.
#if defined(__x86_64__) || defined(__i386__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    asm("" : "+m"(value));
#endif
    return value;
}

INLINE Pair operator*(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }
INLINE Pair operator*(Pair x, floats y) { return {x.a * y, x.b * y}; }
INLINE Pair operator-(Pair x) { return {-x.a, -x.b}; }
INLINE Pair logistic(Pair x) { return {logistic(x.a), logistic(x.b)}; }
template <typename T> INLINE Pair stored(Pair x) { return {stored<T>(x.a), stored<T>(x.b)}; }

INLINE floats numbers(const float *from) { return load_floats(from); }
INLINE floats numbers(const bfloat *from) { return widened(reinterpret_cast<const char *>(from)); }
INLINE void put(float *to, floats value) { store_floats(to, value); }
INLINE void put(bfloat *to, floats value) { narrowed(reinterpret_cast<char *>(to), value); }

// Calls with(place, read, write) for each Pair of a run, and then for each vector; the last vector may have fewer
// numbers. PAIRS is false for operands of different types, because the order of a Pair's numbers depends on the type.
template <bool PAIRS = true, typename F> INLINE void by_vectors(int64_t count, const F &with) {
    int64_t i = 0;
    for (; PAIRS && i + PAIR <= count; i += PAIR)
        with(i, [](auto *from) { return load(from); }, [](auto *to, Pair value) { store(to, value); });
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

// Adds in the order of total().
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

// out = (x / rms(x)) · weight. x / rms(x) is rounded to the type of the weight.
template <typename T, typename W>
INLINE void modules_norm(const T *x, const W *weight, int64_t count, double epsilon, T *out) {
    const floats scale = all(inverse_root(sum_of_squares(x, count) / (float)count + (float)epsilon));
    by_vectors<std::is_same_v<T, W>>(count, [&](int64_t i, auto read, auto write) {
        write(out + i, stored<W>(read(x + i) * scale) * read(weight + i));
    });
}
template <typename T>
INLINE void modules_norm(const T *x, const Operand &weight, const char *at, int64_t count, double epsilon, T *out) {
    if (weight.type == FLOAT)
        modules_norm(x, reinterpret_cast<const float *>(at), count, epsilon, out);
    else
        modules_norm(x, reinterpret_cast<const T *>(at), count, epsilon, out);
}

template <typename T> INLINE void add(const T *x, const T *more, int64_t count, T *out) {
    by_vectors(count, [&](int64_t i, auto read, auto write) { write(out + i, read(x + i) + read(more + i)); });
}

// Rotates each number of the first half with its partner in the second half. `out` may be x.
template <typename T> INLINE void rotate(const T *x, const T *cosines, const T *sines, int64_t half, T *out) {
    by_vectors(half, [&](int64_t i, auto read, auto write) {
        const auto first = read(x + i), second = read(x + half + i);
        write(out + i, stored<T>(first * read(cosines + i)) + stored<T>(-second * read(sines + i)));
        write(out + half + i,
              stored<T>(second * read(cosines + half + i)) + stored<T>(first * read(sines + half + i)));
    });
}

// out = silu(gate) · up
template <typename T> INLINE void silu_times(const T *gate, const T *up, int64_t count, T *out) {
    by_vectors(count, [&](int64_t i, auto read, auto write) {
        const auto x = read(gate + i);
        write(out + i, stored<T>(x * logistic(x)) * read(up + i));
    });
}

// Rotates each head, after its norm if the operation has one. A write puts the keys and values into their pages.
template <typename T> void turn(const Instruction &what, const Row &row, const AttentionRows &attention) {
    const bool norms = what.operation == NORM_AND_ROTATE || what.operation == WRITE_NORMED_ROTATED;
    const bool writes = what.operation == WRITE_ROTATED || what.operation == WRITE_NORMED_ROTATED;
    const int weight = 3, values = norms ? 4 : 3;
    const int64_t count = what.sizes[DIMENSIONS - 1];
    KeyPlace to{};
    if (writes && !(to = attention.place(what.number, row.number)).key) return;
    by_runs<MOST_OPERANDS>(what, row, row.number, [&](char *there, const char **from) {
        T *out = reinterpret_cast<T *>(writes ? to.key : there);
        const T *x = reinterpret_cast<const T *>(from[0]);
        if (norms) {
            modules_norm(x, what.in[weight], from[weight], count, what.real, out);
            x = out;
        }
        rotate(x, reinterpret_cast<const T *>(from[1]), reinterpret_cast<const T *>(from[2]), count / 2, out);
        if (!writes) return;
        memcpy(to.value, from[values], count * sizeof(T));
        to.key += to.bytes_of_head;
        to.value += to.bytes_of_head;
    });
}

template <typename T> void together(const Instruction &what, const Row &row) {
    const int64_t count = what.sizes[DIMENSIONS - 1];
    by_runs(what, row, row.number, [&](char *to, const char **from) {
        T *out = reinterpret_cast<T *>(to);
        const T *x = reinterpret_cast<const T *>(from[0]), *y = reinterpret_cast<const T *>(from[1]);
        if (what.operation == MODULES_NORM) {
            modules_norm(x, what.in[1], from[1], count, what.real, out);
        } else if (what.operation == SUM_AND_NORM) {
            T *sum_of = reinterpret_cast<T *>(row.at(what.also));
            add(x, y, count, sum_of);
            modules_norm(sum_of, what.in[2], from[2], count, what.real, out);
        } else {
            silu_times(x, y, count, out);
        }
    });
}

}  // namespace
