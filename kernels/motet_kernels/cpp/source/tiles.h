// Products of bfloats by AMX: an instruction multiplies 32 inputs of 16 rows of x with 16 columns of W.
//
// A panel of bfloats has the layout that these instructions read: two inputs of a column in a word, the words of half
// of the columns side by side, and the next two inputs 2 · PAIR numbers further on. The CPU chooses the order in which
// an instruction adds its inputs: the order is the same for each row, and for any number of rows in a tile.
#pragma once

#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define MOTET_TILES
#endif

#if defined(MOTET_TILES)

namespace tiles {

constexpr int ROWS = 16, INPUTS = 32, BYTES = 64;  // of a tile, which is 16 lines of 64 bytes

// Tiles by number: 0, 1: sums of the first 16 rows, one per half of a panel's columns; 2, 3: of the next 16; 4, 5: x;
// 6, 7: W. A line of W is two inputs of 16 columns.
struct alignas(64) Shapes {
    uint8_t palette = 1, first_line = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t lines[16] = {};
};

// For how many rows the tiles of this thread are set up. torch may set up other tiles on the calling thread, so each
// call begins with forget().
inline thread_local int set_up_for = 0;
INLINE void forget() { set_up_for = 0; }

inline void set_up(int rows) {
    if (rows == set_up_for) return;
    const int first = rows < ROWS ? rows : ROWS, second = rows - first;
    Shapes shapes;
    auto shape = [&](int tile, int lines) {
        shapes.lines[tile] = (uint8_t)lines;
        shapes.bytes[tile] = lines ? BYTES : 0;
    };
    for (int half = 0; half < 2; ++half) {
        shape(half, first);
        shape(2 + half, second);
        shape(6 + half, INPUTS / 2);
    }
    shape(4, first);
    shape(5, second);
    // Assembly, because the built-in function of some compilers reads only 8 of the 64 bytes.
    asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
    set_up_for = rows;
}

// Reads a tile's lines for sanitizers, which do not see the reads of assembly.
INLINE void show([[maybe_unused]] const void *from, [[maybe_unused]] int64_t stride, [[maybe_unused]] int lines) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    for (int i = 0; i < lines; ++i) {
        uint8_t line[BYTES];
        memcpy(line, static_cast<const uint8_t *>(from) + i * stride, BYTES);
        asm volatile("" ::"m"(line));
    }
#endif
}

#define MOTET_TILE_LOAD(TILE, FROM, STRIDE) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #TILE ::"r"(FROM), "r"((int64_t)(STRIDE)) : "memory")
#define MOTET_TILE_STORE(TILE, TO, STRIDE) \
    asm volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" ::"r"(TO), "r"((int64_t)(STRIDE)) : "memory")
#define MOTET_TILE_CLEAR(TILE) asm volatile("tilezero %%tmm" #TILE ::)
#define MOTET_TILE_ADD(SUM, X, W) asm volatile("tdpbf16ps %%tmm" #W ", %%tmm" #X ", %%tmm" #SUM ::)

// Sums of some rows and of one panel's columns, in the layout of Pairs.
struct Sums {
    alignas(64) float of[2 * ROWS][2][LANES];
};

// Adds 32 inputs of `rows` rows to the sums in tiles 0 to 3. `x`, `w`: the first numbers; strides are in bytes.
template <bool TWO> INLINE void add(const bfloat *x, int64_t x_stride, int rows, const bfloat *w, int64_t w_stride) {
    show(x, x_stride, rows);
    show(w, w_stride, INPUTS / 2);
    show(w + PAIR, w_stride, INPUTS / 2);
    MOTET_TILE_LOAD(6, w, w_stride);
    MOTET_TILE_LOAD(4, x, x_stride);
    MOTET_TILE_ADD(0, 4, 6);
    MOTET_TILE_LOAD(7, w + PAIR, w_stride);
    MOTET_TILE_ADD(1, 4, 7);
    if (TWO) {
        MOTET_TILE_LOAD(5, x + ROWS * x_stride / (int64_t)sizeof(bfloat), x_stride);
        MOTET_TILE_ADD(2, 5, 6);
        MOTET_TILE_ADD(3, 5, 7);
    }
}

