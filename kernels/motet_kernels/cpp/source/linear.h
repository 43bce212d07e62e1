// y = x · Wᵀ (+ bias), with W packed in the order of its reads.
//
// A panel holds the PAIR rows of W for PAIR columns of y. For each two inputs, it holds the two numbers of each column:
// first for one half of the columns, then for the other half. Inputs and outputs are padded with zeros. The microkernel
// multiplies a few rows of x with one panel or several, and keeps all sums in registers: in AMX tiles, if the CPU has
// tiles for this type. Each sum adds the inputs in one order, so a row's result does not depend on the other rows, nor
// on threads.
#pragma once

#include <type_traits>
#include <vector>

#include "later.h"
#include "parallel.h"
#include "tiles.h"
#include "vectors.h"

constexpr int MOST_SUMS_IN_REGISTERS = LANES == 8 ? 12 : 24;
constexpr int MOST_ROWS = MOST_SUMS_IN_REGISTERS / 2;
constexpr int MOST_PANELS = 4;

// How many pairs of inputs make a partial sum. One sum over all inputs would have a larger error than the total of
// partial sums.
constexpr int64_t PAIRS_OF_A_SUM = 128;

constexpr int64_t UNITS_OF_A_THREAD = 8;
constexpr int64_t AHEAD_BYTES = 8192;          // from the read to the prefetch
constexpr int64_t MOST_BYTES_IN_CACHE = 512 << 10;  // of the panels that stay in the cache for all blocks of rows
constexpr int64_t MOST_BYTES_AHEAD = 256 << 10;  // two larger panels do not fit in the cache

INLINE int64_t panels_of(int64_t outputs) { return (outputs + PAIR - 1) / PAIR; }
// How many numbers a panel has.
INLINE int64_t panel_size(int64_t inputs) { return (inputs + 1) / 2 * 2 * PAIR; }

// -- packing ---------------------------------------------------------------------------------------------------------

// The place of the number that load() puts into a lane of the Pair's first or second half.
template <typename T> INLINE int64_t place_in_pair(int64_t half, int64_t lane) { return half * LANES + lane; }
template <> INLINE int64_t place_in_pair<bfloat>(int64_t half, int64_t lane) { return 2 * lane + half; }

// Where a column's numbers are in its panel. `first`: the place for the first input; `second`: the distance from there
// to the second input. The numbers for the next two inputs are 2 · PAIR further on.
struct Places {
    int64_t first, second;
};
template <typename T> INLINE Places places_of(int64_t column) {
    bool apart = place_in_pair<T>(0, 1) == 1;
    int64_t half = apart ? column / LANES : column % 2, lane = apart ? column % LANES : column / 2;
    return {half * PAIR + place_in_pair<T>(0, lane), place_in_pair<T>(1, lane) - place_in_pair<T>(0, lane)};
}

// Packs one panel of W [outputs, inputs].
template <typename T> void pack(Matrix<const T> w, int64_t outputs, int64_t inputs, T *packed, int64_t panel) {
    T *into = packed + panel * panel_size(inputs);
    memset(into, 0, panel_size(inputs) * sizeof(T));
    for (int64_t column = 0; column < PAIR && panel * PAIR + column < outputs; ++column) {
        const T *row = w.row(panel * PAIR + column);
        Places places = places_of<T>(column);
        T *to = into + places.first;
        for (int64_t i = 0; i < inputs; i += 2, to += 2 * PAIR) {
            to[0] = row[i];
            if (i + 1 < inputs) to[places.second] = row[i + 1];
        }
    }
}

// Unpacks one row of W.
template <typename T> void unpack(const T *packed, int64_t inputs, int64_t row, T *into) {
    Places places = places_of<T>(row % PAIR);
    const T *from = packed + row / PAIR * panel_size(inputs) + places.first;
    for (int64_t i = 0; i < inputs; i += 2, from += 2 * PAIR) {
        into[i] = from[0];
        if (i + 1 < inputs) into[i + 1] = from[places.second];
    }
}

// -- multiplying -----------------------------------------------------------------------------------------------------

// Broadcasts two neighbouring numbers of x to all lanes.
INLINE Raw<float> everywhere(const float *from) { return {Pair{all(from[0]), all(from[1])}}; }
INLINE Raw<bfloat> everywhere(const bfloat *from) {
    uint32_t both;
    memcpy(&both, from, sizeof both);
#if defined(__AVX512BF16__)
    return {all_words(both)};
#else
    return {Pair{as_floats(all_words(both << 16)), as_floats(all_words(both & 0xffff0000u))}};
#endif
}

