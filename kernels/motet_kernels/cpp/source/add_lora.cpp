// add_lora: y[i] += x[i] · A · B for rows grouped into segments of one adapter each (PU-01, PU-02).
//
// The products x·A are summed over the whole width (shrink), kept in fp32, and multiplied with B (expand). A segment
// costs its own rank, so mixed ranks cost the sum of their bytes. A segment with one row reads each matrix once, in
// order, at the speed of the memory (PU-04); with more rows, a few rows share each number that is read. Threads share
// out the ranks, then the columns (PU-03). Which numbers are added in which order depends on the segment alone, so
// results do not depend on threads or on other segments.
#include "border.h"
#include "calls.h"
#include "products.h"

namespace {

struct Segment {
    int64_t start, stop, rank;
    const uint8_t *run;       // the adapter's bytes
    const int64_t *offsets;   // of each linear's A and B in the run; negative: the adapter does not change the linear
};

template <typename T> struct Rows {
    T *data;
    int64_t stride;
    T *row(int64_t i) const { return data + i * stride; }
};

constexpr int ROWS_AT_ONCE = LANES == 16 ? 4 : 2;
constexpr int RANKS_AT_ONCE = 4;
constexpr int ROWS_IN_BLOCK = 32;   // of a piece
constexpr int MOST_RANK = 512;
constexpr int64_t AHEAD = 6144;     // bytes from what is read to what is prefetched
constexpr int64_t STRIP = 1024;     // bytes that are prefetched from one place
constexpr int64_t AHEAD_OF_COLUMNS = 512;
constexpr int64_t SMALL = 64 * 1024;  // fewer numbers than this are not worth several threads
constexpr int64_t UNITS_OF_A_THREAD = 4, PIECES_OF_A_THREAD = 4;

constexpr int COLUMNS_AT_ONCE = 2;  // Pairs
constexpr int64_t LEAST_COLUMNS = 256;
constexpr int64_t MOST_SUMS = 8192;  // 32 KiB: they stay in the first cache

// What is read in order, and what is read after it: prefetches AHEAD bytes before they are read.
struct Stream {
    const uint8_t *from;
    int64_t rows, width, stride;  // the last two in bytes
    const uint8_t *next;          // null: nobody knows
    // What is read AHEAD bytes after the byte `at`.
    INLINE const uint8_t *ahead(int64_t at) const {
        at += AHEAD;
        if (at >= rows * width) return next ? next + (at - rows * width) : from;
        return width == stride ? from + at : from + at / width * stride + at % width;
    }
};

// Calls with(i) for each PAIRS Pairs of `count` numbers, and prefetches what follows. They begin at the byte `at` of the
// stream. Returns where the numbers begin that are too few.
template <typename T, int PAIRS, typename F>
INLINE int64_t in_strips(const Stream &stream, int64_t at, int64_t count, const F &with) {
    constexpr int64_t NUMBERS = STRIP / (int64_t)sizeof(T), STEP = PAIRS * PAIR, BYTES = STEP * sizeof(T);
    int64_t i = 0;
    while (i + STEP <= count) {
        const uint8_t *ahead = stream.ahead(at + i * (int64_t)sizeof(T));
        for (const int64_t end = smaller(i + NUMBERS, count); i + STEP <= end; i += STEP, ahead += BYTES) {
            for (int64_t line = 0; line < BYTES; line += LINE) prefetch(ahead + line);
            with(i);
        }
    }
    return i;
}

// -- shrink ----------------------------------------------------------------------------------------------------------

// One row of x with one row of A: what is left is the sum of all lanes.
template <typename T>
INLINE floats product(const T *x, const T *a, int64_t inputs, const Stream &stream, int64_t at) {
    constexpr int CHAINS = 4;
    floats sums_of[CHAINS] = {};
    int64_t i = in_strips<T, CHAINS>(stream, at, inputs, [&](int64_t i) {
        for (int c = 0; c < CHAINS; ++c)
            sums_of[c] = add_product(sums_of[c], load_raw(x + i + c * PAIR), load_raw(a + i + c * PAIR));
    });
    for (; i + PAIR <= inputs; i += PAIR) sums_of[0] = add_product(sums_of[0], load_raw(x + i), load_raw(a + i));
    if (i < inputs) {
        int rest = (int)(inputs - i);
        sums_of[1] = add_product(sums_of[1], load_raw_some(x + i, rest), load_raw_some(a + i, rest));
    }
    return (sums_of[0] + sums_of[1]) + (sums_of[2] + sums_of[3]);
}

// R rows of x with K rows of A. `next`: the rows of A that follow; null if they have been read.
template <int R, int K, typename T>
INLINE void products(Rows<const T> x, const T *a, int64_t inputs, float *into, int64_t rank, const T *next) {
    floats sums_of[R][K] = {};
    Raw<T> of_x[R], of_a[K];
    int64_t i = 0;
    for (; i + PAIR <= inputs; i += PAIR) {
        if (next)
            for (int k = 0; k < K; ++k) prefetch_far(next + k * inputs + i);
        for (int r = 0; r < R; ++r) of_x[r] = load_raw(x.row(r) + i);
        for (int k = 0; k < K; ++k) of_a[k] = load_raw(a + k * inputs + i);
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < K; ++k) sums_of[r][k] = add_product(sums_of[r][k], of_x[r], of_a[k]);
    }
    if (i < inputs) {
        int rest = (int)(inputs - i);
        for (int r = 0; r < R; ++r) of_x[r] = load_raw_some(x.row(r) + i, rest);
        for (int k = 0; k < K; ++k) of_a[k] = load_raw_some(a + k * inputs + i, rest);
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < K; ++k) sums_of[r][k] = add_product(sums_of[r][k], of_x[r], of_a[k]);
    }
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
void shrink(Rows<const T> x, int64_t rows, const T *a, int64_t inputs, float *into, int64_t rank, int64_t k,
            int64_t last, const T *next) {
    if (rows == 1) {
        const int64_t width = inputs * (int64_t)sizeof(T), bytes = (last - k) * width;
        const Stream stream{bytes_of(a + k * inputs), 1, bytes, bytes, bytes_of(next)};
        for (int64_t at = 0; k < last;) {  // the lanes of several ranks are added together: their sums would wait for each other
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
                products<decltype(count)::value, RANKS_AT_ONCE>(Rows<const T>{x.row(row), x.stride}, of_k, inputs,
                                                                into + row * rank + k, rank, following);
            });
        }
    }
}