// Multiplies up to 32 rows of x with one panel. Calls before(n) before it reads the next n pairs of inputs.
template <bool TWO, typename Before>
INLINE void multiply(const bfloat *x, int64_t x_stride, int rows, int64_t inputs, const bfloat *panel, Sums &sums,
                     Before before) {
    const int64_t w_stride = 2 * PAIR * (int64_t)sizeof(bfloat), whole = inputs / INPUTS * INPUTS;
    set_up(rows);
    MOTET_TILE_CLEAR(0);
    MOTET_TILE_CLEAR(1);
    if (TWO) {
        MOTET_TILE_CLEAR(2);
        MOTET_TILE_CLEAR(3);
    }
    for (int64_t i = 0; i < whole; i += INPUTS) {
        before(INPUTS / 2);
        add<TWO>(x + i, x_stride, rows, panel + i * PAIR, w_stride);
    }
    if (const int64_t left = inputs - whole) {  // the rest, padded with zeros
        bfloat last_x[2 * ROWS][INPUTS] = {}, last_w[INPUTS / 2][2 * PAIR] = {};
        for (int r = 0; r < rows; ++r)
            memcpy(last_x[r], x + r * x_stride / (int64_t)sizeof(bfloat) + whole, left * sizeof(bfloat));
        memcpy(last_w, panel + whole * PAIR, (left + 1) / 2 * w_stride);
        add<TWO>(last_x[0], INPUTS * sizeof(bfloat), rows, last_w[0], w_stride);
    }
    const int64_t line = 2 * LANES * sizeof(float);
    MOTET_TILE_STORE(0, sums.of[0][0], line);
    MOTET_TILE_STORE(1, sums.of[0][1], line);
    if (TWO) {
        MOTET_TILE_STORE(2, sums.of[ROWS][0], line);
        MOTET_TILE_STORE(3, sums.of[ROWS][1], line);
    }
}

// Products of one or two whole tiles of x by one or two of W; each step takes the next tiles. Tiles of W and of sums
// are contiguous. x[1] and w[1] may be null.
struct WholeTiles {
    const uint8_t *x[2];
    int64_t x_stride, x_step;  // bytes from a line to the next, and from a tile to the next
    const uint8_t *w[2];
    uint8_t *sums[2][2];  // [of x][of W]
};
constexpr int TILE_BYTES = ROWS * BYTES;

// For `steps` steps, on a thread whose tiles are set up for 2 · ROWS rows. `MORE`: adds to the existing sums.
template <bool MORE> inline void multiply(const WholeTiles &of, int64_t steps) {
    const bool two_x = of.x[1], two_w = of.w[1], four = two_x && two_w;
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j)
            if ((!i || two_x) && (!j || two_w)) show(of.sums[i][j], BYTES, ROWS);
    if (MORE) {
        MOTET_TILE_LOAD(0, of.sums[0][0], BYTES);
        if (two_w) MOTET_TILE_LOAD(1, of.sums[0][1], BYTES);
        if (two_x) MOTET_TILE_LOAD(2, of.sums[1][0], BYTES);
        if (four) MOTET_TILE_LOAD(3, of.sums[1][1], BYTES);
    } else {
        MOTET_TILE_CLEAR(0);
        MOTET_TILE_CLEAR(1);
        MOTET_TILE_CLEAR(2);
        MOTET_TILE_CLEAR(3);
    }
    for (int64_t step = 0; step < steps; ++step) {
        const int64_t of_x = step * of.x_step, of_w = step * TILE_BYTES;
        show(of.w[0] + of_w, BYTES, ROWS);
        MOTET_TILE_LOAD(6, of.w[0] + of_w, BYTES);
        show(of.x[0] + of_x, of.x_stride, ROWS);
        MOTET_TILE_LOAD(4, of.x[0] + of_x, of.x_stride);
        MOTET_TILE_ADD(0, 4, 6);
        if (two_w) {
            show(of.w[1] + of_w, BYTES, ROWS);
            MOTET_TILE_LOAD(7, of.w[1] + of_w, BYTES);
            MOTET_TILE_ADD(1, 4, 7);
        }
        if (two_x) {
            show(of.x[1] + of_x, of.x_stride, ROWS);
            MOTET_TILE_LOAD(5, of.x[1] + of_x, of.x_stride);
            MOTET_TILE_ADD(2, 5, 6);
        }
        if (four) MOTET_TILE_ADD(3, 5, 7);
    }
    MOTET_TILE_STORE(0, of.sums[0][0], BYTES);
    if (two_w) MOTET_TILE_STORE(1, of.sums[0][1], BYTES);
    if (two_x) MOTET_TILE_STORE(2, of.sums[1][0], BYTES);
    if (four) MOTET_TILE_STORE(3, of.sums[1][1], BYTES);
}

#undef MOTET_TILE_LOAD
#undef MOTET_TILE_STORE
#undef MOTET_TILE_CLEAR
#undef MOTET_TILE_ADD

}  // namespace tiles

#else

namespace tiles {
INLINE void forget() {}
}  // namespace tiles

#endif
