// The forward pass of a Llama-shaped decoder over all rows of an iteration, in one call (PU-21, OR-05, OR-17).
//
// It is a list of stages. Every thread does its part of a stage, then all wait for each other. Stages share a parallel
// region until attention or LoRA comes, which have their own.
#include <functional>
#include <vector>

#include "calls.h"
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
};

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

class Stages {
  public:
    explicit Stages(int64_t threads) : threads_((int)threads) {}

    void add(std::function<void(Share)> stage) { pending_.push_back(std::move(stage)); }

    // For each of `count` rows.
    template <typename F> void add_rows(int64_t count, F each) {
        add([=](Share share) {
            for (int64_t row = count * share.thread / share.threads; row < count * (share.thread + 1) / share.threads;
                 ++row)
                each(row);
        });
    }

    void finish() {
        if (pending_.empty()) return;
        in_parallel(threads_, [this](Share share) {
            for (const auto &stage : pending_) {
                stage(share);
                share.barrier();
            }
        });
        pending_.clear();
    }

  private:
    int threads_;
    std::vector<std::function<void(Share)>> pending_;
};

template <typename T> class Pass {
  public:
    Pass(const Decoder &decoder, const Step &step)
        : decoder_(decoder), step_(step), stages_(step.threads), q_width_(padded(decoder.heads * decoder.head_dim)),
          kv_width_(padded(decoder.kv_heads * decoder.head_dim)), qkv_width_(q_width_ + 2 * kv_width_),
          mlp_width_(padded(decoder.feed_forward)) {}

    void run() {
        const Decoder &d = decoder_;
        const Step &s = step_;
        const int64_t attended = d.heads * d.head_dim, keys = d.kv_heads * d.head_dim;
        embed();
        for (int64_t layer = 0; layer < d.layers; ++layer) {
            const Layer &l = d.of_layer[layer];
            add_and_norm(layer > 0, l.attention_norm);
            linear(s.normed, d.width, l.qkv, l.qkv_bias, s.qkv, qkv_width_);
            lora(l.q_lora, s.normed, d.width, s.qkv, 0, qkv_width_, attended);
            lora(l.k_lora, s.normed, d.width, s.qkv, q_width_, qkv_width_, keys);
            lora(l.v_lora, s.normed, d.width, s.qkv, q_width_ + kv_width_, qkv_width_, keys);
            rotate(l);
            attend(layer, l);
            linear(s.attended, attended, l.o, l.o_bias, s.added, d.width);
            lora(l.o_lora, s.attended, attended, s.added, 0, d.width, d.width);
            add_and_norm(true, l.mlp_norm);
            linear(s.normed, d.width, l.gate_up, l.gate_up_bias, s.gate_up, 2 * mlp_width_);
            lora(l.gate_lora, s.normed, d.width, s.gate_up, 0, 2 * mlp_width_, d.feed_forward);
            lora(l.up_lora, s.normed, d.width, s.gate_up, mlp_width_, 2 * mlp_width_, d.feed_forward);
            activate();
            linear(s.active, d.feed_forward, l.down, l.down_bias, s.added, d.width);
            lora(l.down_lora, s.active, d.feed_forward, s.added, 0, d.width, d.width);
        }
        logits();
        stages_.finish();
    }

  private:
    template <typename P> static T *at(P *data) { return static_cast<T *>(const_cast<void *>(data)); }

    // Of all rows. Rows of x and of y lie together.
    void linear(const void *x, int64_t inputs, const void *packed, const void *bias, void *y, int64_t outputs) {
        LinearCall<T> call{{at(x), inputs}, step_.rows, inputs, outputs, at(packed), at(bias), {at(y), outputs}};
        stages_.add([=](Share share) { call.run(share); });
    }

    // Adds to the columns of y from `first`.
    void lora(int64_t linear, const void *x, int64_t inputs, void *y, int64_t first, int64_t y_stride,
              int64_t outputs) {
        if (!step_.lora || linear < 0) return;
        stages_.finish();
        motet_add_lora(decoder_.type, step_.lora, step_.lora_count, step_.lora_products, step_.threads, linear, inputs,
                       outputs, x, inputs, at(y) + first, y_stride);
    }

    void attend(int64_t layer, const Layer &l) {
        stages_.finish();
        const T *q = at(step_.qkv), *k = q + q_width_, *v = k + kv_width_;
        const int64_t head = decoder_.head_dim, row = qkv_width_;
        motet_attention(decoder_.type, step_.attention, layer, decoder_.heads, q, k, v, head, row, head, row, head, row,
                        step_.attended, (float)l.scale, l.window, 0.0f);
    }

    void embed() {
        const T *embedding = at(decoder_.embedding);
        int64_t width = decoder_.width;
        T *hidden = at(step_.hidden);
        const int64_t *tokens = step_.tokens;
        if (decoder_.embedding_is_packed)
            stages_.add_rows(step_.rows, [=](int64_t r) { unpack(embedding, width, tokens[r], hidden + r * width); });
        else
            stages_.add_rows(step_.rows, [=](int64_t r) {
                memcpy(hidden + r * width, embedding + tokens[r] * width, width * sizeof(T));
            });
    }

    void add_and_norm(bool adds, const void *weight) {
        T *hidden = at(step_.hidden), *added = at(step_.added), *normed = at(step_.normed);
        int64_t width = decoder_.width;
        double epsilon = decoder_.epsilon;
        const T *w = at(weight);
        stages_.add_rows(step_.rows, [=](int64_t r) {
            if (adds) ::add(hidden + r * width, added + r * width, width);
            norm(hidden + r * width, w, width, epsilon, normed + r * width);
        });
    }

    void rotate(const Layer &l) {
        const Decoder &d = decoder_;
        const Step &s = step_;
        const T *q_norm = at(l.q_norm), *k_norm = at(l.k_norm);
        const int64_t dim = d.head_dim, turn = padded(dim / 2), k_first = q_width_, stride = qkv_width_;
        stages_.add_rows(s.rows, [=, &d, &s](int64_t r) {
            T *row = at(s.qkv) + r * stride;
            const float *cosines = s.rotation + s.positions[r] * 2 * turn;
            auto turned = [&](T *head, int64_t count, const T *weight) {
                for (; count; --count, head += dim) {
                    if (weight) norm(head, weight, dim, d.epsilon, head);
                    ::rotate(head, dim / 2, cosines, cosines + turn);
                }
            };
            turned(row, d.heads, q_norm);
            turned(row + k_first, d.kv_heads, k_norm);
        });
    }

    void activate() {
        const T *gate = at(step_.gate_up);
        T *active = at(step_.active);
        int64_t width = decoder_.feed_forward, padded_width = mlp_width_;
        stages_.add_rows(step_.rows, [=](int64_t r) {
            const T *of_row = gate + r * 2 * padded_width;
            silu_times(of_row, of_row + padded_width, width, active + r * width);
        });
    }

    // Of the kept rows. They are normed into the first rows of `normed`, which nobody needs any more.
    void logits() {
        const Decoder &d = decoder_;
        T *hidden = at(step_.hidden), *added = at(step_.added), *normed = at(step_.normed);
        const T *weight = at(d.final_norm);
        const int64_t *keep = step_.keep;
        int64_t width = d.width;
        double epsilon = d.epsilon;
        stages_.add_rows(step_.kept, [=](int64_t r) {
            T *row = hidden + keep[r] * width;
            ::add(row, added + keep[r] * width, width);
            norm(row, weight, width, epsilon, normed + r * width);
        });
        LinearCall<T> call{{normed, width}, step_.kept, width, d.vocabulary, at(d.head), at(d.head_bias),
                           {at(step_.logits), d.vocabulary}};
        stages_.add([=](Share share) { call.run(share); });
    }

    const Decoder &decoder_;
    const Step &step_;
    Stages stages_;
    const int64_t q_width_, kv_width_, qkv_width_, mlp_width_;
};

}  // namespace

extern "C" {

// False if a token is not one of the vocabulary: then nothing is computed.
bool motet_decoder_pass(const Decoder *decoder, const Step *step) {
    for (int64_t row = 0; row < step->rows; ++row)
        if (step->tokens[row] < 0 || step->tokens[row] >= decoder->vocabulary) return false;
    if (decoder->type == 0)
        Pass<float>(*decoder, *step).run();
    else
        Pass<bfloat>(*decoder, *step).run();
    return true;
}

// Where load() finds each of the 2 · LANES numbers that it puts into a Pair, the first half's before the second's.
void motet_pair_places(int64_t type, int64_t *places) {
    for (int64_t half = 0; half < 2; ++half)
        for (int64_t lane = 0; lane < LANES; ++lane)
            *places++ = type == 0 ? place_in_pair<float>(half, lane) : place_in_pair<bfloat>(half, lane);
}
}
