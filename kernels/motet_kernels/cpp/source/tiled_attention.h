// Attention of many queries to the same keys, by tiles (AMX), for bfloats.
//
// A tile of scores has the tokens of a page as rows and 16 queries as columns. So keys are multiplied in their page's
// layout, and all numbers of a query stay in one lane. Weights are stored in pairs of tokens: tiles need this layout
// for the second factor of a product. Of a page, only the values are transposed. A query's results do not depend on the
// other queries.
#pragma once

#include <vector>

#include "calls.h"
#include "tiles.h"
#include "transpose.h"

#if defined(MOTET_TILES)

class TiledAttention {
  public:
    static constexpr int PAGES = 16;          // of a block of keys
    static constexpr int LEAST_QUERIES = 9;   // for fewer, vectors are faster
    static constexpr int QUERIES_IN_UNIT = 256;

    // `queries(i)`: where query i of `count` begins. Each position from `first_position` on has `group` queries.
    template <typename Queries>
    void begin(int64_t count, int64_t width, int64_t group, int64_t first_position, const Queries &queries,
               const AttentionOptions &options) {
        width_ = width;
        count_ = count;
        group_ = group;
        first_position_ = first_position;
        options_ = options;
        steps_ = (width + PAIR - 1) / PAIR;
        const int64_t columns = (count + LANES - 1) / LANES;
        fit(columns);
        for (int64_t column = 0; column < columns; ++column) {
            for (int64_t step = 0; step < steps_; ++step) {
                words block[LANES] = {};
                for (int64_t lane = 0; lane < LANES && column * LANES + lane < count; ++lane)
                    block[lane] = numbers(queries(column * LANES + lane), step);
                put_transposed(block, queries_[column * steps_ + step]);
            }
            largest_[column] = all(NOTHING_YET);
            totals_[column] = floats{};
        }
        memset(sums_.data(), 0, columns * 2 * steps_ * sizeof(Tile));
        tiles::set_up(2 * tiles::ROWS);
    }

    // Adds a block of up to PAGES pages; the first page begins with the token `first_token`.
    void add(const bfloat *const *keys, const bfloat *const *values, int64_t pages, int64_t first_token) {
        const int64_t columns = (count_ + LANES - 1) / LANES;
        pack_keys(keys, pages);
        pack_values(values, pages);
        for (int64_t column = 0; column < columns; column += 2) {
            const int64_t both = columns - column < 2 ? 1 : 2;
            const int64_t last = position(column + both - 1, LANES - 1), least = options_.first_key(position(column, 0));
            const int64_t seen = last < first_token ? 0 : (last - first_token) / PAGE + 1;
            const int64_t pages_seen = seen < pages ? seen : pages;
            if (!pages_seen || first_token + pages_seen * PAGE <= least) continue;
            score(column, both, pages_seen);
            for (int64_t i = 0; i < both; ++i) weigh(column + i, scores_[i], weights_[i], pages_seen, first_token);
            add_values(column, both, (pages_seen + 1) / 2);
        }
    }

    // `out(i)`: the address for the result of query i.
    template <typename Out> void finish(const Out &out) {
        for (int64_t column = 0; column * LANES < count_; ++column) {
            const floats share = 1.0f / totals_[column];
            for (int64_t step = 0; step < steps_; ++step) {
                words halves[2][LANES];
                for (int half = 0; half < 2; ++half) {
                    const Tile &tile = sums_[(column * steps_ + step) * 2 + half];
                    for (int i = 0; i < LANES; ++i) halves[half][i] = as_words(load_floats(tile.lines[i]) * share);
                    transpose(halves[half]);
                }
                const int64_t left = width_ - step * PAIR;
                for (int64_t lane = 0; lane < LANES && column * LANES + lane < count_; ++lane) {
                    const Pair value = {as_floats(halves[0][lane]), as_floats(halves[1][lane])};
                    bfloat *to = out(column * LANES + lane) + step * PAIR;
                    if (left >= PAIR)
                        store(to, value);
                    else
                        store(to, value, (int)left);
                }
            }
        }
    }

  private:
    static constexpr int PAGE = tiles::ROWS, TOKENS = PAGES * PAGE;
    static constexpr float NOTHING_YET = -1e38f;  // finite: its difference to itself is no NaN
    static constexpr float LOG_OF_E = 1.44269504f;  // to base 2
    static_assert(PAGES % 2 == 0 && LANES == 16 && PAIR == tiles::INPUTS);

    struct alignas(64) Tile {
        float lines[tiles::ROWS][LANES];
    };
    struct alignas(64) Scores {
        float of_tokens[TOKENS][LANES];
    };
    struct alignas(64) Weights {
        uint32_t of_pairs[TOKENS / 2][LANES];
    };

