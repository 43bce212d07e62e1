// The structures of programs, and what each instruction does to a row. Instructions compute in fp32 and round to the
// type of the result, like torch.
#pragma once

#include <atomic>

#include "calls.h"
#include "linear.h"

namespace {

// Operations and types are in the order of motet_kernels/cpp/steps.py. The structures have the same members in the same
// order as in program_structures.py.
enum Type { FLOAT, BFLOAT, INTEGER };

enum Operation {
    COPY, ADD, SUBTRACT, MULTIPLY, DIVIDE, NEGATIVE, CUBE, RSQRT, SQRT, EXP, TANH, SIGMOID, SILU, GELU, GELU_TANH, RELU,
    COS, SIN, MEAN, SUM, LAYER_NORM, RMS_NORM, LOOK_UP, UNPACK, KEEP, WRITE,
    MODULES_NORM, SUM_AND_NORM, ROTATE, NORM_AND_ROTATE, WRITE_ROTATED, WRITE_NORMED_ROTATED, SILU_TIMES,
};

enum Where { BUFFER, SCRATCH, CONSTANT };

constexpr int MOST_OPERANDS = 5, DIMENSIONS = 3;
constexpr int FEW_OPERANDS = 3;  // enough for all operations except the fused rotations

struct Operand {
    int64_t where;
    int64_t base;  // a buffer's number, bytes in the thread's scratch memory, or an address
    int64_t offset, type;
    int64_t strides[DIMENSIONS];
};

struct Instruction {
    int64_t operation;
    int64_t sizes[DIMENSIONS];
    Operand out, in[MOST_OPERANDS], also;  // also: a second result
    int64_t number;
    double real;
};

struct LinearStep {
    int64_t x, x_offset, y;  // buffers
    int64_t inputs, outputs;
    const void *packed, *bias;
    int64_t lora;  // the linear's number in add_lora; -1: no adapter changes the linear
};

enum StageKind { LINEARS, ROWS, ATTENTION, CHOICE };

struct Stage {
    int64_t kind, kept;    // kept: 1 if the stage has only the kept rows
    int64_t first, count;  // of its instructions or linears; for an attention, first is the layer
    int64_t query, query_offset, head_stride, heads, out, window;
    double scale, softcap;
};

struct Buffer {
    void *data;
    int64_t row;  // bytes
};

constexpr int64_t LOGITS = 2;  // the logits' buffer

struct Program {
    int64_t type;  // of linears and attention: 0 float, 1 bfloat
    int64_t type_of_logits;
    int64_t prefetches;  // 1 if linears prefetch what their adapters read
    int64_t stages, scratch_bytes;
    const Stage *of_stage;
    const Instruction *instructions;
    const LinearStep *linears;
    const Buffer *buffers;
};

struct Call {
    int64_t rows, kept, threads;
    const int64_t *keep;    // [kept]
    const void *attention;  // attention's Batch
    const void *lora;       // add_lora's segments; null if no row has an adapter
    int64_t lora_count;
    float *lora_products;
    int64_t *chosen;  // [kept] place_of_largest() of each row's logits; null: not wanted
    double *seconds;  // of each kind of stage; may be null
};

int64_t size_of(int64_t type) { return type == FLOAT ? 4 : type == BFLOAT ? 2 : 8; }

// -- numbers of each type, in memory order ----------------------------------------------------------------------------

INLINE floats widened(const char *from) {
    shorts packed;
    memcpy(&packed, from, sizeof packed);
    return as_floats(__builtin_convertvector(packed, words) << 16);
}
INLINE void narrowed(char *to, floats value) {
#if defined(__AVX512BF16__)
    __m256bh packed = _mm512_cvtneps_pbh((__m512)value);
#else
    shorts packed = __builtin_convertvector(rounded(value), shorts);
#endif
    memcpy(to, &packed, sizeof packed);
}

float number_at(int64_t type, const char *at) {
    if (type == FLOAT) return *reinterpret_cast<const float *>(at);
    if (type == INTEGER) return (float)*reinterpret_cast<const int64_t *>(at);
    uint32_t bits = (uint32_t)*reinterpret_cast<const uint16_t *>(at) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
void set_number(int64_t type, char *at, float value) {
    if (type == FLOAT)
        *reinterpret_cast<float *>(at) = value;
    else if (type == INTEGER)
        *reinterpret_cast<int64_t *>(at) = (int64_t)value;
    else
        *reinterpret_cast<uint16_t *>(at) = (uint16_t)rounded(all(value))[0];
}

// Reads the last dimension of an operand.
struct Reader {
    enum Mode { FLOATS, BFLOATS, SAME, APART };
    const char *at;
    int64_t type, step;  // bytes from a number to the next
    Mode mode;
    floats same;

    Reader(const Operand &operand, const char *at) : at(at), type(operand.type) {
        int64_t stride = operand.strides[DIMENSIONS - 1];
        step = stride * size_of(type);
        mode = stride == 0 ? SAME : stride != 1 || type == INTEGER ? APART : type == FLOAT ? FLOATS : BFLOATS;
        same = mode == SAME ? all(number_at(type, at)) : floats{};
    }

    INLINE floats operator()(int64_t i) const {
        if (mode == BFLOATS) return widened(at + i * 2);
        if (mode == FLOATS) return load_floats(reinterpret_cast<const float *>(at) + i);
        if (mode == SAME) return same;
        return some(i, LANES);
    }
    // `count` numbers from number i on, and then zeros.
    floats some(int64_t i, int64_t count) const {
        floats value = {};
        for (int64_t lane = 0; lane < count; ++lane) value[lane] = number_at(type, at + (i + lane) * step);
        return value;
    }
};

struct Writer {
    char *at;
    int64_t type, step;
    bool together;

    Writer(const Operand &operand, char *at) : at(at), type(operand.type) {
        int64_t stride = operand.strides[DIMENSIONS - 1];
        step = stride * size_of(type);
        together = stride == 1 && type != INTEGER;
    }

    INLINE void operator()(int64_t i, floats value) const {
        if (!together) return some(i, value, LANES);
        if (type == BFLOAT)
            narrowed(at + i * 2, value);
        else
            store_floats(reinterpret_cast<float *>(at) + i, value);
    }
    void some(int64_t i, floats value, int64_t count) const {
        for (int64_t lane = 0; lane < count; ++lane) set_number(type, at + (i + lane) * step, value[lane]);
    }
};

// -- functions ----------------------------------------------------------------------------------------------------------

INLINE floats magnitude(floats x) { return as_floats(as_words(x) & 0x7fffffffu); }

INLINE floats logistic(floats x) {
    floats decay = exponential(as_floats(as_words(x) | 0x80000000u));  // of -|x|
    return choose(x < 0.0f, decay, all(1.0f)) / (decay + 1.0f);
}

// The error function (Abramowitz and Stegun, 7.1.26): its error is at most 1.5e-7.
INLINE floats error_function(floats x) {
    floats size = magnitude(x), t = 1.0f / (size * 0.3275911f + 1.0f);
    floats power = all(1.061405429f);
    power = power * t - 1.453152027f;
    power = power * t + 1.421413741f;
    power = power * t - 0.284496736f;
    power = power * t + 0.254829592f;
    floats value = 1.0f - power * t * exponential(-(size * size));
    return as_floats(as_words(value) | (as_words(x) & 0x80000000u));
}

INLINE floats gelu_tanh(floats x) {
    return x * 0.5f * (hyperbolic_tangent((x * x * x * 0.044715f + x) * 0.797884561f) + 1.0f);
}

INLINE floats each(floats x, float (*function)(float)) {
    for (int lane = 0; lane < LANES; ++lane) x[lane] = function(x[lane]);
    return x;
}
float square_root(float x) { return __builtin_sqrtf(x); }
float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }
float cosine(float x) { return __builtin_cosf(x); }
float sine(float x) { return __builtin_sinf(x); }
float power_of_e(float x) { return __builtin_expf(x); }

// -- instructions -------------------------------------------------------------------------------------------------------

struct Row {
    const Program &program;
    const Call &call;
    int64_t number;
    char *scratch;
    std::atomic<bool> &missing;  // true if a look-up was out of range

