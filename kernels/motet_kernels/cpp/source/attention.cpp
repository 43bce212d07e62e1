// Attention over pages of keys and values, which are read in place (PU-22): there is no padding, and the time follows
// the length of the context.
//
// A call gets the new rows of all sequences: one row of each decoding sequence, several rows of each prompt. The call
// first writes the keys and values of these rows into the pages. A unit of work is one KV head of one sequence, with
// all query heads that share the KV head, for a few rows. A unit goes through the pages in blocks. For each query it
// keeps the largest score, the sum of the weights and the weighted sum of values. The order of additions depends on the
// sequence alone. With several rows, AMX tiles multiply bfloats, if the CPU has AMX (tiled_attention.h).
//
// Only pages that the rows attend to are read. They are read whole: the caller has cleared what a sequence has not
// written yet.
#include <algorithm>
#include <limits>
#include <vector>

#include "border.h"
#include "calls.h"
#include "page_products.h"
#include "tiled_attention.h"

namespace {

constexpr int PAGES_AHEAD = 3;       // from the page that is read to the page whose keys are prefetched
constexpr int QUERIES_IN_UNIT = 64;  // rows · query heads of a KV head
constexpr int FEW_QUERIES = 4;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int64_t SMALL = 1 << 19;   // one thread computes fewer products than this

struct Sequence {
    int64_t first;   // row of the call
    int64_t count;   // rows
    int64_t start;   // tokens before these rows
    int64_t pages;   // row of the table
};

// The sequences of a call, the same for all layers.
struct Batch {
    void *pages;
    int64_t page_stride, layer_stride;  // in elements
    int64_t kv_heads, width;
    const int32_t *table;
    int64_t table_stride;
    const Sequence *sequences;
    int64_t count;
    int64_t threads;
};

// A thread's buffers for a unit, reused for the thread's next unit.
struct Scratch {
    std::vector<uint32_t> queries, keys, weights;
    std::vector<float> scores, sums, largest, totals;
#if defined(MOTET_TILES)
    TiledAttention tiled;
#endif
    void fit(int64_t count, int64_t padded) {
        grow(queries, count * padded);
        grow(keys, padded * PAGE);
        grow(weights, count * KEYS_IN_BLOCK + PAIR);
        grow(scores, count * KEYS_IN_BLOCK);
        grow(sums, count * padded);
        grow(largest, count);
        grow(totals, count);
    }
    template <typename Number> static void grow(std::vector<Number> &numbers, int64_t count) {
        if ((int64_t)numbers.size() < count) numbers.resize(count);
    }
};

template <typename T> struct Call {
    const Batch &batch;
    int64_t layer, heads;
    const T *queries;
    Strides of_queries;
    T *out;
    AttentionOptions options;

    const T *page(const Sequence &sequence, int64_t number, int64_t kv_head, bool values) const {
        int64_t page = batch.table[sequence.pages * batch.table_stride + number];
        return static_cast<const T *>(batch.pages) + page * batch.page_stride + layer * batch.layer_stride +
               ((values ? batch.kv_heads : 0) + kv_head) * PAGE * batch.width;
    }

    // Query i of a unit whose first row is `row`: the heads of each row follow each other.
    const T *query_at(const Sequence &sequence, int64_t kv_head, int64_t row, int64_t i) const {
        const int64_t group = heads / batch.kv_heads;
        return queries + (kv_head * group + i % group) * of_queries.head +
               (sequence.first + row + i / group) * of_queries.row;
    }
    T *out_at(const Sequence &sequence, int64_t kv_head, int64_t row, int64_t i) const {
        const int64_t group = heads / batch.kv_heads;
        return out + ((sequence.first + row + i / group) * heads + kv_head * group + i % group) * batch.width;
    }

    // Turns products of query and key into scores; scores of masked keys become -infinity.
    void score(float *of_query, int64_t first, int64_t keys, int64_t position) const {
        for (int64_t i = 0; i < keys; i += LANES) {
            floats value = load_floats(of_query + i) * options.scale;
            if (options.softcap > 0) value = hyperbolic_tangent(value / options.softcap) * options.softcap;
            store_floats(of_query + i, value);
        }
        for (int64_t i = 0; i < options.first_key(position) - first && i < keys; ++i) of_query[i] = NOTHING;
        for (int64_t i = position + 1 > first ? position + 1 - first : 0; i < keys; ++i) of_query[i] = NOTHING;
    }

    // Turns scores into weights, and rescales the query's sums so far to the new largest score.
    void weigh(float *of_query, int64_t keys, float &largest_score, float &total, float *sums_of, int64_t padded) const {
        floats most = all(largest_score);
        for (int64_t i = 0; i < keys; i += LANES) most = larger(load_floats(of_query + i), most);
        float largest_now = largest(most);
        if (largest_now == NOTHING) {  // this query has attended to no key so far
            memset(of_query, 0, keys * sizeof(float));
            return;
        }
        floats added = {};
        for (int64_t i = 0; i < keys; i += LANES) {
            floats weight = exponential(load_floats(of_query + i) - largest_now);
            added += weight;
            store_floats(of_query + i, weight);
        }
        if (largest_now != largest_score) {
            floats fading = exponential(all(largest_score - largest_now));
            for (int64_t i = 0; i < padded; i += LANES) store_floats(sums_of + i, load_floats(sums_of + i) * fading);
            total *= fading[0];
            largest_score = largest_now;
        }
        total += sum(added);
    }

    void unit(const Sequence &sequence, int64_t kv_head, int64_t row, int64_t rows, Scratch &scratch) const {
        const int64_t position = sequence.start + row;
        const int64_t first_page = options.first_key(position) / PAGE, end_page = (position + rows - 1) / PAGE + 1;
#if defined(MOTET_TILES)
        if constexpr (TILED)
            if (is_tiled(sequence)) return tiled_unit(sequence, kv_head, row, rows, first_page, end_page, scratch);
#endif
        const int64_t group = heads / batch.kv_heads, count = rows * group, width = batch.width;
        const int64_t padded = (width + PAIR - 1) / PAIR * PAIR, parts = padded / PAIR * Parts<T>::VECTORS * LANES;
        const bool few = count <= FEW_QUERIES;
        scratch.fit(count, padded);
        std::fill_n(scratch.sums.begin(), count * padded, 0.0f);
        std::fill_n(scratch.largest.begin(), count, NOTHING);
        std::fill_n(scratch.totals.begin(), count, 0.0f);
        auto query = [&](int64_t i) { return query_at(sequence, kv_head, row, i); };
        const T *of_few[FEW_QUERIES] = {};
        for (int64_t i = 0; i < count; ++i) {
            if (few) {
                of_few[i] = query(i);
                continue;
            }
            by_pairs(width, [&](int64_t at, auto some) {
                words vectors[Parts<T>::VECTORS];
                Parts<T>::load(query(i) + at, some, vectors);
                memcpy(scratch.queries.data() + i * parts + at / PAIR * Parts<T>::VECTORS * LANES, vectors,
                       sizeof vectors);
            });
        }
        for (int64_t number = first_page; number < end_page; number += PAGES_IN_BLOCK) {
            const int pages = (int)smaller(PAGES_IN_BLOCK, end_page - number);
            const int64_t keys = pages * PAGE;
            const T *values[PAGES_IN_BLOCK];
            for (int p = 0; p < pages; ++p) {
                const T *of_page = page(sequence, number + p, kv_head, false);
                values[p] = page(sequence, number + p, kv_head, true);
                prefetch_page(values[p]);
                int64_t ahead = number + p + PAGES_AHEAD;
                if (ahead < end_page) {
                    prefetch_page(page(sequence, ahead, kv_head, false));
                } else if (kv_head + 1 < batch.kv_heads && ahead - end_page < end_page - first_page) {
                    prefetch_page(page(sequence, first_page + ahead - end_page, kv_head + 1, false));
                }
                float *into = scratch.scores.data() + p * PAGE;
                if (few)
                    few_scores(of_few, count, of_page, into);
                else
                    many_scores(count, parts, of_page, into, scratch);
            }
            for (int64_t i = 0; i < count; ++i) {
                float *of_query = scratch.scores.data() + i * KEYS_IN_BLOCK;
                score(of_query, number * PAGE, keys, position + i / group);
                weigh(of_query, keys, scratch.largest[i], scratch.totals[i], scratch.sums.data() + i * padded, padded);
            }
            add_block(count, padded, values, pages, scratch);
        }
        for (int64_t i = 0; i < count; ++i) {
            T *to = out_at(sequence, kv_head, row, i);
            const float *from = scratch.sums.data() + i * padded;
            by_pairs(width, [&](int64_t at, auto some) {
                const Pair value = load(from + at);
                store(to + at, Pair{value.a / scratch.totals[i], value.b / scratch.totals[i]}, some);
            });
        }
    }

#if defined(MOTET_TILES)
    static constexpr bool TILED = std::is_same_v<T, bfloat>;

    // Depends on the sequence alone: all units of a sequence are computed in the same way.
    bool is_tiled(const Sequence &sequence) const {
        return sequence.count > 1 && sequence.count * (heads / batch.kv_heads) >= TiledAttention::LEAST_QUERIES;
    }

    void tiled_unit(const Sequence &sequence, int64_t kv_head, int64_t row, int64_t rows, int64_t first_page,
                    int64_t end_page, Scratch &scratch) const {
        constexpr int PAGES = TiledAttention::PAGES;
        const int64_t group = heads / batch.kv_heads;
        TiledAttention &tiled = scratch.tiled;
        tiled.begin(
            rows * group, batch.width, group, sequence.start + row,
            [&](int64_t i) { return query_at(sequence, kv_head, row, i); }, options);
        for (int64_t number = first_page; number < end_page; number += PAGES) {
            const T *keys[PAGES], *values[PAGES];
            const int64_t pages = smaller(PAGES, end_page - number);
            for (int64_t p = 0; p < pages; ++p) {
                keys[p] = page(sequence, number + p, kv_head, false);
                values[p] = page(sequence, number + p, kv_head, true);
                if (number + p + PAGES >= end_page) continue;
                prefetch_page(page(sequence, number + p + PAGES, kv_head, false));
                prefetch_page(page(sequence, number + p + PAGES, kv_head, true));
            }
            tiled.add(keys, values, pages, number * PAGE);
        }
        tiled.finish([&](int64_t i) { return out_at(sequence, kv_head, row, i); });
    }
#endif

    void prefetch_page(const T *from) const {
        for (int64_t line = 0; line < PAGE * batch.width * (int64_t)sizeof(T); line += LINE)
            prefetch(bytes_of(from) + line);
    }

    void few_scores(const T *const *of_few, int64_t count, const T *keys, float *into) const {
        int64_t i = 0;
        for (; i + 4 <= count; i += 4) scores_of_few<4>(of_few + i, keys, batch.width, into + i * KEYS_IN_BLOCK);
        for (; i + 2 <= count; i += 2) scores_of_few<2>(of_few + i, keys, batch.width, into + i * KEYS_IN_BLOCK);
        for (; i < count; ++i) scores_of_few<1>(of_few + i, keys, batch.width, into + i * KEYS_IN_BLOCK);
    }

    void many_scores(int64_t count, int64_t parts, const T *keys, float *into, Scratch &scratch) const {
        constexpr int AT_ONCE = LANES / 2;
        transpose_page(keys, batch.width, scratch.keys.data());
        for (int64_t i = 0; i < count; i += AT_ONCE)
            with_rows<AT_ONCE>(count - i, [&](auto rows) {
                scores_of_page<decltype(rows)::value, T>(scratch.queries.data() + i * parts, parts,
                                                         scratch.keys.data(), into + i * KEYS_IN_BLOCK);
            });
    }

    void add_block(int64_t count, int64_t padded, const T *const *values, int pages, Scratch &scratch) const {
        constexpr int QUERIES = LANES == 16 ? 4 : 2, COLUMNS = 2;
        auto weights = Steps<T>::factors(scratch.scores.data(), count * KEYS_IN_BLOCK,
                                         reinterpret_cast<typename Steps<T>::Factor *>(scratch.weights.data()));
        const int64_t width = batch.width;
        for (int64_t i = 0; i < count; i += QUERIES)
            with_rows<QUERIES>(count - i, [&](auto rows) {
                constexpr int R = decltype(rows)::value;
                auto of_rows = weights + i * KEYS_IN_BLOCK / Steps<T>::STEP;
                float *into = scratch.sums.data() + i * padded;
                int64_t column = 0;
                for (; column + COLUMNS * PAIR <= width; column += COLUMNS * PAIR)
                    add_values<R, COLUMNS>(into, padded, of_rows, values, pages, width, column, Whole{});
                by_pairs(width - column, [&](int64_t at, auto some) {
                    add_values<R, 1>(into, padded, of_rows, values, pages, width, column + at, some);
                });
            });
    }

    // How many rows a unit computes together.
    int64_t rows_of_unit() const {
        const int64_t group = heads / batch.kv_heads;
        int64_t queries_in_unit = QUERIES_IN_UNIT;
#if defined(MOTET_TILES)
        if constexpr (TILED) queries_in_unit = TiledAttention::QUERIES_IN_UNIT;
#endif
        return group < queries_in_unit ? queries_in_unit / group : 1;
    }
};

}  // namespace