// The lines that are prefetched, one step per two inputs.
struct Ahead {
    const uint8_t *from;
    int64_t stride;  // bytes per two inputs
};

// Rows of x in groups: each group has an address, and all groups share the distances within a group. One address per
// row would need more registers than there are: addresses would be loaded again between the products.
template <int R, typename T> struct Groups {
    static constexpr int OF_A_GROUP = 4, COUNT = (R + OF_A_GROUP - 1) / OF_A_GROUP;
    const uint8_t *first[COUNT];
    int64_t distances[OF_A_GROUP];
    INLINE Groups(Matrix<const T> x) {
        for (int g = 0; g < COUNT; ++g) {
            first[g] = reinterpret_cast<const uint8_t *>(x.row(g * OF_A_GROUP));
            asm("" : "+r"(first[g]));  // otherwise the compiler computes all addresses from the first one
        }
        for (int r = 1; r < OF_A_GROUP; ++r) {
            distances[r] = r * x.stride * (int64_t)sizeof(T);
            asm("" : "+r"(distances[r]));
        }
    }
    INLINE const T *row(int r) const {
        const int other = r % OF_A_GROUP;
        return reinterpret_cast<const T *>(first[r / OF_A_GROUP] + (other ? distances[other] : 0));
    }
    INLINE void advance(int64_t inputs) {
        for (int g = 0; g < COUNT; ++g) first[g] += inputs * (int64_t)sizeof(T);
    }
};

// Bytes of a panel per two inputs.
template <typename T> constexpr int64_t TWO_INPUTS = 2 * PAIR * sizeof(T);

// Writes the sums of one panel's columns, plus the bias, into rows of y.
template <typename T, typename Sums>
INLINE void write(Sums sums_of, int rows, const T *bias, Matrix<T> y, int64_t columns) {
    const Pair more = bias ? load(bias, (int)(columns < PAIR ? columns : PAIR)) : Pair{};
    for (int r = 0; r < rows; ++r) {
        const Pair result = sums_of(r) + more;
        if (columns >= PAIR)
            store(y.row(r), result);
        else
            store(y.row(r), result, (int)columns);
    }
}

// R rows of x with P panels. `LATER`: a line of `later` is prefetched per two inputs. If this function were inlined,
// the code around it would take some of its registers.
template <int R, int P, bool LATER, typename T>
__attribute__((noinline)) void multiply(Matrix<const T> x, int64_t inputs, const T *panels, const T *bias, Matrix<T> y,
                                        int64_t columns, Ahead ahead, Ahead later) {
    const int64_t size = panel_size(inputs);
    Groups<R, T> rows(x);
    floats totals[R][P][2] = {};
    for (int64_t left = inputs / 2, odd = inputs % 2; left || odd;) {
        floats sums_of[R][P][2] = {};
        auto add = [&](auto x_of) __attribute__((always_inline)) {
            Raw<T> w[P][2];
            for (int p = 0; p < P; ++p)
                for (int64_t line = 0; line < TWO_INPUTS<T>; line += 64)
                    prefetch(ahead.from + p * size * (int64_t)sizeof(T) + line);
            ahead.from += ahead.stride;
            if (LATER) {
                prefetch(later.from);
                later.from += later.stride;
            }
            for (int p = 0; p < P; ++p)
                for (int half = 0; half < 2; ++half) w[p][half] = load_raw(panels + p * size + half * PAIR);
            panels += 2 * PAIR;
            for (int r = 0; r < R; ++r) {
                Raw<T> both = x_of(r);
                for (int p = 0; p < P; ++p)
                    for (int half = 0; half < 2; ++half)
                        sums_of[r][p][half] = add_product(sums_of[r][p][half], both, w[p][half]);
            }
        };
        const int64_t last = left > PAIRS_OF_A_SUM ? left - PAIRS_OF_A_SUM : 0;
        for (; left > last; --left, rows.advance(2)) add([&](int r) { return everywhere(rows.row(r)); });
        if (!left && odd) {
            add([&](int r) {
                T last[2] = {*rows.row(r), T{}};
                return everywhere(last);
            });
            odd = 0;
        }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p)
                for (int half = 0; half < 2; ++half) totals[r][p][half] += sums_of[r][p][half];
    }
    for (int p = 0; p < P; ++p)
        write<T>([&](int r) { return Pair{totals[r][p][0], totals[r][p][1]}; }, R, bias ? bias + p * PAIR : nullptr,
                 {y.data + p * PAIR, y.stride}, columns - p * PAIR);
}