    char *at(const Operand &operand) const { return at(operand, number); }
    char *at(const Operand &operand, int64_t row) const {
        char *begin = reinterpret_cast<char *>(operand.base);
        if (operand.where == BUFFER) {
            const Buffer &buffer = program.buffers[operand.base];
            begin = static_cast<char *>(buffer.data) + row * buffer.row;
        } else if (operand.where == SCRATCH) {
            begin = scratch + operand.base;
        }
        return begin + operand.offset * size_of(operand.type);
    }
};

// Calls with(addresses of out and in) for each run along the last dimension.
template <int OPERANDS = FEW_OPERANDS, typename F>
INLINE void by_runs(const Instruction &what, const Row &row, int64_t from_row, const F &with) {
    char *out = row.at(what.out);
    const char *in[OPERANDS];
    for (int i = 0; i < OPERANDS; ++i) in[i] = row.at(what.in[i], from_row);
    for (int64_t i = 0; i < what.sizes[0]; ++i)
        for (int64_t j = 0; j < what.sizes[1]; ++j) {
            auto moved = [&](const Operand &operand) {
                return (i * operand.strides[0] + j * operand.strides[1]) * size_of(operand.type);
            };
            const char *now[OPERANDS];
            for (int k = 0; k < OPERANDS; ++k) now[k] = in[k] + moved(what.in[k]);
            with(out + moved(what.out), now);
        }
}

template <typename F> INLINE void compute(const Instruction &what, const Row &row, int64_t from_row, const F &function) {
    const int64_t count = what.sizes[DIMENSIONS - 1];
    by_runs(what, row, from_row, [&](char *out, const char **in) {
        Reader a(what.in[0], in[0]), b(what.in[1], in[1]);
        Writer write(what.out, out);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) write(i, function(a(i), b(i)));
        if (i < count) write.some(i, function(a.some(i, count - i), b.some(i, count - i)), count - i);
    });
}
template <typename F> INLINE void compute(const Instruction &what, const Row &row, const F &function) {
    compute(what, row, row.number, function);
}