AttentionRows::AttentionRows(int64_t type, const void *batch) : type_(type), batch_(batch) {
    const Batch &b = *static_cast<const Batch *>(batch);
    int64_t rows = 0;
    for (int64_t s = 0; s < b.count; ++s) rows = std::max(rows, b.sequences[s].first + b.sequences[s].count);
    places_.assign(rows, -1);
    for (int64_t s = 0; s < b.count; ++s) {
        const Sequence &sequence = b.sequences[s];
        for (int64_t i = 0; i < sequence.count; ++i) {
            const int64_t position = sequence.start + i;
            const int64_t page = b.table[sequence.pages * b.table_stride + position / PAGE];
            places_[sequence.first + i] = page * b.page_stride + position % PAGE * b.width;
        }
    }
}

KeyPlace AttentionRows::place(int64_t layer, int64_t row) const {
    if (row >= rows() || places_[row] < 0) return {};
    const Batch &b = *static_cast<const Batch *>(batch_);
    const int64_t size = type_ == 0 ? sizeof(float) : sizeof(bfloat), head = PAGE * b.width * size;
    char *key = static_cast<char *>(b.pages) + (layer * b.layer_stride + places_[row]) * size;
    return {key, key + b.kv_heads * head, head};
}

void AttentionRows::write(int64_t layer, int64_t row, const void *key, int64_t key_head, const void *value,
                          int64_t value_head) const {
    KeyPlace to = place(layer, row);
    if (!to.key) return;
    const Batch &b = *static_cast<const Batch *>(batch_);
    const int64_t size = type_ == 0 ? sizeof(float) : sizeof(bfloat);
    const char *keys = static_cast<const char *>(key), *values = static_cast<const char *>(value);
    for (int64_t head = 0; head < b.kv_heads; ++head) {
        memcpy(to.key + head * to.bytes_of_head, keys + head * key_head * size, b.width * size);
        memcpy(to.value + head * to.bytes_of_head, values + head * value_head * size, b.width * size);
    }
}