// -- expand ----------------------------------------------------------------------------------------------------------

// Adds R rows of products · B to C Pairs of columns; a row has `steps` factors. `cold`: nobody has read these columns
// yet.
template <int R, int C, typename T>
INLINE void add_columns(Rows<T> y, const typename Steps<T>::Factor *factors, int64_t steps, const T *b,
                        int64_t outputs, bool cold) {
    Pair sums_of[R][C] = {};
    for (int64_t k = 0; k < steps; ++k) {
        const T *of_k = b + k * Steps<T>::STEP * outputs;
        if (cold)
            for (int j = 0; j < Steps<T>::STEP; ++j)
                for (int64_t line = 0; line < (int64_t)(C * PAIR * sizeof(T)); line += LINE)
                    prefetch(bytes_of(of_k + j * outputs) + AHEAD_OF_COLUMNS + line);
        for (int c = 0; c < C; ++c) {
            typename Steps<T>::Columns of_b = Steps<T>::columns(of_k + c * PAIR, outputs);
            for (int r = 0; r < R; ++r) Steps<T>::add(sums_of[r][c], of_b, factors[r * steps + k]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            T *to = y.row(r) + c * PAIR;
            Pair old = load(to);
            store(to, Pair{old.a + sums_of[r][c].a, old.b + sums_of[r][c].b});
        }
}

template <int R, typename T>
INLINE void add_last_columns(Rows<T> y, const typename Steps<T>::Factor *factors, int64_t steps, const T *b,
                             int64_t outputs, int count) {
    Pair sums_of[R] = {};
    for (int64_t k = 0; k < steps; ++k) {
        typename Steps<T>::Columns of_b = Steps<T>::some_columns(b + k * Steps<T>::STEP * outputs, outputs, count);
        for (int r = 0; r < R; ++r) Steps<T>::add(sums_of[r], of_b, factors[r * steps + k]);
    }
    for (int r = 0; r < R; ++r) {
        Pair old = load_some(y.row(r), count);
        store_some(y.row(r), Pair{old.a + sums_of[r].a, old.b + sums_of[r].b}, count);
    }
}

// Columns [from, to) of R rows. `to` is the end of the row, or a multiple of PAIR away from `from`.
template <int R, typename T>
INLINE void add_rows(Rows<T> y, const typename Steps<T>::Factor *factors, int64_t steps, const T *b, int64_t outputs,
                     int64_t from, int64_t to, bool cold) {
    for (; from + COLUMNS_AT_ONCE * PAIR <= to; from += COLUMNS_AT_ONCE * PAIR)
        add_columns<R, COLUMNS_AT_ONCE>(Rows<T>{y.data + from, y.stride}, factors, steps, b + from, outputs, cold);
    for (; from + PAIR <= to; from += PAIR)
        add_columns<R, 1>(Rows<T>{y.data + from, y.stride}, factors, steps, b + from, outputs, false);
    if (from < to)
        add_last_columns<R>(Rows<T>{y.data + from, y.stride}, factors, steps, b + from, outputs, (int)(to - from));
}

// Adds one rank's share to the sums of `count` columns; the first one begins them, the last one adds them to y.
template <bool FIRST, bool LAST, typename T>
INLINE void add_rank(T *y, float *sums_of, float factor, const T *b, int64_t count, const Stream &stream, int64_t at) {
    int64_t i = in_strips<T, 1>(stream, at, count, [&](int64_t i) {
        Pair of_b = load(b + i), total = FIRST ? Pair{} : load(sums_of + i);
        total.a += of_b.a * factor;
        total.b += of_b.b * factor;
        if (LAST) {
            Pair old = load(y + i);
            store(y + i, Pair{old.a + total.a, old.b + total.b});
        } else {
            store(sums_of + i, total);
        }
    });
    if (i < count) {
        int rest = (int)(count - i);
        Pair of_b = load_some(b + i, rest), total = FIRST ? Pair{} : load(sums_of + i);
        total.a += of_b.a * factor;
        total.b += of_b.b * factor;
        if (LAST) {
            Pair old = load_some(y + i, rest);
            store_some(y + i, Pair{old.a + total.a, old.b + total.b}, rest);
        } else {
            store(sums_of + i, total);
        }
    }
}

// Columns [from, to) of one row. B is read in order: that is up to a third faster than all ranks of a few columns.
template <typename T>
INLINE void add_row(T *y, const float *products, int64_t rank, const T *b, int64_t outputs, int64_t from, int64_t to,
                    const T *next) {
    alignas(LINE) float sums_of[MOST_SUMS + PAIR];
    for (; from < to; from += MOST_SUMS) {
        const int64_t count = smaller(MOST_SUMS, to - from), width = count * (int64_t)sizeof(T);
        const T *of_k = b + from, *after = from + count < to ? of_k + count : next;
        const Stream stream{bytes_of(of_k), rank, width, outputs * (int64_t)sizeof(T), bytes_of(after)};
        for (int64_t k = 0; k < rank; ++k, of_k += outputs) {
            if (k == 0)
                add_rank<true, false>(y + from, sums_of, products[k], of_k, count, stream, k * width);
            else if (k + 1 < rank)
                add_rank<false, false>(y + from, sums_of, products[k], of_k, count, stream, k * width);
            else
                add_rank<false, true>(y + from, sums_of, products[k], of_k, count, stream, k * width);
        }
    }
}

// Rows of a piece that has several.
template <typename T>
void expand(Rows<T> y, int64_t rows, const float *products, int64_t rank, const T *b, int64_t outputs, int64_t from,
            int64_t to) {
    typename Steps<T>::Factor buffer[ROWS_IN_BLOCK * MOST_RANK / Steps<T>::STEP + PAIR];
    auto factors = Steps<T>::factors(products, rows * rank, buffer);
    const int64_t steps = rank / Steps<T>::STEP;
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE)
        with_rows<ROWS_AT_ONCE>(rows - row, [&](auto count) {
            add_rows<decltype(count)::value>(Rows<T>{y.row(row), y.stride}, factors + row * steps, steps, b, outputs,
                                             from, to, row == 0);
        });
}

// -- all segments ----------------------------------------------------------------------------------------------------

template <typename T> const T *matrix(const Segment &segment, int64_t linear, int which) {
    int64_t offset = segment.offsets[2 * linear + which];
    return offset < 0 ? nullptr : reinterpret_cast<const T *>(segment.run + offset);
}

template <typename With> void with_type(int64_t type, const With &with) {
    if (type == 0) with(float{});
    if (type == 1) with(bfloat{});
    if (type == 2) with(half{});
}

}  // namespace

