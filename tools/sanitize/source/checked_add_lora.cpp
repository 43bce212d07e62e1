// Calls of add_lora.cpp, which are checked first.
#define motet_add_lora unchecked_add_lora
#include "add_lora.cpp"
#undef motet_add_lora

#include <algorithm>

#include "shapes.h"

void walk_segments(Walk &walk, int64_t type, const void *&segments, int64_t count, int64_t rows,
                   const List<Adapted> &linears, float *&products, int64_t at_once) {
    walk.all(segments, count * (int64_t)sizeof(Segment), Use::READ, "segments");
    Segment *all = static_cast<Segment *>(const_cast<void *>(segments));
    int64_t last = 0, factors = 0, known = 0;
    for (const Adapted &linear : linears) known = std::max(known, linear.index + 1);
    for (Segment *s = all; s < all + count; ++s) {
        walk.expect(last <= s->start && s->start < s->stop && s->stop <= rows, "segments in order, within the rows");
        walk.expect(s->rank > 0 && s->rank % RANKS_AT_ONCE == 0 && s->rank <= MOST_RANK, "the rank of a segment");
        last = s->stop;
        factors += s->rank * (s->stop - s->start);
        walk.all(s->offsets, known * OFFSETS * (int64_t)sizeof(int64_t), Use::READ, "offsets in a run");
        int64_t end = 0;
        const auto with_matrices = [&](const auto &with) {
            for (const Adapted &linear : linears)
                for (int which = 0; which < OFFSETS; ++which) {
                    const int64_t offset = s->offsets[OFFSETS * linear.index + which];
                    const int64_t numbers = which == SCALES ? 2 * linear.outputs
                                                            : s->rank * (which ? linear.outputs : linear.inputs);
                    if (offset >= 0) with(offset, numbers * size_of_type(type), which);
                }
        };
        with_matrices([&](int64_t offset, int64_t bytes, int) { end = std::max(end, offset + bytes); });
        walk.around(s->run, end);
        with_matrices([&](int64_t offset, int64_t bytes, int which) {
            walk.expect(offset % size_of_type(type) == 0, "offsets in a run");
            walk.part(s->run + offset, bytes, Use::READ,
                      which == SCALES ? "the scales of an adapter" : "A and B of an adapter", type);
        });
    }
    walk.all(products, factors * at_once * (int64_t)sizeof(float), Use::WRITTEN, "room for products", FLOATS);
}

namespace {

struct AddLora {
    static constexpr const char *NAME = "add_lora";
    int64_t type;
    const void *segments;
    int64_t count;
    float *products;
    int64_t most_threads, linear, inputs, outputs;
    const void *x;
    int64_t x_stride;
    void *y;
    int64_t y_stride;

    void walk(Walk &walk) {
        walk.threads(most_threads);
        walk.expect(type >= 0 && type <= 2 && linear >= 0 && inputs > 0 && outputs > 0, "the linear that is changed");
        walk.expect(count >= 0, "segments");
        walk_segments(walk, type, segments, count, INT64_MAX, {{linear, inputs, outputs}}, products, 1);
        const int64_t rows = count ? (static_cast<const Segment *>(segments) + count - 1)->stop : 0;
        const int64_t size = size_of_type(type);
        walk.rows(x, rows, x_stride * size, inputs * size, Use::READ, "x of add_lora", type);
        walk.rows(y, rows, y_stride * size, outputs * size, Use::BOTH, "y of add_lora", type);
    }
    int64_t run() const {
        return unchecked_add_lora(type, segments, count, products, most_threads, linear, inputs, outputs, x, x_stride, y,
                                  y_stride);
    }
};

const bool known = is_known<AddLora>();

}  // namespace

extern "C" int64_t motet_add_lora(int64_t type, const void *segments, int64_t count, float *products,
                                  int64_t most_threads, int64_t linear, int64_t inputs, int64_t outputs, const void *x,
                                  int64_t x_stride, void *y, int64_t y_stride) {
    return checked(AddLora{type, segments, count, products, most_threads, linear, inputs, outputs, x, x_stride, y,
                           y_stride});
}
