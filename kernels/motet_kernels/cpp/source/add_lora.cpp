// add_lora: y[i] += x[i] · A · B for rows grouped into segments of one adapter each (PU-01, PU-02).
//
// The products x · A are summed over the whole width (shrink), kept in fp32, and multiplied with B (expand). Each
// segment is computed at its own rank, so a batch of mixed ranks reads only the bytes of its adapters. A segment with
// one row reads each matrix once, in order, at the speed of the memory (PU-04). Several rows are computed a few at a
// time: each number is read once for these few rows. With few pieces, threads share the ranks, then the columns
// (PU-03). A row's numbers are always added in one order and rounded at the same places: so a row's result depends
// neither on threads nor on other rows.
#include "border.h"
#include "calls.h"
#include "lora_products.h"

namespace {

constexpr int64_t SMALL = 64 * 1024;  // one thread multiplies fewer numbers than this
constexpr int64_t UNITS_OF_A_THREAD = 4, PIECES_OF_A_THREAD = 4;
constexpr int64_t LEAST_COLUMNS = 256;

struct Segment {
    int64_t start, stop, rank;
    const uint8_t *run;       // the adapter's bytes
    // Of each linear's A, B and SCALES in the run; negative: the adapter does not change the linear, or does not scale.
    const int64_t *offsets;
};

constexpr int SCALES = 2, OFFSETS = 3;

template <typename T> const T *matrix(const Segment &segment, int64_t linear, int which) {
    int64_t offset = segment.offsets[OFFSETS * linear + which];
    return offset < 0 ? nullptr : reinterpret_cast<const T *>(segment.run + offset);
}

}  // namespace

struct LoraRows::Piece {
    Segment segment;
    int64_t row, rows, products;  // products: where the piece's x · A begin among the products of a linear
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

    // The A (`which` = 0) or B (1) that is read after the one of this linear: of the piece's next linear, or else of
    // the next piece's first linear. nullptr if there is no such linear, or if the adapter does not change it.
    const T *after(int64_t piece, int linear, int which) const {
        if (linear + 1 < group.count) return matrix<T>(pieces[piece].segment, group.linears[linear + 1].index, which);
        return piece + 1 < count ? matrix<T>(pieces[piece + 1].segment, group.linears[0].index, which) : nullptr;
    }

    // Computes one of `parts` parts of the ranks.
    void shrink(int64_t number, int linear, int64_t part, int64_t parts, const T *next) const {
        const LoraRows::Piece &piece = pieces[number];
        const LoraLinear &of = group.linears[linear];
        const T *a = matrix<T>(piece.segment, of.index, 0);
        if (!a) return;
        const int64_t rank = piece.segment.rank, steps = rank / RANKS_AT_ONCE;
        ::shrink(Matrix<const T>{static_cast<const T *>(of.x) + piece.row * of.x_stride, of.x_stride}, piece.rows, a,
                 of.inputs, products_of(number, linear), rank, steps * part / parts * RANKS_AT_ONCE,
                 steps * (part + 1) / parts * RANKS_AT_ONCE, next);
    }

    // Computes `rows` rows of the piece, from its row number `row` on.
    void expand(int64_t number, int linear, int64_t row, int64_t rows, int64_t from, int64_t to, const T *next) const {
        const LoraRows::Piece &piece = pieces[number];
        const LoraLinear &of = group.linears[linear];
        const T *b = matrix<T>(piece.segment, of.index, 1);
        if (!b) return;
        const int64_t rank = piece.segment.rank;
        const float *factors = products_of(number, linear) + row * rank;
        T *y = static_cast<T *>(of.y) + (piece.row + row) * of.y_stride;
        if (const T *scales = matrix<T>(piece.segment, of.index, SCALES))
            scale_rows(Matrix<T>{y, of.y_stride}, rows, scales, scales + of.outputs, from, to);
        if (piece.rows == 1)
            add_row(y, factors, rank, b, of.outputs, from, to, next);
        else
            ::expand(Matrix<T>{y, of.y_stride}, rows, factors, rank, b, of.outputs, from, to);
    }

    void all_of_piece(int64_t number) const {
        const LoraRows::Piece &piece = pieces[number];
        shrink(number, 0, 0, 1, matrix<T>(piece.segment, group.linears[0].index, 1));
        expand(number, 0, 0, piece.rows, 0, group.linears[0].outputs, after(number, 0, 0));
    }
};

}  // namespace

template <typename With> void LoraRows::with_work(const LoraGroup &group, const With &with) const {
    with_type(type_, [&](auto number) {
        with(Work<decltype(number)>{pieces_.data(), pieces(), group, products_, products_of_a_linear_});
    });
}

void LoraRows::list(const LoraGroup &group, int64_t threads, int64_t most, std::vector<Later> &into) const {
    if (!group.count) return;
    // Lists the matrices of a thread's share of the pieces. They are prefetched in the list's order: the matrices that
    // are read first come last, so that they are still in the cache.
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
    with_work(group, [&](auto work) {
        stages.add(pieces() * group.count * parts, [=](int64_t unit) {
            int64_t piece = unit / parts / group.count;
            int linear = (int)(unit / parts % group.count);
            work.shrink(piece, linear, unit % parts, parts, parts > 1 ? nullptr : work.after(piece, linear, 0));
        });
    });
}

void LoraRows::add_expands(Stages &stages, const LoraGroup &group) const {
    const int64_t wanted = UNITS_OF_A_THREAD * stages.threads();
    with_work(group, [&](auto work) {
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
        with_work(group, [&](auto work) {
            stages.add(pieces(), [=](int64_t piece) { work.all_of_piece(piece); });
        });
    }
    stages.end_stage();
}

void LoraRows::expand(const LoraGroup &group, int linear, int64_t piece, int64_t row, int64_t rows, int64_t from,
                      int64_t to) const {
    with_work(group, [&](auto work) {
        const auto *next = work.after(piece, linear, 1);
        work.expand(piece, linear, row, rows, from, to, next ? next + from : nullptr);
    });
}

extern "C" {

// The strides are in elements. `products` has room for the x · A of all segments. Ranks are multiples of 4.
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