void AttentionRows::add_to(Stages &stages, int64_t layer, int64_t heads, const void *queries, Strides of_queries,
                           void *out, AttentionOptions options) const {
    const Batch &b = *static_cast<const Batch *>(batch_);
    with_type(type_, [&](auto number) {
        using T = decltype(number);
        Call<T> call{b, layer, heads, static_cast<const T *>(queries), of_queries, static_cast<T *>(out), options};
        const int64_t at_once = call.rows_of_unit();
        for (int64_t s = 0; s < b.count;) {
            // A sequence of several units per head is a part. Consecutive smaller sequences share a part.
            int64_t count = 1;
            if (b.sequences[s].count <= at_once)
                while (s + count < b.count && b.sequences[s + count].count <= at_once) ++count;
            const int64_t blocks = std::max<int64_t>(1, (b.sequences[s].count + at_once - 1) / at_once);
            stages.add(count * blocks * b.kv_heads, [=](int64_t unit) {
                thread_local Scratch scratch;
                const Sequence &sequence = call.batch.sequences[s + unit / call.batch.kv_heads / blocks];
                const int64_t row = unit / call.batch.kv_heads % blocks * at_once;
                const int64_t rows = smaller(at_once, sequence.count - row);
                if (rows > 0) call.unit(sequence, unit % call.batch.kv_heads, row, rows, scratch);
            });
            s += count;
        }
    });
}