    void fit(int64_t columns) {
        const auto grow = [](auto &numbers, int64_t count) {
            if ((int64_t)numbers.size() < count) numbers.resize(count);
        };
        grow(queries_, columns * steps_);
        grow(sums_, columns * steps_ * 2);
        grow(largest_, columns);
        grow(totals_, columns);
        grow(values_, steps_ * PAGES);
        grow(keys_, width_ % PAIR ? steps_ * PAGES : 0);
        grow(scores_, 2);
        grow(weights_, 2);
    }

    int64_t position(int64_t column, int64_t lane) const {
        const int64_t query = column * LANES + lane;
        return first_position_ + (query < count_ ? query : count_ - 1) / group_;
    }

    // PAIR numbers of a row of `width_`; zeros beyond its end.
    words numbers(const bfloat *row, int64_t step) const {
        const int64_t left = width_ - step * PAIR;
        return (left >= PAIR ? load_raw(row + step * PAIR) : load_raw(row + step * PAIR, (int)left)).value;
    }
    static void put_transposed(words *block, Tile &into) {
        transpose(block);
        memcpy(into.lines, block, sizeof into.lines);
    }

    // Keys are copied if tiles would read beyond the end of a key.
    void pack_keys(const bfloat *const *keys, int64_t pages) {
        for (int64_t page = 0; page < pages; ++page) {
            keys_at_[page] = reinterpret_cast<const uint8_t *>(keys[page]);
            if (width_ % PAIR == 0) continue;
            float *into = keys_[page * steps_].lines[0];
            keys_at_[page] = reinterpret_cast<const uint8_t *>(into);
            for (int64_t token = 0; token < PAGE; ++token)
                for (int64_t step = 0; step < steps_; ++step, into += LANES)
                    store_floats(into, as_floats(numbers(keys[page] + token * width_, step)));
        }
    }

    // For each two pages and PAIR columns there are a tile of the even columns and a tile of the odd columns. A line is
    // one column of all tokens. The tokens of a missing page are zeros.
    void pack_values(const bfloat *const *values, int64_t pages) {
        for (int64_t page = 0; page < pages; page += 2)
            for (int64_t step = 0; step < steps_; ++step) {
                words even[LANES] = {}, odd[LANES] = {};
                const int64_t pairs = page + 1 < pages ? PAGE : PAGE / 2;
                for (int64_t pair = 0; pair < pairs; ++pair) {
                    const bfloat *row = values[page + 2 * pair / PAGE] + 2 * pair % PAGE * width_;
                    const words first = numbers(row, step), second = numbers(row + width_, step);
                    even[pair] = (first & 0xffffu) | (second << 16);
                    odd[pair] = (first >> 16) | (second & 0xffff0000u);
                }
                put_transposed(even, values_[step * PAGES + page / 2]);
                put_transposed(odd, values_[step * PAGES + PAGES / 2 + page / 2]);
            }
    }

    void score(int64_t column, int64_t both, int64_t pages) {
        const int64_t row = width_ % PAIR ? steps_ * tiles::BYTES : width_ * (int64_t)sizeof(bfloat);
        tiles::WholeTiles of{{}, row, tiles::BYTES, {}, {}};
        for (int64_t i = 0; i < both; ++i) of.w[i] = bytes(queries_[(column + i) * steps_]);
        for (int64_t page = 0; page < pages; page += 2) {
            for (int64_t p = 0; p < 2; ++p) {
                of.x[p] = page + p < pages ? keys_at_[page + p] : nullptr;
                for (int64_t i = 0; i < both; ++i) of.sums[p][i] = bytes(scores_[i].of_tokens[(page + p) * PAGE]);
            }
            tiles::multiply<false>(of, steps_);
        }
    }

    void add_values(int64_t column, int64_t both, int64_t pairs_of_pages) {
        tiles::WholeTiles of{{}, tiles::BYTES, tiles::TILE_BYTES, {}, {}};
        for (int64_t i = 0; i < both; ++i) of.w[i] = bytes(weights_[i]);
        for (int64_t step = 0; step < steps_; ++step) {
            for (int64_t half = 0; half < 2; ++half) {
                of.x[half] = bytes(values_[step * PAGES + half * PAGES / 2]);
                for (int64_t i = 0; i < both; ++i)
                    of.sums[half][i] = bytes(sums_[((column + i) * steps_ + step) * 2 + half]);
            }
            tiles::multiply<true>(of, pairs_of_pages);
        }
    }

