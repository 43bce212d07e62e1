// The products of add_lora: of some rows of x with A (shrink), and of the results with B (expand). A segment with one
// row is computed by other functions than a segment with several rows, see add_lora.cpp.
#pragma once

#include "products.h"

namespace {

constexpr int ROWS_AT_ONCE = LANES == 16 ? 4 : 2;
constexpr int RANKS_AT_ONCE = 4;    // for segments with several rows
constexpr int ROWS_IN_BLOCK = 32;   // rows of a piece
constexpr int MOST_RANK = 512;
constexpr int64_t AHEAD = 8192;     // bytes from the read to the prefetch
constexpr int64_t STRIP = 1024;     // bytes per look-up of the place to prefetch
constexpr int64_t AHEAD_OF_COLUMNS = 512;

constexpr int COLUMNS_AT_ONCE = 2;  // Pairs
constexpr int64_t MOST_SUMS = 8192;  // 32 KiB: they stay in the L1 cache

// Lines that are prefetched together.
struct Lines {
    const uint8_t *first;
    int64_t apart;  // bytes from one to the next
};

// Data that is read in order, ROWS rows at once, and that the data at `next` follows. Finds what to prefetch.
template <int ROWS> struct Stream {
    const uint8_t *from;
    int64_t steps, width, stride;  // of ROWS rows each; width and stride in bytes of one row
    const uint8_t *next;           // null: unknown
    // The lines AHEAD bytes after the byte `at`, which counts one row's bytes over all steps.
    INLINE Lines ahead(int64_t at) const {
        constexpr int64_t SHARE = AHEAD / ROWS;
        at += SHARE;
        if (at >= steps * width) return {next ? next + (at - steps * width) : from, SHARE};
        return {from + at / width * ROWS * stride + at % width, stride};
    }
};

// Prefetches, and calls with(i, Whole) for each Pair of `count` numbers, and with(i, rest) for the rest. The numbers
// begin at the byte `at` of the stream.
template <typename T, int ROWS, typename F>
INLINE void in_strips(const Stream<ROWS> &stream, int64_t at, int64_t count, const F &with) {
    constexpr int64_t NUMBERS = STRIP / (int64_t)sizeof(T), BYTES = PAIR * sizeof(T);
    int64_t i = 0;
    while (i + PAIR <= count) {
        Lines ahead = stream.ahead(at + i * (int64_t)sizeof(T));
        for (const int64_t end = smaller(i + NUMBERS, count); i + PAIR <= end; i += PAIR, ahead.first += BYTES) {
            for (int row = 0; row < ROWS; ++row)
                for (int64_t line = 0; line < BYTES; line += LINE) prefetch(ahead.first + row * ahead.apart + line);
            with(i, Whole{});
        }
    }
    if (i < count) with(i, (int)(count - i));
}

// -- shrink ----------------------------------------------------------------------------------------------------------

// One row of x with one row of A, added in the order of products(); the caller adds the lanes. Each addition waits for
// the one before; meanwhile, a CPU begins the next rows of A. Several rows at once would not be read in order.
template <typename T>
INLINE floats product(const T *x, const T *a, int64_t inputs, const Stream<1> &stream, int64_t at) {
    floats sum_of = {};
    in_strips<T>(stream, at, inputs, [&](int64_t i, auto count) {
        sum_of = add_product(sum_of, load_raw(x + i, count), load_raw(a + i, count));
    });
    return sum_of;
}

// R rows of x with K rows of A. `next`: the following rows of A, to prefetch; null if they were prefetched before.
template <int R, int K, typename T>
INLINE void products(Matrix<const T> x, const T *a, int64_t inputs, float *into, int64_t rank, const T *next) {
    floats sums_of[R][K] = {};
    by_pairs(inputs, [&](int64_t i, auto count) {
        if (next)
            for (int k = 0; k < K; ++k) prefetch(next + k * inputs + i);
        Raw<T> of_x[R], of_a[K];
        for (int r = 0; r < R; ++r) of_x[r] = load_raw(x.row(r) + i, count);
        for (int k = 0; k < K; ++k) of_a[k] = load_raw(a + k * inputs + i, count);
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < K; ++k) sums_of[r][k] = add_product(sums_of[r][k], of_x[r], of_a[k]);
    });
    if constexpr (R * K % LANES == 0) {
        floats *all_sums = &sums_of[0][0];
        for (int first = 0; first < R * K; first += LANES) {
            floats totals = sums(all_sums + first);
            for (int i = 0; i < LANES; ++i) into[(first + i) / K * rank + (first + i) % K] = totals[i];
        }
    } else {
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < K; ++k) into[r * rank + k] = sum(sums_of[r][k]);
    }
}

