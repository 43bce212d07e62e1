// The forward pass of any decoder over all rows of an iteration, in one call (PU-21, OR-05, OR-17): a list of steps that
// was recorded from the model's own modules.
//
// Between linears and attention, a decoder computes each row by itself. So all instructions between two stages of
// linears or attention are one stage: a thread carries out all of them for a few rows, and numbers that no other stage
// reads stay in the thread's cache.
#include <algorithm>
#include <optional>
#include <vector>

#include "border.h"
#include "calls.h"
#include "instructions.h"
#include "largest.h"
#include "linear.h"
#include "together.h"

namespace {

void carry_out(const Instruction &what, const Row &row, const AttentionRows &attention) {
    switch (what.operation) {
    case COPY: return compute(what, row, [](floats a, floats) { return a; });
    case ADD: return compute(what, row, [](floats a, floats b) { return a + b; });
    case SUBTRACT: return compute(what, row, [](floats a, floats b) { return a - b; });
    case MULTIPLY: return compute(what, row, [](floats a, floats b) { return a * b; });
    case DIVIDE: return compute(what, row, [](floats a, floats b) { return a / b; });
    case NEGATIVE: return compute(what, row, [](floats a, floats) { return -a; });
    case CUBE: return compute(what, row, [](floats a, floats) { return a * a * a; });
    case RSQRT: return compute(what, row, [](floats a, floats) { return each(a, inverse_root); });
    case SQRT: return compute(what, row, [](floats a, floats) { return each(a, square_root); });
    case EXP: return compute(what, row, [](floats a, floats) { return each(a, power_of_e); });
    case TANH: return compute(what, row, [](floats a, floats) { return hyperbolic_tangent(a); });
    case SIGMOID: return compute(what, row, [](floats a, floats) { return logistic(a); });
    case SILU: return compute(what, row, [](floats a, floats) { return a * logistic(a); });
    case GELU: return compute(what, row, [](floats a, floats) {
        return a * 0.5f * (error_function(a * 0.707106781f) + 1.0f);
    });
    case GELU_TANH: return compute(what, row, [](floats a, floats) { return gelu_tanh(a); });
    case RELU: return compute(what, row, [](floats a, floats) { return choose(a < 0.0f, floats{}, a); });
    case COS: return compute(what, row, [](floats a, floats) { return each(a, cosine); });
    case SIN: return compute(what, row, [](floats a, floats) { return each(a, sine); });
    case MEAN:
    case SUM: return reduce(what, row);
    case LAYER_NORM:
    case RMS_NORM: return norm(what, row);
    case LOOK_UP:
    case UNPACK: return look_up(what, row);
    case KEEP: return compute(what, row, row.call.keep[row.number], [](floats a, floats) { return a; });
    case WRITE:
        return attention.write(what.number, row.number, row.at(what.in[0]), what.in[0].strides[1], row.at(what.in[1]),
                               what.in[1].strides[1]);
    case ROTATE:
    case NORM_AND_ROTATE:
    case WRITE_ROTATED:
    case WRITE_NORMED_ROTATED:
        return what.in[0].type == FLOAT ? turn<float>(what, row, attention) : turn<bfloat>(what, row, attention);
    case MODULES_NORM:
    case SUM_AND_NORM:
    case SILU_TIMES: return what.out.type == FLOAT ? together<float>(what, row) : together<bfloat>(what, row);
    }
}

// -- stages -------------------------------------------------------------------------------------------------------------

constexpr int64_t ROWS_OF_A_BLOCK = 4;

// Neighbouring rows that all have the same adapter, or all have none.
struct Block {
    int64_t row, rows, piece;  // piece: LoraRows' number, or -1
};

char *scratch_of_thread(int64_t bytes) {
    static thread_local std::vector<char> memory;
    if ((int64_t)memory.size() < bytes + 64) memory.resize(bytes + 64);
    return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
}

template <typename T> class Pass {
  public:
    Pass(const Program &program, const Call &call)
        : program_(program), call_(call), stages_(call.threads, call.seconds), attention_(program.type, call.attention) {
        if (call.lora) lora_.emplace(program.type, call.lora, call.lora_count, call.lora_products);
        cut_rows();
    }

    // False if a look-up was out of range.
    bool run() {
        LoraGroup group;
        for (int64_t number = 0; number < program_.stages; ++number) {
            const Stage &stage = program_.of_stage[number];
            if (stage.kind == LINEARS) {
                group = linears(stage);
            } else if (stage.kind == ATTENTION) {
                attend(stage);
            } else if (stage.kept) {
                stages_.add(call_.kept, [this, &stage](int64_t row) { carry_out_all(stage, row, 1); });
                stages_.end_stage(ROWS);
            } else {
                rows(stage, group);
                group = {};
            }
        }
        if (call_.chosen) choose();
        stages_.run();
        return !missing_;
    }

  private:
    void cut_rows() {
        const int64_t most = call_.rows <= ROWS_OF_A_BLOCK * call_.threads ? 1 : ROWS_OF_A_BLOCK;
        int64_t row = 0;
        auto cut = [&](int64_t end, int64_t piece) {
            for (; row < end; row += most) blocks_.push_back({row, std::min(most, end - row), piece});
            row = end;
        };
        for (int64_t piece = 0; lora_ && piece < lora_->pieces(); ++piece) {
            cut(lora_->first_row(piece), -1);
            cut(lora_->first_row(piece) + lora_->rows(piece), piece);
        }
        cut(call_.rows, -1);
    }

    template <typename U> Matrix<U> matrix(int64_t buffer, int64_t offset = 0) const {
        const Buffer &there = program_.buffers[buffer];
        return {static_cast<T *>(there.data) + offset, there.row / (int64_t)sizeof(T)};
    }

    // True if there are fewer blocks of rows than threads: then threads share the columns.
    bool expands_apart() const { return (int64_t)blocks_.size() < stages_.threads(); }

    // Adds linears to the stages → those that adapters change.
    LoraGroup linears(const Stage &stage) {
        LoraGroup group;
        std::vector<LinearCall<T>> calls;
        for (int64_t i = stage.first; i < stage.first + stage.count; ++i) {
            const LinearStep &l = program_.linears[i];
            Matrix<const T> x = matrix<const T>(l.x, l.x_offset);
            Matrix<T> y = matrix<T>(l.y);
            calls.push_back({x, stage.kept ? call_.kept : call_.rows, l.inputs, l.outputs,
                             static_cast<const T *>(l.packed), static_cast<const T *>(l.bias), y});
            if (lora_ && l.lora >= 0)
                group.linears[group.count++] = {l.lora, l.inputs, l.outputs, x.data, x.stride, y.data, y.stride};
        }
        int64_t panels = 0;
        for (const LinearCall<T> &call : calls) panels += panels_of(call.outputs);
        for (LinearCall<T> &call : calls) call.panels_beside = panels - panels_of(call.outputs);
        if (group.count) prefetch(group, calls);
        for (const LinearCall<T> &call : calls) call.add_to(stages_);
        if (group.count) lora_->add_shrinks(stages_, group);
        stages_.end_stage(LINEARS);
        if (group.count && expands_apart()) {
            lora_->add_expands(stages_, group);
            stages_.end_stage(ROWS);
        }
        return group;
    }

    // While the linears multiply, they prefetch the adapters' matrices: each linear prefetches a share.
    void prefetch(const LoraGroup &group, std::vector<LinearCall<T>> &calls) {
        if (!program_.prefetches || calls[0].blocks() < 2) return;
        const int64_t first = (int64_t)later_.size();
        lora_->list(group, stages_.threads(), calls[0].most_of_later(), later_);
        int64_t outputs = 0, before = 0;
        for (const LinearCall<T> &call : calls) outputs += call.outputs;
        for (LinearCall<T> &call : calls) {
            const int64_t count = (int64_t)later_.size() - first;
            call.later = &later_;
            call.first_later = first + count * before / outputs;
            before += call.outputs;
            call.end_later = first + count * before / outputs;
        }
    }

    // Each unit first adds its rows' products with B, if the threads do not share the columns.
    void rows(const Stage &stage, const LoraGroup &group) {
        const bool expands = group.count && !expands_apart();
        stages_.add((int64_t)blocks_.size(), [this, &stage, group, expands](int64_t unit) {
            const Block &block = blocks_[unit];
            for (int i = 0; expands && block.piece >= 0 && i < group.count; ++i)
                lora_->expand(group, i, block.piece, block.row - lora_->first_row(block.piece), block.rows, 0,
                              group.linears[i].outputs);
            carry_out_all(stage, block.row, block.rows);
        });
        stages_.end_stage(ROWS);
    }

    void carry_out_all(const Stage &stage, int64_t first, int64_t count) {
        char *scratch = scratch_of_thread(program_.scratch_bytes);
        for (int64_t number = first; number < first + count; ++number) {
            Row row{program_, call_, number, scratch, missing_};
            for (int64_t i = stage.first; i < stage.first + stage.count; ++i)
                carry_out(program_.instructions[i], row, attention_);
        }
    }

    void attend(const Stage &stage) {
        Matrix<T> query = matrix<T>(stage.query, stage.query_offset);
        attention_.add_to(stages_, stage.first, stage.heads, query.data, {stage.head_stride, query.stride},
                          program_.buffers[stage.out].data,
                          {(float)stage.scale, stage.window, (float)stage.softcap});
        stages_.end_stage(ATTENTION);
    }

    void choose() {
        const Buffer &logits = program_.buffers[LOGITS];
        const int64_t count = logits.row / size_of(program_.type_of_logits);
        stages_.add(call_.kept, [this, &logits, count](int64_t row) {
            const void *of_row = static_cast<const char *>(logits.data) + row * logits.row;
            call_.chosen[row] = program_.type_of_logits == FLOAT
                                    ? place_of_largest(static_cast<const float *>(of_row), count)
                                    : place_of_largest(static_cast<const bfloat *>(of_row), count);
        });
        stages_.end_stage(CHOICE);
    }

    const Program &program_;
    const Call &call_;
    Stages stages_;
    AttentionRows attention_;
    std::optional<LoraRows> lora_;
    std::vector<Block> blocks_;
    std::vector<Later> later_;  // of all linears
    std::atomic<bool> missing_{false};
};

}  // namespace

extern "C" {

// 0 if a token or position is out of the model's range: then the results are meaningless.
int64_t motet_program_pass(const Program *program, const Call *call) {
    return answer_of([&] {
        return program->type == FLOAT ? Pass<float>(*program, *call).run() : Pass<bfloat>(*program, *call).run();
    });
}

// What a pass writes to `chosen`, for any contiguous rows.
void motet_largest(int64_t type, const void *logits, int64_t rows, int64_t vocabulary, int64_t *chosen) {
    for (int64_t row = 0; row < rows; ++row)
        chosen[row] = type == FLOAT
                          ? place_of_largest(static_cast<const float *>(logits) + row * vocabulary, vocabulary)
                          : place_of_largest(static_cast<const bfloat *>(logits) + row * vocabulary, vocabulary);
}
}
