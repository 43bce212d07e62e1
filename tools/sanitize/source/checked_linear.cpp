// Calls of linear.cpp, which are checked first.
#define motet_pack unchecked_pack
#define motet_linear unchecked_linear
#define motet_unpack unchecked_unpack
#include "linear.cpp"
#undef motet_pack
#undef motet_linear
#undef motet_unpack

#include "packed.h"

namespace {

struct Pack {
    static constexpr const char *NAME = "pack";
    int64_t type;
    const void *w;
    int64_t stride, outputs, inputs;
    void *packed;
    int64_t most_threads;

    void walk(Walk &walk) {
        walk.threads(most_threads);
        walk.expect((type == 0 || type == 1) && inputs > 0, "the type and the inputs of a weight");
        const int64_t size = size_of_type(type);
        walk.rows(w, outputs, stride * size, inputs * size, Use::READ, "the weight", type);
        walk.all(packed, packed_bytes(type, outputs, inputs), Use::WRITTEN, "the packed weight", type);
    }
    int64_t run() const { return unchecked_pack(type, w, stride, outputs, inputs, packed, most_threads); }
};

struct Linear {
    static constexpr const char *NAME = "linear";
    int64_t type;
    const void *x;
    int64_t x_stride, row_count, inputs;
    const void *packed, *bias;
    void *y;
    int64_t y_stride, outputs, most_threads;

    void walk(Walk &walk) {
        walk.threads(most_threads);
        walk.expect((type == 0 || type == 1) && inputs > 0 && outputs > 0, "the type, inputs and outputs of a linear");
        const int64_t size = size_of_type(type);
        walk.rows(x, row_count, x_stride * size, inputs * size, Use::READ, "x of a linear", type);
        walk.all(packed, packed_bytes(type, outputs, inputs), Use::READ, "the weight of a linear", type);
        if (bias) walk.all(bias, outputs * size, Use::READ, "the bias of a linear", type);
        walk.rows(y, row_count, y_stride * size, outputs * size, Use::WRITTEN, "y of a linear", type);
    }
    int64_t run() const {
        return unchecked_linear(type, x, x_stride, row_count, inputs, packed, bias, y, y_stride, outputs, most_threads);
    }
};

struct Unpack {
    static constexpr const char *NAME = "unpack";
    int64_t type;
    const void *packed;
    int64_t inputs;
    const int64_t *rows;
    int64_t count;
    void *into;

    void walk(Walk &walk) {
        walk.expect((type == 0 || type == 1) && inputs > 0 && count >= 0, "the type and the inputs of a packed weight");
        walk.all(rows, count * (int64_t)sizeof *rows, Use::READ, "the numbers of rows", INT64);
        int64_t last = -1;
        for (int64_t i = 0; i < count; ++i) {
            walk.expect(rows[i] >= 0, "the number of a row");
            last = rows[i] > last ? rows[i] : last;
        }
        walk.all(packed, packed_bytes(type, last + 1, inputs), Use::READ, "a packed weight", type);
        walk.all(into, count * inputs * size_of_type(type), Use::WRITTEN, "rows of a weight", type);
    }
    void run() const { unchecked_unpack(type, packed, inputs, rows, count, into); }
};

const bool known = is_known<Pack>() && is_known<Linear>() && is_known<Unpack>();

}  // namespace

extern "C" {
int64_t motet_pack(int64_t type, const void *w, int64_t stride, int64_t outputs, int64_t inputs, void *packed,
                   int64_t most_threads) {
    return checked(Pack{type, w, stride, outputs, inputs, packed, most_threads});
}
int64_t motet_linear(int64_t type, const void *x, int64_t x_stride, int64_t rows, int64_t inputs, const void *packed,
                     const void *bias, void *y, int64_t y_stride, int64_t outputs, int64_t most_threads) {
    return checked(Linear{type, x, x_stride, rows, inputs, packed, bias, y, y_stride, outputs, most_threads});
}
void motet_unpack(int64_t type, const void *packed, int64_t inputs, const int64_t *rows, int64_t count, void *into) {
    checked(Unpack{type, packed, inputs, rows, count, into});
}
}
