// Calls of decoder.cpp, which are checked first.
#define motet_decoder_pass unchecked_decoder_pass
#define motet_largest unchecked_largest
#include "decoder.cpp"
#undef motet_decoder_pass
#undef motet_largest

#include "packed.h"
#include "passes.h"

namespace {

struct DecoderPass {
    static constexpr const char *NAME = "decoder_pass";
    const Decoder *decoder;
    const Step *step;

    void walk(Walk &walk) {
        walk_pass(walk, decoder, step);
        Decoder &d = const_cast<Decoder &>(*decoder);
        Step &s = const_cast<Step &>(*step);
        walk.expect(s.kept <= s.rows, "the kept rows are rows of the step");
        walk.expect(d.layers > 0 && d.width > 0 && d.head_dim > 0 && d.feed_forward > 0 && d.vocabulary > 0 &&
                        d.kv_heads > 0 && d.heads > 0 && d.heads % d.kv_heads == 0, "the shape of a decoder");
        const int64_t attended = d.heads * d.head_dim, keys = d.kv_heads * d.head_dim, mlp = padded(d.feed_forward);
        const int64_t qkv = padded(attended) + 2 * padded(keys);
        const auto numbers = [&](auto &at, int64_t count, const char *what) {
            if (at) walk.all(at, count * size_of_type(d.type), Use::READ, what, d.type);
        };
        const auto linear = [&](auto &packed, auto &bias, int64_t inputs, int64_t outputs, const char *what) {
            walk.expect(packed, what);
            walk.all(packed, packed_bytes(d.type, outputs, inputs), Use::READ, what, d.type);
            numbers(bias, outputs, what);
        };
        walk.all(d.of_layer, d.layers * (int64_t)sizeof(Layer), Use::READ, "layers");
        List<Adapted> adapted;
        int64_t window = d.of_layer->window;
        for (Layer *l = const_cast<Layer *>(d.of_layer), *end = l + d.layers; l < end; ++l) {
            walk.expect(l->attention_norm && l->mlp_norm && l->window >= 0, "the norms and the window of a layer");
            numbers(l->attention_norm, d.width, "the norm before attention");
            numbers(l->mlp_norm, d.width, "the norm after attention");
            numbers(l->q_norm, d.head_dim, "the norm of queries");
            numbers(l->k_norm, d.head_dim, "the norm of keys");
            linear(l->qkv, l->qkv_bias, d.width, qkv, "q, k and v");
            linear(l->o, l->o_bias, attended, d.width, "o");
            linear(l->gate_up, l->gate_up_bias, d.width, 2 * mlp, "gate and up");
            linear(l->down, l->down_bias, d.feed_forward, d.width, "down");
            window = window && l->window ? std::max(window, l->window) : 0;
            for (const Adapted &one : std::initializer_list<Adapted>{{l->q_lora, d.width, attended},
                                                                     {l->k_lora, d.width, keys},
                                                                     {l->v_lora, d.width, keys},
                                                                     {l->o_lora, attended, d.width},
                                                                     {l->gate_lora, d.width, d.feed_forward},
                                                                     {l->up_lora, d.width, d.feed_forward},
                                                                     {l->down_lora, d.feed_forward, d.width}})
                if (one.index >= 0) adapted.push_back(one);
        }
        numbers(d.final_norm, d.width, "the last norm");
        linear(d.head, d.head_bias, d.width, d.vocabulary, "the head");
        if (d.embedding_is_packed)
            walk.all(d.embedding, packed_bytes(d.type, d.vocabulary, d.width), Use::READ, "the embedding", d.type);
        else
            numbers(d.embedding, d.vocabulary * d.width, "the embedding");

        const auto integers = [&](auto &at, int64_t count, const char *what) {
            walk.all(at, count * (int64_t)sizeof *at, Use::READ, what, INT64);
        };
        integers(s.tokens, s.rows, "tokens");
        integers(s.positions, s.rows, "positions");
        int64_t turns = 0;
        for (int64_t row = 0; row < s.rows; ++row) {
            walk.expect(s.positions[row] >= 0, "a position");
            turns = std::max(turns, s.positions[row] + 1);
        }
        walk.all(s.rotation, turns * 2 * padded(d.head_dim / 2) * (int64_t)sizeof(float), Use::READ, "the rotation",
                 FLOATS);
        const KeyShape shape = walk_batch(walk, d.type, s.attention, s.rows, d.layers, window);
        walk.expect(shape.heads == d.kv_heads && shape.width == d.head_dim, "the pages have the shape of keys");
        walk_adapters(walk, d.type, s, adapted);
        const auto buffer = [&](auto &at, int64_t rows, int64_t width, const char *what) {
            walk.all(at, rows * width * size_of_type(d.type), Use::WRITTEN, what, d.type);
        };
        buffer(s.hidden, s.rows, d.width, "hidden");
        buffer(s.normed, s.rows, d.width, "normed");
        buffer(s.qkv, s.rows, qkv, "room for q, k and v");
        buffer(s.attended, s.rows, attended, "attended");
        buffer(s.added, s.rows, d.width, "added");
        buffer(s.gate_up, s.rows, 2 * mlp, "room for gate and up");
        buffer(s.active, s.rows, d.feed_forward, "active");
        buffer(s.logits, s.kept, d.vocabulary, "logits");
        if (s.chosen) walk.all(s.chosen, s.kept * (int64_t)sizeof *s.chosen, Use::WRITTEN, "chosen", INT64);
        if (s.seconds) walk.clock(s.seconds, CHOICE + 1);
    }
    int64_t run() const { return unchecked_decoder_pass(decoder, step); }
};

struct Largest {
    static constexpr const char *NAME = "largest";
    int64_t type;
    const void *logits;
    int64_t rows, vocabulary;
    int64_t *chosen;

    void walk(Walk &walk) {
        walk.expect((type == 0 || type == 1) && rows >= 0 && vocabulary > 0, "the type and the shape of logits");
        walk.all(logits, rows * vocabulary * size_of_type(type), Use::READ, "logits", type);
        walk.all(chosen, rows * (int64_t)sizeof *chosen, Use::WRITTEN, "chosen", INT64);
    }
    void run() const { unchecked_largest(type, logits, rows, vocabulary, chosen); }
};

const bool known = is_known<DecoderPass>() && is_known<Largest>();

}  // namespace

extern "C" {
int64_t motet_decoder_pass(const Decoder *decoder, const Step *step) { return checked(DecoderPass{decoder, step}); }
void motet_largest(int64_t type, const void *logits, int64_t rows, int64_t vocabulary, int64_t *chosen) {
    checked(Largest{type, logits, rows, vocabulary, chosen});
}
}