    // Turns scores of 16 queries into weights, and rescales their sums so far to the new largest scores.
    void weigh(int64_t column, Scores &scores, Weights &weights, int64_t pages, int64_t first_token) {
        const int64_t tokens = pages * PAGE;
        const bool seen_by_all = first_token + tokens - 1 <= position(column, 0) &&
                                 first_token >= options_.first_key(position(column, LANES - 1));
        const bool as_they_are = seen_by_all && options_.softcap <= 0 && options_.scale > 0;
        if (!as_they_are) finish_scores(column, scores, tokens, first_token);
        const floats factor = all(as_they_are ? options_.scale * LOG_OF_E : 1.0f);
        floats most[4];
        for (floats &one : most) one = all(NOTHING_YET);
        for (int64_t token = 0; token < tokens; token += 4)
            for (int i = 0; i < 4; ++i) most[i] = maximum(load_floats(scores.of_tokens[token + i]), most[i]);
        const floats before = largest_[column];
        const floats now = maximum(maximum(maximum(most[0], most[1]), maximum(most[2], most[3])) * factor, before);
        if (_mm512_cmpneq_ps_mask((__m512)now, (__m512)before)) {
            const floats fading = power_of_two(before - now);
            for (int64_t tile = column * steps_ * 2; tile < (column + 1) * steps_ * 2; ++tile)
                for (auto &line : sums_[tile].lines) store_floats(line, load_floats(line) * fading);
            totals_[column] *= fading;
            largest_[column] = now;
        }
        floats added[2] = {};
        for (int64_t pair = 0; pair < tokens / 2; ++pair) {
            floats of_pair[2];
            for (int i = 0; i < 2; ++i) {
                const floats score = load_floats(scores.of_tokens[2 * pair + i]);
                of_pair[i] = power_of_two((floats)_mm512_fmsub_ps((__m512)score, (__m512)factor, (__m512)now));
                added[i] += of_pair[i];
            }
            put_pair(of_pair[0], of_pair[1], weights.of_pairs[pair]);
        }
        if (pages % 2) memset(weights.of_pairs[tokens / 2], 0, sizeof(Weights) / PAGES);
        totals_[column] += added[0] + added[1];
    }

    // Scales and caps scores, and masks tokens that a query does not attend to.
    void finish_scores(int64_t column, Scores &scores, int64_t tokens, int64_t first_token) const {
        ints newest, oldest;
        for (int lane = 0; lane < LANES; ++lane) {
            const int64_t at = position(column, lane);
            newest[lane] = (int32_t)(at - first_token);
            oldest[lane] = (int32_t)(options_.first_key(at) - first_token);
        }
        const float cap = options_.softcap, factor = options_.scale * (cap > 0 ? 1 / cap : LOG_OF_E);
        for (int64_t token = 0; token < tokens; ++token) {
            floats score = load_floats(scores.of_tokens[token]) * factor;
            if (cap > 0) score = hyperbolic_tangent(score) * (cap * LOG_OF_E);
            const ints number = (int32_t)token - ints{};
            const __mmask16 seen = _mm512_cmpge_epi32_mask((__m512i)newest, (__m512i)number) &
                                   _mm512_cmple_epi32_mask((__m512i)oldest, (__m512i)number);
            store_floats(scores.of_tokens[token],
                         (floats)_mm512_mask_mov_ps(_mm512_set1_ps(NOTHING_YET), seen, (__m512)score));
        }
    }

    // If x or y is NaN: y.
    static INLINE floats maximum(floats x, floats y) { return (floats)_mm512_max_ps((__m512)x, (__m512)y); }

    // 2^x for x <= 0, with a relative error up to 1e-4: rounding the weight to a bfloat adds a larger error. 2^0 is 1.
    // NaN stays NaN.
    static INLINE floats power_of_two(floats x) {
        const float to_integer = 12582912.0f;  // 1.5 · 2^23: adding it rounds
        const floats whole = (x + to_integer) - to_integer, rest = x - whole;
        const floats power = ((rest * 5.5007680e-2f + 2.4220922e-1f) * rest + 6.9328287e-1f) * rest + 1.0f;
        return (floats)_mm512_scalef_ps((__m512)power, (__m512)whole);
    }

    static INLINE void put_pair(floats first, floats second, uint32_t *into) {
        alignas(64) static constexpr uint16_t PLACES[2 * LANES] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        _mm512_store_si512(into, _mm512_permutexvar_epi16(_mm512_load_si512(PLACES), both));
    }

    template <typename Lines> static uint8_t *bytes(Lines &of) { return reinterpret_cast<uint8_t *>(&of); }

    int64_t width_ = 0, count_ = 0, group_ = 1, first_position_ = 0, steps_ = 0;
    AttentionOptions options_{};
    std::vector<Tile> queries_, sums_, values_, keys_;
    std::vector<floats> largest_, totals_;
    std::vector<Scores> scores_;
    std::vector<Weights> weights_;
    const uint8_t *keys_at_[PAGES] = {};
};

#endif