struct LoraRows::Piece {
    Segment segment;
    int64_t row, rows, products;  // the last one: where its x·A begin, for each linear
};

LoraRows::LoraRows(int64_t type, const void *segments, int64_t count, float *products)
    : type_(type), products_(products) {
    const Segment *all = static_cast<const Segment *>(segments);
    for (int64_t s = 0; s < count; ++s)
        for (int64_t row = all[s].start; row < all[s].stop; row += ROWS_IN_BLOCK) {
            int64_t rows = smaller(ROWS_IN_BLOCK, all[s].stop - row);
            pieces_.push_back({all[s], row, rows, products_of_a_linear_});
            products_of_a_linear_ += rows * all[s].rank;
        }
}
LoraRows::~LoraRows() = default;

int64_t LoraRows::pieces() const { return (int64_t)pieces_.size(); }
int64_t LoraRows::first_row(int64_t piece) const { return pieces_[piece].row; }
int64_t LoraRows::rows(int64_t piece) const { return pieces_[piece].rows; }

namespace {

template <typename T> struct Work {
    const LoraRows::Piece *pieces;
    int64_t count;
    LoraGroup group;
    float *products;
    int64_t products_of_a_linear;

    float *products_of(int64_t piece, int linear) const {
        return products + linear * products_of_a_linear + pieces[piece].products;
    }

    // Where this thread reads on, if it computes all linears of a piece after the other.
    const T *after(int64_t piece, int linear) const {
        if (linear + 1 < group.count) return matrix<T>(pieces[piece].segment, group.linears[linear + 1].index, 0);
        return piece + 1 < count ? matrix<T>(pieces[piece + 1].segment, group.linears[0].index, 0) : nullptr;
    }

    // The same where each piece's A have been read already.
    const T *b_after(int64_t piece, int linear) const {
        if (linear + 1 < group.count) return matrix<T>(pieces[piece].segment, group.linears[linear + 1].index, 1);
        return piece + 1 < count ? matrix<T>(pieces[piece + 1].segment, group.linears[0].index, 1) : nullptr;
    }

    // One of so many parts of the ranks.
    void shrink(int64_t number, int linear, int64_t part, int64_t parts, const T *next) const {
        const LoraRows::Piece &piece = pieces[number];
        const LoraLinear &of = group.linears[linear];
        const T *a = matrix<T>(piece.segment, of.index, 0);
        if (!a) return;
        const int64_t rank = piece.segment.rank, steps = rank / RANKS_AT_ONCE;
        ::shrink(Rows<const T>{static_cast<const T *>(of.x) + piece.row * of.x_stride, of.x_stride}, piece.rows, a,
                 of.inputs, products_of(number, linear), rank, steps * part / parts * RANKS_AT_ONCE,
                 steps * (part + 1) / parts * RANKS_AT_ONCE, next);
    }

    // `row` of the piece, and some rows after it.
    void expand(int64_t number, int linear, int64_t row, int64_t rows, int64_t from, int64_t to, const T *next) const {
        const LoraRows::Piece &piece = pieces[number];
        const LoraLinear &of = group.linears[linear];
        const T *b = matrix<T>(piece.segment, of.index, 1);
        if (!b) return;
        const int64_t rank = piece.segment.rank;
        const float *factors = products_of(number, linear) + row * rank;
        T *y = static_cast<T *>(of.y) + (piece.row + row) * of.y_stride;
        if (piece.rows == 1)
            add_row(y, factors, rank, b, of.outputs, from, to, next);
        else
            ::expand(Rows<T>{y, of.y_stride}, rows, factors, rank, b, of.outputs, from, to);
    }

    void all_of_piece(int64_t number) const {
        const LoraRows::Piece &piece = pieces[number];
        shrink(number, 0, 0, 1, matrix<T>(piece.segment, group.linears[0].index, 1));
        expand(number, 0, 0, piece.rows, 0, group.linears[0].outputs, after(number, 0));
    }
};

}  // namespace

