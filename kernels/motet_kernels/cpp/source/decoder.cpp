// The forward pass of a Llama-shaped decoder over all rows of an iteration, in one call (PU-21, OR-05, OR-17).
//
// It is a list of stages for threads, which share one job from the embedding to the logits: a linear and the products
// x · A of the adapters that change it (PU-03); what happens to single rows after it, first of all their products with
// B; attention. Which numbers are added in which order depends on neither threads nor other rows.
#include <algorithm>
#include <optional>
#include <vector>

#include "border.h"
#include "calls.h"
#include "largest.h"
#include "linear.h"

namespace {

// The names of these structures and of their members are those of motet_kernels/cpp/decoder.py.
struct Layer {
    const void *attention_norm, *q_norm, *k_norm;  // the last two may be null
    const void *qkv, *qkv_bias;                    // a bias may be null
    const void *o, *o_bias;
    const void *mlp_norm;
    const void *gate_up, *gate_up_bias;
    const void *down, *down_bias;
    double scale;    // of the scores
    int64_t window;  // 0: all tokens before
    int64_t q_lora, k_lora, v_lora, o_lora, gate_lora, up_lora, down_lora;  // what add_lora calls these linears
};

struct Decoder {
    int64_t type;  // 0 float, 1 bfloat
    int64_t layers, width, heads, kv_heads, head_dim, feed_forward, vocabulary;
    double epsilon;  // of the norms
    int64_t embedding_is_packed;
    const void *embedding, *final_norm, *head, *head_bias;
    const Layer *of_layer;
};

struct Step {
    int64_t rows, kept, threads;
    const int64_t *tokens, *positions, *keep;  // [rows], [rows], [kept]
    const float *rotation;                     // [positions][2, half a head, in the order of Pairs] cosines and sines
    const void *attention;                     // what attention calls its batch
    const void *lora;                          // what add_lora calls its segments; null if no row has an adapter
    int64_t lora_count;
    float *lora_products;
    void *hidden, *normed, *qkv, *attended, *added, *gate_up, *active, *logits;
    int64_t *chosen;  // [kept] place of each row's largest logit, -1 where one is not finite; null: nobody asks
    double *seconds;  // of each kind of stage; may be null
};

enum Kind { LINEARS, ROWS, ATTENTION, HEAD, CHOICE };

INLINE int64_t padded(int64_t count) { return panels_of(count) * PAIR; }

// -- what happens to one row ------------------------------------------------------------------------------------------

// Calls with(place, count) for each Pair of a row; the last one may have fewer numbers.
template <typename F> INLINE void by_pairs(int64_t count, const F &with) {
    int64_t i = 0;
    for (; i + PAIR <= count; i += PAIR)
        with(i, [](auto *at) { return load(at); }, [](auto *at, Pair value) { store(at, value); });
    if (i < count) {
        int rest = (int)(count - i);
        with(i, [=](auto *at) { return load_some(at, rest); }, [=](auto *at, Pair value) { store_some(at, value, rest); });
    }
}

// into = h / rms(h) · weight
template <typename T> INLINE void norm(const T *h, const T *weight, int64_t width, double epsilon, T *into) {
    floats squares[2] = {};
    by_pairs(width, [&](int64_t i, auto load, auto) {
        Pair x = load(h + i);
        squares[0] += x.a * x.a;
        squares[1] += x.b * x.b;
    });
    float scale = 1.0f / __builtin_sqrtf(sum(squares[0] + squares[1]) / (float)width + (float)epsilon);
    by_pairs(width, [&](int64_t i, auto load, auto store) {
        Pair x = load(h + i), w = load(weight + i);
        store(into + i, Pair{x.a * scale * w.a, x.b * scale * w.b});
    });
}

template <typename T> INLINE void add(T *h, const T *more, int64_t width) {
    by_pairs(width, [&](int64_t i, auto load, auto store) {
        Pair x = load(h + i), y = load(more + i);
        store(h + i, Pair{x.a + y.a, x.b + y.b});
    });
}

// Turns each number of the first half of a head with its partner in the second.
template <typename T> INLINE void rotate(T *head, int64_t half, const float *cosines, const float *sines) {
    by_pairs(half, [&](int64_t i, auto load_row, auto store_row) {
        Pair x = load_row(head + i), y = load_row(head + half + i), c = load(cosines + i), s = load(sines + i);
        store_row(head + i, Pair{x.a * c.a - y.a * s.a, x.b * c.b - y.b * s.b});
        store_row(head + half + i, Pair{y.a * c.a + x.a * s.a, y.b * c.b + x.b * s.b});
    });
}

INLINE floats silu(floats x) {
    floats decay = exponential(as_floats(as_words(x) | 0x80000000u));  // of -|x|
    return x * choose(x < 0.0f, decay, all(1.0f)) / (decay + 1.0f);
}

template <typename T> INLINE void silu_times(const T *gate, const T *up, int64_t width, T *into) {
    by_pairs(width, [&](int64_t i, auto load, auto store) {
        Pair g = load(gate + i), u = load(up + i);
        store(into + i, Pair{silu(g.a) * u.a, silu(g.b) * u.b});
    });
}

// -- stages -----------------------------------------------------------------------------------------------------------

constexpr int64_t ROWS_OF_A_BLOCK = 4;
constexpr int64_t LEAST_COLUMNS = 256;  // of a unit
constexpr int64_t PARTS_OF_A_THREAD = 4;

// Neighbouring rows with one adapter, or without.
struct Block {
    int64_t row, rows, piece;  // the last one: of LoraRows, or -1
};

template <typename T> class Pass {
  public:
    Pass(const Decoder &decoder, const Step &step)
        : decoder_(decoder), step_(step), stages_(step.threads, step.seconds), attention_(decoder.type, step.attention),
          q_width_(padded(decoder.heads * decoder.head_dim)), kv_width_(padded(decoder.kv_heads * decoder.head_dim)),
          qkv_width_(q_width_ + 2 * kv_width_), mlp_width_(padded(decoder.feed_forward)) {
        if (step.lora) lora_.emplace(decoder.type, step.lora, step.lora_count, step.lora_products);
        cut_rows();
    }

    void run() {
        const Decoder &d = decoder_;
        const Step &s = step_;
        const int64_t attended = d.heads * d.head_dim, keys = d.kv_heads * d.head_dim;
        embed();
        for (int64_t layer = 0; layer < d.layers; ++layer) {
            const Layer &l = d.of_layer[layer];
            LoraGroup group;
            adapted(group, l.q_lora, s.normed, d.width, s.qkv, 0, qkv_width_, attended);
            adapted(group, l.k_lora, s.normed, d.width, s.qkv, q_width_, qkv_width_, keys);
            adapted(group, l.v_lora, s.normed, d.width, s.qkv, q_width_ + kv_width_, qkv_width_, keys);
            linear(s.normed, d.width, l.qkv, l.qkv_bias, s.qkv, qkv_width_, group);
            rotate(layer, group);
            attend(layer);

            group = {};
            adapted(group, l.o_lora, s.attended, attended, s.added, 0, d.width, d.width);
            linear(s.attended, attended, l.o, l.o_bias, s.added, d.width, group);
            add_and_norm(l.mlp_norm, group);

            group = {};
            adapted(group, l.gate_lora, s.normed, d.width, s.gate_up, 0, 2 * mlp_width_, d.feed_forward);
            adapted(group, l.up_lora, s.normed, d.width, s.gate_up, mlp_width_, 2 * mlp_width_, d.feed_forward);
            linear(s.normed, d.width, l.gate_up, l.gate_up_bias, s.gate_up, 2 * mlp_width_, group);
            activate(group);

            group = {};
            adapted(group, l.down_lora, s.active, d.feed_forward, s.added, 0, d.width, d.width);
            linear(s.active, d.feed_forward, l.down, l.down_bias, s.added, d.width, group);
            const bool last = layer + 1 == d.layers;
            add_and_norm(last ? nullptr : d.of_layer[layer + 1].attention_norm, group);
        }
        logits();
        stages_.run();
    }

  private:
    template <typename P> static T *at(P *data) { return static_cast<T *>(const_cast<void *>(data)); }

    void cut_rows() {
        int64_t row = 0;
        auto cut = [&](int64_t end, int64_t piece) {
            for (; row < end; row += ROWS_OF_A_BLOCK)
                blocks_.push_back({row, std::min(ROWS_OF_A_BLOCK, end - row), piece});
            row = end;
        };
        for (int64_t piece = 0; lora_ && piece < lora_->pieces(); ++piece) {
            cut(lora_->first_row(piece), -1);
            cut(lora_->first_row(piece) + lora_->rows(piece), piece);
        }
        cut(step_.rows, -1);
    }

    // Adapters change the columns of y from `first`.
    void adapted(LoraGroup &group, int64_t linear, const void *x, int64_t inputs, void *y, int64_t first,
                 int64_t y_stride, int64_t outputs) {
        if (lora_ && linear >= 0)
            group.linears[group.count++] = {linear, inputs, outputs, x, inputs, at(y) + first, y_stride};
    }

    // Of all rows. Rows of x and of y lie together.
    void linear(const void *x, int64_t inputs, const void *packed, const void *bias, void *y, int64_t outputs,
                const LoraGroup &group) {
        LinearCall<T> call{{at(x), inputs}, step_.rows, inputs, outputs, at(packed), at(bias), {at(y), outputs}};
        if (group.count && call.blocks() > 1) {
            call.later = &later_;
            call.first_later = (int64_t)later_.size();
            lora_->list(group, stages_.threads(), call.most_of_later(), later_);
            call.end_later = (int64_t)later_.size();
        }
        call.add_to(stages_);
        if (group.count) lora_->add_shrinks(stages_, group);
        stages_.end_stage(LINEARS);
        if (group.count && expands_apart()) {
            lora_->add_expands(stages_, group);
            stages_.end_stage(ROWS);
        }
    }

    // With so few rows, threads share out the columns.
    bool expands_apart() const { return (int64_t)blocks_.size() < stages_.threads(); }

    void expand(const LoraGroup &group, const Block &block, int64_t from, int64_t to) const {
        if (block.piece < 0 || expands_apart()) return;
        for (int i = 0; i < group.count; ++i)
            lora_->expand(group, i, block.piece, block.row - lora_->first_row(block.piece), block.rows, from,
                          std::min(to, group.linears[i].outputs));
    }

    // Adds B of the adapters, and then does something with each row.
    template <typename F> void by_rows(const LoraGroup &group, F each) {
        stages_.add((int64_t)blocks_.size(), [=](int64_t unit) {
            const Block &block = blocks_[unit];
            expand(group, block, 0, INT64_MAX);
            for (int64_t row = block.row; row < block.row + block.rows; ++row) each(row);
        });
        stages_.end_stage(ROWS);
    }

    // Rotates queries and keys, and puts keys and values into their pages.
    void rotate(int64_t layer, const LoraGroup &group) {
        by_rows(group, [=](int64_t r) {
            const Decoder &d = decoder_;
            const Layer &l = d.of_layer[layer];
            const int64_t dim = d.head_dim, turn = padded(dim / 2);
            T *row = at(step_.qkv) + r * qkv_width_, *keys = row + q_width_;
            const float *cosines = step_.rotation + step_.positions[r] * 2 * turn;
            auto turned = [&](T *head, int64_t count, const T *weight) {
                for (; count; --count, head += dim) {
                    if (weight) norm(head, weight, dim, d.epsilon, head);
                    ::rotate(head, dim / 2, cosines, cosines + turn);
                }
            };
            turned(row, d.heads, at(l.q_norm));
            turned(keys, d.kv_heads, at(l.k_norm));
            attention_.write(layer, r, keys, dim, keys + kv_width_, dim);
        });
    }

    void attend(int64_t layer) {
        const Layer &l = decoder_.of_layer[layer];
        attention_.add_to(stages_, layer, decoder_.heads, step_.qkv, {decoder_.head_dim, qkv_width_}, step_.attended,
                          {(float)l.scale, l.window, 0.0f});
        stages_.end_stage(ATTENTION);
    }

    void embed() {
        const T *norm_weight = at(decoder_.of_layer[0].attention_norm);
        by_rows({}, [=](int64_t r) {
            const T *embedding = at(decoder_.embedding);
            const int64_t width = decoder_.width, token = step_.tokens[r];
            T *hidden = at(step_.hidden) + r * width;
            if (decoder_.embedding_is_packed)
                unpack(embedding, width, token, hidden);
            else
                memcpy(hidden, embedding + token * width, width * sizeof(T));
            norm(hidden, norm_weight, width, decoder_.epsilon, at(step_.normed) + r * width);
        });
    }

    // No weight: nothing is normed yet.
    void add_and_norm(const void *weight, const LoraGroup &group) {
        by_rows(group, [=](int64_t r) {
            const int64_t width = decoder_.width;
            T *hidden = at(step_.hidden) + r * width;
            ::add(hidden, at(step_.added) + r * width, width);
            if (weight) norm(hidden, at(weight), width, decoder_.epsilon, at(step_.normed) + r * width);
        });
    }

    void activate(const LoraGroup &group) {
        const int64_t width = decoder_.feed_forward, units = (int64_t)blocks_.size();
        // As few parts as threads need: the rows of B are read in pieces of so many columns.
        const int64_t wanted = (PARTS_OF_A_THREAD * stages_.threads() + units - 1) / std::max<int64_t>(units, 1);
        const int64_t most = std::max<int64_t>(width / LEAST_COLUMNS, 1);
        const int64_t columns = padded((width + std::min(wanted, most) - 1) / std::min(wanted, most));
        const int64_t parts = (width + columns - 1) / columns;
        stages_.add(units * parts, [=](int64_t unit) {
            const Block &block = blocks_[unit / parts];
            const int64_t from = unit % parts * columns, to = std::min(from + columns, width);
            expand(group, block, from, to);
            for (int64_t row = block.row; row < block.row + block.rows; ++row) {
                const T *gate = at(step_.gate_up) + row * 2 * mlp_width_ + from;
                silu_times(gate, gate + mlp_width_, to - from, at(step_.active) + row * width + from);
            }
        });
        stages_.end_stage(ROWS);
    }

    // Of the kept rows. They are normed into the first rows of `normed`, which nobody needs any more.
    void logits() {
        const Decoder &d = decoder_;
        const int64_t width = d.width;
        T *normed = at(step_.normed);
        stages_.add(step_.kept, [=](int64_t r) {
            norm(at(step_.hidden) + step_.keep[r] * width, at(decoder_.final_norm), width, decoder_.epsilon,
                 normed + r * width);
        });
        stages_.end_stage(ROWS);
        LinearCall<T>{{normed, width}, step_.kept, width, d.vocabulary, at(d.head), at(d.head_bias),
                      {at(step_.logits), d.vocabulary}}.add_to(stages_);
        stages_.end_stage(HEAD);
        if (!step_.chosen) return;
        stages_.add(step_.kept, [=](int64_t r) {
            step_.chosen[r] = place_of_largest(at(step_.logits) + r * decoder_.vocabulary, decoder_.vocabulary);
        });
        stages_.end_stage(CHOICE);
    }

    const Decoder &decoder_;
    const Step &step_;
    Stages stages_;
    AttentionRows attention_;
    std::optional<LoraRows> lora_;
    std::vector<Block> blocks_;
    std::vector<Later> later_;  // of all linears
    const int64_t q_width_, kv_width_, qkv_width_, mlp_width_;
};

}  // namespace