template <typename F> INLINE float total(const Reader &a, int64_t count, const F &of) {
    floats sums_of[2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        sums_of[0] += of(a(i));
        sums_of[1] += of(a(i + LANES));
    }
    float sum_of = sum(sums_of[0] + sums_of[1]);
    for (; i < count; ++i) sum_of += of(all(number_at(a.type, a.at + i * a.step)))[0];
    return sum_of;
}

// out = (x - shift) · scale · weight + bias; a missing weight is all ones, a missing bias all zeros.
INLINE void scaled(const Instruction &what, char *out, const char **in, const Reader &x, float shift, float scale) {
    const int64_t count = what.sizes[DIMENSIONS - 1];
    Reader weight(what.in[1], in[1]), bias(what.in[2], in[2]);
    Writer write(what.out, out);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) write(i, (x(i) - shift) * scale * weight(i) + bias(i));
    if (int64_t rest = count - i)
        write.some(i, (x.some(i, rest) - shift) * scale * weight.some(i, rest) + bias.some(i, rest), rest);
}

void norm(const Instruction &what, const Row &row) {
    const float count = (float)what.sizes[DIMENSIONS - 1];
    by_runs(what, row, row.number, [&](char *out, const char **in) {
        Reader x(what.in[0], in[0]);
        float mean = 0;
        if (what.operation == LAYER_NORM) mean = total(x, what.sizes[2], [](floats v) { return v; }) / count;
        float square = total(x, what.sizes[2], [=](floats v) { return (v - mean) * (v - mean); }) / count;
        scaled(what, out, in, x, mean, 1.0f / __builtin_sqrtf(square + (float)what.real));
    });
}

void reduce(const Instruction &what, const Row &row) {
    by_runs(what, row, row.number, [&](char *out, const char **in) {
        float sum_of = total(Reader(what.in[0], in[0]), what.sizes[2], [](floats v) { return v; });
        set_number(what.out.type, out, what.operation == MEAN ? sum_of / (float)what.sizes[2] : sum_of);
    });
}

// Looks up a row of a matrix with `what.number` rows; the second operand is the row's index.
void look_up(const Instruction &what, const Row &row) {
    const int64_t index = *reinterpret_cast<const int64_t *>(row.at(what.in[1])), width = what.sizes[2];
    char *out = row.at(what.out);
    if (index < 0 || index >= what.number) {
        row.missing = true;
    } else if (what.operation == LOOK_UP) {
        const int64_t bytes = width * size_of(what.out.type);
        memcpy(out, row.at(what.in[0]) + index * bytes, bytes);
    } else if (what.out.type == FLOAT) {
        unpack(reinterpret_cast<const float *>(row.at(what.in[0])), width, index, reinterpret_cast<float *>(out));
    } else {
        unpack(reinterpret_cast<const bfloat *>(row.at(what.in[0])), width, index, reinterpret_cast<bfloat *>(out));
    }
}

}  // namespace