void LoraRows::list(const LoraGroup &group, int64_t threads, int64_t most, std::vector<Later> &into) const {
    if (!group.count) return;
    // Of a thread's share of the pieces. What is read first comes last: it is least likely to leave the cache again.
    const auto of_share = [&](auto number, int which, int64_t first, int64_t end) {
        using T = decltype(number);
        for (int64_t piece = first; piece < end; ++piece) {
            const Segment &segment = pieces_[piece].segment;
            if (piece > first && segment.run == pieces_[piece - 1].segment.run) continue;
            for (int linear = 0; linear < group.count; ++linear) {
                const LoraLinear &of = group.linears[linear];
                const T *from = matrix<T>(segment, of.index, which);
                const int64_t bytes = segment.rank * (which ? of.outputs : of.inputs) * (int64_t)sizeof(T);
                for (int64_t at = 0; from && at < bytes; at += most)
                    into.push_back({bytes_of(from) + at, smaller(most, bytes - at)});
            }
        }
    };
    with_type(type_, [&](auto number) {
        for (int64_t thread = 0; thread < threads; ++thread)
            for (int which : {1, 0})
                of_share(number, which, pieces() * thread / threads, pieces() * (thread + 1) / threads);
    });
}

void LoraRows::add_shrinks(Stages &stages, const LoraGroup &group) const {
    if (!group.count) return;
    const int64_t wanted = UNITS_OF_A_THREAD * stages.threads();
    const int64_t parts = pieces() * group.count >= wanted ? 1 : wanted / (pieces() * group.count);
    with_type(type_, [&](auto number) {
        Work<decltype(number)> work{pieces_.data(), pieces(), group, products_, products_of_a_linear_};
        stages.add(pieces() * group.count * parts, [=](int64_t unit) {
            int64_t piece = unit / parts / group.count;
            int linear = (int)(unit / parts % group.count);
            work.shrink(piece, linear, unit % parts, parts, parts > 1 ? nullptr : work.after(piece, linear));
        });
    });
}

