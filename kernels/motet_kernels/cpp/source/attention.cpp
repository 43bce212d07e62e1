// Attention over pages of keys and values, which are read in place (PU-22): no padding, and time follows the context.
//
// A call gets the new rows of all sequences: one row of each sequence that decodes, several of one whose prompt is
// computed. It puts their keys and values into the pages first. A unit of work is one KV head of one sequence, with all
// query heads that share it, for one row or a few. It goes through the pages in blocks, and keeps for each query row the
// largest score, the sum of the weights and the weighted sum of values. Which numbers are added in which order depends
// on the sequence alone.
//
// Pages are read whole: the caller has cleared what a sequence has not written yet. No page is read but those that the
// rows attend to.
#include <algorithm>
#include <limits>
#include <vector>

#include "border.h"
#include "calls.h"
#include "products.h"

namespace {

constexpr int PAGE = 16;             // tokens
constexpr int PAGES_IN_BLOCK = 8;
constexpr int KEYS_IN_BLOCK = PAGE * PAGES_IN_BLOCK;
constexpr int PAGES_AHEAD = 3;       // of which keys come before they are needed
constexpr int QUERIES_IN_UNIT = 64;  // rows times the query heads of a KV head
constexpr int FEW_QUERIES = 4;
constexpr int VECTORS_OF_PAGE = PAGE / LANES;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int64_t SMALL = 1 << 19;   // fewer products than this are not worth several threads

struct Sequence {
    int64_t first;   // row of the call
    int64_t count;   // rows
    int64_t start;   // tokens before them
    int64_t pages;   // row of the table
};

// The same for all layers.
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

// -- products of queries and keys ------------------------------------------------------------------------------------

// 32-bit parts of a row: numbers, or pairs of bfloats where an instruction multiplies them.
template <typename T> struct Parts {
    static constexpr int VECTORS = 2;  // of a Pair
    static INLINE void load(const T *from, words *into) {
        Pair value = ::load(from);
        into[0] = as_words(value.a);
        into[1] = as_words(value.b);
    }
    static INLINE floats add(floats sum, words keys, uint32_t query) {
        float factor;
        memcpy(&factor, &query, sizeof factor);
        return sum + as_floats(keys) * factor;
    }
};
#if defined(__AVX512BF16__)
template <> struct Parts<bfloat> {
    static constexpr int VECTORS = 1;
    static INLINE void load(const bfloat *from, words *into) { *into = load_raw(from).value; }
    static INLINE floats add(floats sum, words keys, uint32_t query) {
        return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)keys, (__m512bh)all_words(query));
    }
};
#endif

template <typename T> INLINE void load_parts(const T *from, int64_t left, words *into) {
    if (left >= PAIR) return Parts<T>::load(from, into);
    T buffer[PAIR] = {};
    memcpy(buffer, from, left * sizeof(T));
    Parts<T>::load(buffer, into);
}

// Lane j of vector i becomes lane i of vector j.
template <int S, size_t... L> INLINE void swap_lanes(words &x, words &y, std::index_sequence<L...>) {
    floats upper = SHUFFLE(as_floats(x), as_floats(y), ((int)L & S ? (int)L - S + LANES : (int)L)...);
    floats lower = SHUFFLE(as_floats(x), as_floats(y), ((int)L & S ? (int)L + LANES : (int)L + S)...);
    x = as_words(upper);
    y = as_words(lower);
}
template <int S = 1> INLINE void transpose(words *vectors) {
    if constexpr (S < LANES) {
        for (int i = 0; i < LANES; ++i)
            if (!(i & S)) swap_lanes<S>(vectors[i], vectors[i + S], std::make_index_sequence<LANES>{});
        transpose<2 * S>(vectors);
    }
}

// The keys of a page, part by part: all tokens of a part lie together.
template <typename T> INLINE void transpose_page(const T *keys, int64_t width, uint32_t *into) {
    constexpr int VECTORS = Parts<T>::VECTORS;
    for (int64_t i = 0; i < width; i += PAIR)
        for (int first = 0; first < PAGE; first += LANES) {
            words block[VECTORS][LANES];
            for (int token = 0; token < LANES; ++token) {
                words parts[VECTORS];
                load_parts(keys + (first + token) * width + i, width - i, parts);
                for (int v = 0; v < VECTORS; ++v) block[v][token] = parts[v];
            }
            for (int v = 0; v < VECTORS; ++v) {
                transpose(block[v]);
                uint32_t *part = into + (i / PAIR * VECTORS + v) * LANES * PAGE;
                for (int lane = 0; lane < LANES; ++lane)
                    memcpy(part + lane * PAGE + first, &block[v][lane], sizeof(words));
            }
        }
}