// `into` [rows, rank] gets the columns [k, last) of x · A.
template <typename T>
void shrink(Matrix<const T> x, int64_t rows, const T *a, int64_t inputs, float *into, int64_t rank, int64_t k,
            int64_t last, const T *next) {
    if (rows == 1) {
        const int64_t width = inputs * (int64_t)sizeof(T);
        const Stream<1> stream{bytes_of(a + k * inputs), last - k, width, width, bytes_of(next)};
        for (int64_t at = 0; k < last;) {  // sums() adds the lanes of each of several ranks at once
            floats of_ranks[LANES] = {};
            const int count = (int)smaller(LANES, last - k);
            for (int i = 0; i < count; ++i, at += width)
                of_ranks[i] = product(x.data, a + (k + i) * inputs, inputs, stream, at);
            const floats totals = sums(of_ranks);
            memcpy(into + k, &totals, count * sizeof(float));
            k += count;
        }
        return;
    }
    for (; k < last; k += RANKS_AT_ONCE) {
        const T *of_k = a + k * inputs;
        for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
            const T *following = row == 0 ? of_k + RANKS_AT_ONCE * inputs : nullptr;
            with_rows<ROWS_AT_ONCE>(rows - row, [&](auto count) {
                products<decltype(count)::value, RANKS_AT_ONCE>(Matrix<const T>{x.row(row), x.stride}, of_k, inputs,
                                                                into + row * rank + k, rank, following);
            });
        }
    }
}

// -- expand ----------------------------------------------------------------------------------------------------------

// y += d · y + e for the columns [from, to) of some rows.
template <typename T>
void scale_rows(Matrix<T> y, int64_t rows, const T *d, const T *e, int64_t from, int64_t to) {
    by_pairs(to - from, [&](int64_t i, auto count) {
        const Pair of_d = load(d + from + i, count), of_e = load(e + from + i, count);
        for (int64_t row = 0; row < rows; ++row) {
            T *at = y.row(row) + from + i;
            const Pair own = load(at, count);
            store(at, own + Pair{own.a * of_d.a + of_e.a, own.b * of_d.b + of_e.b}, count);
        }
    });
}

