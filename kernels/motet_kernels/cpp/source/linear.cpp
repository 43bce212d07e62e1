// The linears of a model, for Python. Types: 0 float, 1 bfloat.
#include "linear.h"

#include "border.h"

namespace {

constexpr int64_t SMALL = 256 * 1024;  // one thread computes fewer products than this

template <typename T>
void linear(const void *x, int64_t x_stride, int64_t rows, int64_t inputs, const void *packed, const void *bias,
            void *y, int64_t y_stride, int64_t outputs, int64_t most_threads) {
    LinearCall<T> call{{static_cast<const T *>(x), x_stride}, rows, inputs, outputs, static_cast<const T *>(packed),
                       static_cast<const T *>(bias), {static_cast<T *>(y), y_stride}};
    Stages stages(rows * inputs * outputs < SMALL ? 1 : most_threads);
    call.add_to(stages);
    stages.end_stage();
    stages.run();
}

}  // namespace

extern "C" {

// How many numbers a packed matrix has.
int64_t motet_packed_size(int64_t outputs, int64_t inputs) { return panels_of(outputs) * panel_size(inputs); }

// How many columns of y a packed matrix computes: its outputs, rounded up to panels.
int64_t motet_packed_width(int64_t outputs) { return panels_of(outputs) * PAIR; }

int64_t motet_pack(int64_t type, const void *w, int64_t stride, int64_t outputs, int64_t inputs, void *packed,
                   int64_t most_threads) {
    return answer_of([&] {
        in_parallel(outputs * inputs < SMALL ? 1 : most_threads, panels_of(outputs), [&](int64_t panel) {
            if (type == 0)
                pack<float>({static_cast<const float *>(w), stride}, outputs, inputs, static_cast<float *>(packed),
                            panel);
            else
                pack<bfloat>({static_cast<const bfloat *>(w), stride}, outputs, inputs, static_cast<bfloat *>(packed),
                             panel);
        });
        return 0;
    });
}

int64_t motet_linear(int64_t type, const void *x, int64_t x_stride, int64_t rows, int64_t inputs, const void *packed,
                     const void *bias, void *y, int64_t y_stride, int64_t outputs, int64_t most_threads) {
    return answer_of([&] {
        (type == 0 ? linear<float> : linear<bfloat>)(x, x_stride, rows, inputs, packed, bias, y, y_stride, outputs,
                                                     most_threads);
        return 0;
    });
}
// Unpacks the rows `rows` of a packed matrix.
void motet_unpack(int64_t type, const void *packed, int64_t inputs, const int64_t *rows, int64_t count, void *into) {
    for (int64_t r = 0; r < count; ++r)
        if (type == 0)
            unpack(static_cast<const float *>(packed), inputs, rows[r], static_cast<float *>(into) + r * inputs);
        else
            unpack(static_cast<const bfloat *>(packed), inputs, rows[r], static_cast<bfloat *>(into) + r * inputs);
}
}