// Scores of R queries with a page; `parts` of a query, and keys as transpose_page leaves them.
template <int R, typename T>
INLINE void scores_of_page(const uint32_t *queries, int64_t parts, const uint32_t *keys, float *into) {
    floats sums_of[R][VECTORS_OF_PAGE] = {};
    for (int64_t part = 0; part < parts; ++part)
        for (int v = 0; v < VECTORS_OF_PAGE; ++v) {
            words of_keys;
            memcpy(&of_keys, keys + part * PAGE + v * LANES, sizeof of_keys);
            for (int r = 0; r < R; ++r)
                sums_of[r][v] = Parts<T>::add(sums_of[r][v], of_keys, queries[r * parts + part]);
        }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECTORS_OF_PAGE; ++v) store_floats(into + r * KEYS_IN_BLOCK + v * LANES, sums_of[r][v]);
}

// The same for few queries, for which it does not pay to transpose the keys.
template <int R, typename T>
INLINE void scores_of_few(const T *const *queries, const T *keys, int64_t width, float *into) {
    constexpr int TOKENS = LANES / R;
    for (int first = 0; first < PAGE; first += TOKENS) {
        floats sums_of[LANES] = {};
        int64_t i = 0;
        for (; i + PAIR <= width; i += PAIR) {
            Raw<T> of_queries[R];
            for (int r = 0; r < R; ++r) of_queries[r] = load_raw(queries[r] + i);
            for (int t = 0; t < TOKENS; ++t) {
                Raw<T> of_keys = load_raw(keys + (first + t) * width + i);
                for (int r = 0; r < R; ++r)
                    sums_of[r * TOKENS + t] = add_product(sums_of[r * TOKENS + t], of_queries[r], of_keys);
            }
        }
        if (i < width) {
            int rest = (int)(width - i);
            for (int t = 0; t < TOKENS; ++t) {
                Raw<T> of_keys = load_raw_some(keys + (first + t) * width + i, rest);
                for (int r = 0; r < R; ++r)
                    sums_of[r * TOKENS + t] =
                        add_product(sums_of[r * TOKENS + t], load_raw_some(queries[r] + i, rest), of_keys);
            }
        }
        float totals[LANES];
        store_floats(totals, sums(sums_of));
        for (int r = 0; r < R; ++r)
            memcpy(into + r * KEYS_IN_BLOCK + first, totals + r * TOKENS, TOKENS * sizeof(float));
    }
}

// -- weights and values ----------------------------------------------------------------------------------------------