// Adds R rows of products · B to C Pairs of columns; a row has `steps` factors. `cold`: B's columns were not read
// before.
template <int R, int C, typename T, typename Count>
INLINE void add_columns(Matrix<T> y, const typename Steps<T>::Factor *factors, int64_t steps, const T *b,
                        int64_t outputs, Count count, bool cold) {
    Pair sums_of[R][C] = {};
    for (int64_t k = 0; k < steps; ++k) {
        const T *of_k = b + k * Steps<T>::STEP * outputs;
        if (cold)
            for (int j = 0; j < Steps<T>::STEP; ++j)
                for (int64_t line = 0; line < (int64_t)(C * PAIR * sizeof(T)); line += LINE)
                    prefetch(bytes_of(of_k + j * outputs) + AHEAD_OF_COLUMNS + line);
        for (int c = 0; c < C; ++c) {
            const auto of_b = Steps<T>::columns(of_k + c * PAIR, outputs, count);
            for (int r = 0; r < R; ++r) Steps<T>::add(sums_of[r][c], of_b, factors[r * steps + k]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            T *to = y.row(r) + c * PAIR;
            store(to, load(to, count) + sums_of[r][c], count);
        }
}

// Adds columns [from, to) of R rows. `to` is the end of the row, or `to - from` is a multiple of PAIR.
template <int R, typename T>
INLINE void add_rows(Matrix<T> y, const typename Steps<T>::Factor *factors, int64_t steps, const T *b, int64_t outputs,
                     int64_t from, int64_t to, bool cold) {
    for (; from + COLUMNS_AT_ONCE * PAIR <= to; from += COLUMNS_AT_ONCE * PAIR)
        add_columns<R, COLUMNS_AT_ONCE>(Matrix<T>{y.data + from, y.stride}, factors, steps, b + from, outputs, Whole{},
                                        cold);
    by_pairs(to - from, [&](int64_t i, auto count) {
        add_columns<R, 1>(Matrix<T>{y.data + from + i, y.stride}, factors, steps, b + from + i, outputs, count, false);
    });
}

// Adds one step of ranks to the sums of `count` columns. The first step begins the sums; the last step adds the sums to
// y.
template <bool FIRST, bool LAST, typename T>
INLINE void add_step(T *y, float *sums_of, typename Steps<T>::Factor factor, const T *b, int64_t outputs, int64_t count,
                     const Stream<Steps<T>::STEP> &stream, int64_t at) {
    in_strips<T>(stream, at, count, [&](int64_t i, auto some) {
        Pair total = FIRST ? Pair{} : load(sums_of + i);
        Steps<T>::add(total, Steps<T>::columns(b + i, outputs, some), factor);
        if (LAST)
            store(y + i, load(y + i, some) + total, some);
        else
            store(sums_of + i, total);
    });
}

// Adds columns [from, to) of one row, like add_rows(). B is read in order, up to a third faster than all ranks of a few
// columns after the other.
template <typename T>
INLINE void add_row(T *y, const float *products, int64_t rank, const T *b, int64_t outputs, int64_t from, int64_t to,
                    const T *next) {
    constexpr int STEP = Steps<T>::STEP;
    alignas(LINE) float sums_of[MOST_SUMS + PAIR];
    typename Steps<T>::Factor buffer[MOST_RANK / STEP + PAIR];
    const auto factors = Steps<T>::factors(products, rank, buffer);
    const int64_t last = rank / STEP - 1, stride = outputs * (int64_t)sizeof(T);
    for (; from < to; from += MOST_SUMS) {
        const int64_t count = smaller(MOST_SUMS, to - from), width = count * (int64_t)sizeof(T);
        const T *of_k = b + from, *after = from + count < to ? of_k + count : next;
        const Stream<STEP> stream{bytes_of(of_k), last + 1, width, stride, bytes_of(after)};
        for (int64_t k = 0; k <= last; ++k, of_k += STEP * outputs) {
            if (k == 0)
                add_step<true, false>(y + from, sums_of, factors[k], of_k, outputs, count, stream, k * width);
            else if (k < last)
                add_step<false, false>(y + from, sums_of, factors[k], of_k, outputs, count, stream, k * width);
            else
                add_step<false, true>(y + from, sums_of, factors[k], of_k, outputs, count, stream, k * width);
        }
    }
}

// Adds to the rows of a piece with several rows.
template <typename T>
void expand(Matrix<T> y, int64_t rows, const float *products, int64_t rank, const T *b, int64_t outputs, int64_t from,
            int64_t to) {
    typename Steps<T>::Factor buffer[ROWS_IN_BLOCK * MOST_RANK / Steps<T>::STEP + PAIR];
    auto factors = Steps<T>::factors(products, rows * rank, buffer);
    const int64_t steps = rank / Steps<T>::STEP;
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE)
        with_rows<ROWS_AT_ONCE>(rows - row, [&](auto count) {
            add_rows<decltype(count)::value>(Matrix<T>{y.row(row), y.stride}, factors + row * steps, steps, b, outputs,
                                             from, to, row == 0);
        });
}

}  // namespace