extern "C" {

// 0 if a token is not one of the vocabulary: then nothing is computed.
int64_t motet_decoder_pass(const Decoder *decoder, const Step *step) {
    return answer_of([&] {
        for (int64_t row = 0; row < step->rows; ++row)
            if (step->tokens[row] < 0 || step->tokens[row] >= decoder->vocabulary) return 0;
        if (decoder->type == 0)
            Pass<float>(*decoder, *step).run();
        else
            Pass<bfloat>(*decoder, *step).run();
        return 1;
    });
}

// What a pass chooses, of any rows that lie together.
void motet_largest(int64_t type, const void *logits, int64_t rows, int64_t vocabulary, int64_t *chosen) {
    for (int64_t row = 0; row < rows; ++row)
        chosen[row] = type == 0 ? place_of_largest((const float *)logits + row * vocabulary, vocabulary)
                                : place_of_largest((const bfloat *)logits + row * vocabulary, vocabulary);
}

// Where load() finds each of the 2 · LANES numbers that it puts into a Pair, the first half's before the second's.
void motet_pair_places(int64_t type, int64_t *places) {
    for (int64_t half = 0; half < 2; ++half)
        for (int64_t lane = 0; lane < LANES; ++lane)
            *places++ = type == 0 ? place_in_pair<float>(half, lane) : place_in_pair<bfloat>(half, lane);
}
}