// Adds to C Pairs of columns of R queries the values of a block, by their weights.
template <int R, int C, typename T>
INLINE void add_values(float *into, int64_t padded, const typename Steps<T>::Factor *weights, const T *const *values,
                       int pages, int64_t width, int rest) {
    constexpr int STEP = Steps<T>::STEP;
    Pair sums_of[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums_of[r][c] = load(into + r * padded + c * PAIR);
    for (int page = 0; page < pages; ++page)
        for (int t = 0; t < PAGE; t += STEP) {
            const T *of_token = values[page] + t * width;
            for (int c = 0; c < C; ++c) {
                auto columns = rest ? Steps<T>::some_columns(of_token + c * PAIR, width, rest)
                                    : Steps<T>::columns(of_token + c * PAIR, width);
                for (int r = 0; r < R; ++r)
                    Steps<T>::add(sums_of[r][c], columns, weights[(r * KEYS_IN_BLOCK + page * PAGE + t) / STEP]);
            }
        }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(into + r * padded + c * PAIR, sums_of[r][c]);
}

// -- one unit --------------------------------------------------------------------------------------------------------

// What a thread needs while it computes a unit. It is kept for the next one.
struct Scratch {
    std::vector<uint32_t> queries, keys, weights;
    std::vector<float> scores, sums, largest, totals;
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

    int64_t first_key(int64_t position) const {
        return options.window && position >= options.window ? position - options.window + 1 : 0;
    }

    // Turns products of query and key into scores; those that the query does not attend to become -infinity.
    void score(float *of_query, int64_t first, int64_t keys, int64_t position) const {
        for (int64_t i = 0; i < keys; i += LANES) {
            floats value = load_floats(of_query + i) * options.scale;
            if (options.softcap > 0) value = hyperbolic_tangent(value / options.softcap) * options.softcap;
            store_floats(of_query + i, value);
        }
        for (int64_t i = 0; i < first_key(position) - first && i < keys; ++i) of_query[i] = NOTHING;
        for (int64_t i = position + 1 > first ? position + 1 - first : 0; i < keys; ++i) of_query[i] = NOTHING;
    }

    // Turns scores into weights, and brings what the query has so far to the same largest score.
    void weigh(float *of_query, int64_t keys, float &largest_score, float &total, float *sums_of, int64_t padded) const {
        floats most = all(largest_score);
        for (int64_t i = 0; i < keys; i += LANES) most = larger(load_floats(of_query + i), most);
        float largest_now = largest(most);
        if (largest_now == NOTHING) {  // it attends to no key of this block, nor of one before
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
        const int64_t group = heads / batch.kv_heads, count = rows * group, width = batch.width;
        const int64_t padded = (width + PAIR - 1) / PAIR * PAIR, parts = padded / PAIR * Parts<T>::VECTORS * LANES;
        const bool few = count <= FEW_QUERIES;
        scratch.fit(count, padded);
        std::fill_n(scratch.sums.begin(), count * padded, 0.0f);
        std::fill_n(scratch.largest.begin(), count, NOTHING);
        std::fill_n(scratch.totals.begin(), count, 0.0f);
        auto query = [&](int64_t i) {
            return queries + (kv_head * group + i % group) * of_queries.head +
                   (sequence.first + row + i / group) * of_queries.row;
        };
        const T *of_few[FEW_QUERIES] = {};
        for (int64_t i = 0; i < count; ++i) {
            if (few) {
                of_few[i] = query(i);
                continue;
            }
            for (int64_t at = 0; at < width; at += PAIR) {
                words vectors[Parts<T>::VECTORS];
                load_parts(query(i) + at, width - at, vectors);
                memcpy(scratch.queries.data() + i * parts + at / PAIR * Parts<T>::VECTORS * LANES, vectors,
                       sizeof vectors);
            }
        }
        const int64_t position = sequence.start + row;
        const int64_t first_page = first_key(position) / PAGE, end_page = (position + rows - 1) / PAGE + 1;
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
            T *to = out + ((sequence.first + row + i / group) * heads + kv_head * group + i % group) * width;
            const float *from = scratch.sums.data() + i * padded;
            for (int64_t at = 0; at < width; at += PAIR) {
                Pair value = load(from + at);
                value.a = value.a / scratch.totals[i];
                value.b = value.b / scratch.totals[i];
                if (at + PAIR <= width)
                    store(to + at, value);
                else
                    store_some(to + at, value, (int)(width - at));
            }
        }
    }

    void prefetch_page(const T *from) const {
        for (int64_t line = 0; line < PAGE * batch.width * (int64_t)sizeof(T); line += LINE)
            prefetch_far(bytes_of(from) + line);
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
                const T *at[PAGES_IN_BLOCK];
                for (int64_t column = 0; column < width;) {
                    float *into = scratch.sums.data() + i * padded + column;
                    for (int p = 0; p < pages; ++p) at[p] = values[p] + column;
                    if (column + COLUMNS * PAIR <= width) {
                        add_values<R, COLUMNS>(into, padded, of_rows, at, pages, width, 0);
                        column += COLUMNS * PAIR;
                    } else {
                        int64_t left = width - column;
                        add_values<R, 1>(into, padded, of_rows, at, pages, width, left < PAIR ? (int)left : 0);
                        column += PAIR;
                    }
                }
            });
    }

    // Rows that a unit computes together.
    int64_t rows_of_unit() const {
        const int64_t group = heads / batch.kv_heads;
        return group < QUERIES_IN_UNIT ? QUERIES_IN_UNIT / group : 1;
    }
};

template <typename With> void with_type(int64_t type, const With &with) {
    if (type == 0) with(float{});
    if (type == 1) with(bfloat{});
    if (type == 2) with(half{});
}

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

void AttentionRows::write(int64_t layer, int64_t row, const void *key, int64_t key_head, const void *value,
                          int64_t value_head) const {
    const Batch &b = *static_cast<const Batch *>(batch_);
    if (row >= rows() || places_[row] < 0) return;
    with_type(type_, [&](auto number) {
        using T = decltype(number);
        T *into = static_cast<T *>(b.pages) + layer * b.layer_stride + places_[row];
        const T *keys = static_cast<const T *>(key), *values = static_cast<const T *>(value);
        for (int64_t head = 0; head < b.kv_heads; ++head, into += PAGE * b.width) {
            memcpy(into, keys + head * key_head, b.width * sizeof(T));
            memcpy(into + b.kv_heads * PAGE * b.width, values + head * value_head, b.width * sizeof(T));
        }
    });
}

void AttentionRows::add_to(Stages &stages, int64_t layer, int64_t heads, const void *queries, Strides of_queries,
                           void *out, AttentionOptions options) const {
    const Batch &b = *static_cast<const Batch *>(batch_);
    with_type(type_, [&](auto number) {
        using T = decltype(number);
        Call<T> call{b, layer, heads, static_cast<const T *>(queries), of_queries, static_cast<T *>(out), options};
        const int64_t at_once = call.rows_of_unit();
        for (int64_t s = 0; s < b.count;) {
            // A prompt is a part of its own. Sequences that decode follow each other in one.
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

// The strides are elements between two heads and between two rows; the last dimension is contiguous. `out` is [rows,
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