extern "C" {

// The strides are the distances of heads and of rows in elements; the last dimension is contiguous. `out` is [rows,
// heads, width].
int64_t motet_attention(int64_t type, const void *batch, int64_t layer, int64_t heads, const void *queries,
                        const void *keys, const void *values, int64_t query_head, int64_t query_row, int64_t key_head,
                        int64_t key_row, int64_t value_head, int64_t value_row, void *out, float scale, int64_t window,
                        float softcap) {
    return answer_of([&] {
        const Batch &b = *static_cast<const Batch *>(batch);
        AttentionRows rows(type, batch);
        const int64_t size = type == 0 ? sizeof(float) : sizeof(bfloat);
        for (int64_t row = 0; row < rows.rows(); ++row)
            rows.write(layer, row, static_cast<const uint8_t *>(keys) + row * key_row * size, key_head,
                       static_cast<const uint8_t *>(values) + row * value_row * size, value_head);
        int64_t products = 0;
        for (int64_t s = 0; s < b.count; ++s)
            products += b.sequences[s].count * (b.sequences[s].start + b.sequences[s].count);
        Stages stages(products * heads * b.width < SMALL ? 1 : b.threads);
        rows.add_to(stages, layer, heads, queries, {query_head, query_row}, out, {scale, window, softcap});
        stages.end_stage();
        stages.run();
        return 0;
    });
}
}