void LoraRows::add_expands(Stages &stages, const LoraGroup &group) const {
    const int64_t wanted = UNITS_OF_A_THREAD * stages.threads();
    with_type(type_, [&](auto number) {
        Work<decltype(number)> work{pieces_.data(), pieces(), group, products_, products_of_a_linear_};
        for (int linear = 0; linear < group.count; ++linear) {
            const int64_t outputs = group.linears[linear].outputs;
            int64_t columns = outputs * pieces() / wanted / PAIR * PAIR;
            if (columns < LEAST_COLUMNS) columns = LEAST_COLUMNS;
            const int64_t parts = (outputs + columns - 1) / columns;
            stages.add(pieces() * parts, [=](int64_t unit) {
                int64_t piece = unit / parts, from = unit % parts * columns;
                work.expand(piece, linear, 0, work.pieces[piece].rows, from, smaller(outputs, from + columns), nullptr);
            });
        }
    });
}

void LoraRows::add_all(Stages &stages, const LoraGroup &group) const {
    if (stages.threads() > 1 && pieces() < PIECES_OF_A_THREAD * stages.threads()) {
        add_shrinks(stages, group);
        stages.end_stage();
        add_expands(stages, group);
    } else {
        with_type(type_, [&](auto number) {
            Work<decltype(number)> work{pieces_.data(), pieces(), group, products_, products_of_a_linear_};
            stages.add(pieces(), [=](int64_t piece) { work.all_of_piece(piece); });
        });
    }
    stages.end_stage();
}

void LoraRows::expand(const LoraGroup &group, int linear, int64_t piece, int64_t row, int64_t rows, int64_t from,
                      int64_t to) const {
    with_type(type_, [&](auto number) {
        using T = decltype(number);
        Work<T> work{pieces_.data(), pieces(), group, products_, products_of_a_linear_};
        const T *next = work.b_after(piece, linear);
        work.expand(piece, linear, row, rows, from, to, next ? next + from : nullptr);
    });
}

extern "C" {

// The strides are elements between two rows. `products` has room for the x·A of all segments. Ranks are multiples of 4.
// At most `most_threads` threads compute.
int64_t motet_add_lora(int64_t type, const void *segments, int64_t count, float *products, int64_t most_threads,
                       int64_t linear, int64_t inputs, int64_t outputs, const void *x, int64_t x_stride, void *y,
                       int64_t y_stride) {
    return answer_of([&] {
        LoraRows rows(type, segments, count, products);
        int64_t numbers = 0;
        for (const Segment *s = static_cast<const Segment *>(segments), *end = s + count; s < end; ++s)
            numbers += s->rank * (inputs + outputs) * (s->stop - s->start > 4 ? (s->stop - s->start) / 4 : 1);
        Stages stages(numbers < SMALL ? 1 : most_threads);
        rows.add_all(stages, {1, {{linear, inputs, outputs, x, x_stride, y, y_stride}}});
        stages.run();
        return 0;
    });
}
}