// Up to TILED_ROWS rows of x with one panel; only the first `written` rows of results are written. `LATER`: as above.
template <bool LATER>
void multiply_tiled(Matrix<const bfloat> x, int rows, int written, int64_t inputs, const bfloat *panel,
                    const bfloat *bias, Matrix<bfloat> y, int64_t columns, Ahead ahead, Ahead later);

#if defined(MOTET_TILES)
constexpr bool HAS_TILES = true;
constexpr int TILED_ROWS = 2 * tiles::ROWS;

template <bool LATER>
void multiply_tiled(Matrix<const bfloat> x, int rows, int written, int64_t inputs, const bfloat *panel,
                    const bfloat *bias, Matrix<bfloat> y, int64_t columns, Ahead ahead, Ahead later) {
    tiles::Sums sums;
    auto prefetch_next = [&](int64_t pairs) __attribute__((always_inline)) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
            for (int64_t line = 0; line < TWO_INPUTS<bfloat>; line += 64) prefetch(ahead.from + line);
            ahead.from += ahead.stride;
            if (LATER) {
                prefetch(later.from);
                later.from += later.stride;
            }
        }
    };
    const int64_t stride = x.stride * (int64_t)sizeof(bfloat);
    if (rows > tiles::ROWS)
        tiles::multiply<true>(x.data, stride, rows, inputs, panel, sums, prefetch_next);
    else
        tiles::multiply<false>(x.data, stride, rows, inputs, panel, sums, prefetch_next);
    write<bfloat>([&](int r) { return Pair{load_floats(sums.of[r][0]), load_floats(sums.of[r][1])}; }, written, bias, y,
                  columns);
}
#else
constexpr bool HAS_TILES = false;
constexpr int TILED_ROWS = 0;
#endif

template <typename T> struct LinearCall {
    Matrix<const T> x;
    int64_t rows, inputs, outputs;
    const T *packed;
    const T *bias;  // may be null
    Matrix<T> y;
    int64_t panels_beside = 0;  // of other linears that are multiplied in the same stage
    const std::vector<Later> *later = nullptr;
    int64_t first_later = 0, end_later = 0;  // the entries to prefetch

    static constexpr bool TILED = HAS_TILES && std::is_same_v<T, bfloat>;

    const T *panel_at(int64_t panel) const { return packed + panel * panel_size(inputs); }

    // The lines that the same panel's product reads AHEAD_BYTES later.
    Ahead soon(int64_t panel) const {
        return {reinterpret_cast<const uint8_t *>(panel_at(panel)) + AHEAD_BYTES, TWO_INPUTS<T>};
    }
    // The most bytes of `later` beside a panel: one line per two inputs.
    int64_t most_of_later() const { return (inputs + 1) / 2 * 64; }

    // How many panels are multiplied with all blocks before the next panels, and stay in the cache. With many blocks,
    // reloading the rows of x for each panel takes longer than a product by tiles.
    int64_t panels_in_cache() const {
        const int64_t room = MOST_BYTES_IN_CACHE / (panel_size(inputs) * (int64_t)sizeof(T)), wanted = blocks() / 4;
        const int64_t count = room < wanted ? room : wanted;
        return TILED && count > 1 ? count : 1;
    }

    // This block's share of the next panel: the blocks together prefetch all of the panel.
    Ahead share_of_next(int64_t panel, int64_t block, int64_t blocks) const {
        int64_t bytes = panel_size(inputs) * sizeof(T);
        if (bytes > MOST_BYTES_AHEAD) return soon(panel);
        return {reinterpret_cast<const uint8_t *>(panel_at(panel + panels_in_cache())) + bytes * block / blocks,
                TWO_INPUTS<T> / blocks};
    }

    template <int R, int P, bool LATER = false>
    INLINE void with_panels(int64_t row, int64_t panel, Ahead ahead, Ahead later = {}) const {
        int64_t column = panel * PAIR;
        multiply<R, P, LATER, T>({x.row(row), x.stride}, inputs, panel_at(panel), bias ? bias + column : nullptr,
                                 {y.row(row) + column, y.stride}, outputs - column, ahead, later);
    }
    template <bool LATER>
    INLINE void with_panel(int64_t row, int64_t count, int64_t panel, Ahead ahead, Ahead later = {}) const {
        if constexpr (TILED) {
            int64_t column = panel * PAIR;
            multiply_tiled<LATER>({x.row(row), x.stride}, (int)most_rows_of_a_block(), (int)count, inputs,
                                  panel_at(panel), bias ? bias + column : nullptr, {y.row(row) + column, y.stride},
                                  outputs - column, ahead, later);
        } else {
            constant(count, [&](auto r) { with_panels<r(), 1, LATER>(row, panel, ahead, later); });
        }
    }

    // One step: one block of rows with one panel. A step prefetches its share of the next panel, and at most one entry
    // of `later`. The entries are spread over the steps in the order of panels. unit() changes this order only among
    // panels that are in the cache together, so the entries are prefetched nearly in their order.
    void one_of_blocks(int64_t row, int64_t rows_of_block, int64_t panel, int64_t block, int64_t blocks) const {
        const Ahead next = share_of_next(panel, block, blocks);
        const int64_t number = panel * blocks + block, all = panels_of(outputs) * blocks;
        const int64_t count = end_later - first_later, mine = count * number / all;
        if (count * (number + 1) / all == mine) return with_panel<false>(row, rows_of_block, panel, next);
        const Later &one = (*later)[first_later + mine];
        with_panel<true>(row, rows_of_block, panel, next, {one.from, one.bytes / ((inputs + 1) / 2)});
    }

    // All R rows with the panels [panel, last), in groups that fit in the registers.
    template <int R, int P = MOST_PANELS> INLINE void all_rows(int64_t panel, int64_t last) const {
        if constexpr (R * P * 2 <= MOST_SUMS_IN_REGISTERS)
            for (; panel + P <= last; panel += P) with_panels<R, P>(0, panel, soon(panel));
        if constexpr (P > 1) all_rows<R, P / 2>(panel, last);
    }

    // All rows, as one block, with the panels [panel, last).
    void few_rows(int64_t panel, int64_t last) const {
        if constexpr (TILED)
            for (; panel < last; ++panel) with_panel<false>(0, rows, panel, soon(panel));
        else
            constant(rows, [&](auto r) { all_rows<r()>(panel, last); });
    }

    // Calls with(R) with the constant R that equals the variable `count`.
    template <int R = MOST_ROWS, typename F> static INLINE void constant(int64_t count, const F &with) {
        if (count == R) return with(std::integral_constant<int, R>{});
        if constexpr (R > 1) constant<R - 1>(count, with);
    }

    int64_t blocks() const {
        const int64_t most = TILED ? TILED_ROWS : MOST_ROWS;
        return (rows + most - 1) / most;
    }

    // How the work is cut for threads: a unit has `panels_at_once` panels, and one of `parts` parts of the blocks of
    // rows.
    struct Cut {
        int64_t panels_at_once, parts, units;
    };
    Cut cut(int64_t threads) const {
        if (rows == 0) return {1, 1, 0};
        if (threads <= 1) return {panels_of(outputs), 1, 1};
        const int64_t panels = panels_of(outputs) + panels_beside, wanted = UNITS_OF_A_THREAD * threads;
        int64_t at_once = panels / wanted, parts = wanted / panels;
        if (at_once < 1) at_once = 1;
        if (!TILED && rows <= MOST_ROWS / 2 && at_once < MOST_PANELS) at_once = MOST_PANELS;  // to load x less often
        if (parts > blocks()) parts = blocks();
        if (parts < 1) parts = 1;
        return {at_once, parts, (panels_of(outputs) + at_once - 1) / at_once * parts};
    }

    // The rows of the last block. Other blocks have as many rows, or one row less. Tiles are set up for this number in
    // every block: computing the next block's first row in vain takes less time than another set-up.
    int64_t most_rows_of_a_block() const { return (rows + blocks() - 1) / blocks(); }

    // Blocks of rows have about the same size, so that no block takes much longer than the others.
    void unit(Cut cut, int64_t number) const {
        const int64_t panels = panels_of(outputs), part = number % cut.parts, all = blocks();
        int64_t panel = number / cut.parts * cut.panels_at_once, end = panel + cut.panels_at_once;
        if (end > panels) end = panels;
        if (all == 1) return few_rows(panel, end);
        for (int64_t next; panel < end; panel = next) {
            next = panel + panels_in_cache() < end ? panel + panels_in_cache() : end;
            for (int64_t block = all * part / cut.parts; block < all * (part + 1) / cut.parts; ++block) {
                const int64_t row = rows * block / all;
                for (int64_t one = panel; one < next; ++one)
                    one_of_blocks(row, rows * (block + 1) / all - row, one, block, all);
            }
        }
    }

    void add_to(Stages &stages) const {
        Cut cut = this->cut(stages.threads());
        stages.add(cut.units, [call = *this, cut](int64_t number) { call.unit(cut, number); });
    }
};
