// Calls of attention.cpp, which are checked first.
#define motet_attention unchecked_attention
#include "attention.cpp"
#undef motet_attention

#include <map>

#include "shapes.h"

KeyShape walk_batch(Walk &walk, int64_t type, const void *&batch, int64_t rows, int64_t layers, int64_t window) {
    walk.all(batch, sizeof(Batch), Use::READ, "a batch of attention");
    Batch &b = *static_cast<Batch *>(const_cast<void *>(batch));
    walk.threads(b.threads);
    const int64_t of_layer = 2 * b.kv_heads * PAGE * b.width, size = size_of_type(type);
    walk.expect(b.kv_heads > 0 && b.width > 0 && b.count >= 0, "heads and sequences");
    walk.expect(b.layer_stride >= of_layer && b.page_stride >= (layers - 1) * b.layer_stride + of_layer,
                "strides of pages and layers");
    walk.all(b.sequences, b.count * (int64_t)sizeof(Sequence), Use::READ, "sequences");
    List<bool> taken;  // rows
    int64_t numbers = 0;
    const auto pages_of = [](const Sequence &s) { return (s.start + s.count + PAGE - 1) / PAGE; };
    for (const Sequence *s = b.sequences, *end = s + b.count; s < end; ++s) {
        walk.expect(s->first >= 0 && s->count >= 0 && s->start >= 0 && s->pages >= 0, "a sequence");
        walk.expect(s->first + s->count <= rows, "a sequence's rows are those of the call");
        walk.expect(pages_of(*s) <= b.table_stride, "a sequence's pages have room in the table");
        if ((int64_t)taken.size() < s->first + s->count) taken.resize(s->first + s->count);
        for (int64_t row = s->first; row < s->first + s->count; ++row) {
            walk.expect(!taken[row], "a row has one sequence");
            taken[row] = true;
        }
        numbers = std::max(numbers, s->pages * b.table_stride + pages_of(*s));
    }
    walk.around(b.table, numbers * (int64_t)sizeof *b.table);
    std::map<int64_t, int, std::less<int64_t>, Apart<std::pair<const int64_t, int>>> users;  // of each page, those that write into it, and one more if others read it
    int64_t end_page = 0;
    for (const Sequence *s = b.sequences, *end = s + b.count; s < end; ++s) {
        if (!s->count) continue;
        const int32_t *row = b.table + s->pages * b.table_stride;
        const int64_t first = window && s->start >= window ? (s->start - window + 1) / PAGE : 0;
        walk.part(row + first, (pages_of(*s) - first) * (int64_t)sizeof *row, Use::READ, "the table of pages");
        for (int64_t page = first; page < pages_of(*s); ++page) {
            walk.expect(row[page] >= 0, "the number of a page");
            users[row[page]] += page >= s->start / PAGE ? 2 : users[row[page]] % 2 ? 0 : 1;
            end_page = std::max<int64_t>(end_page, row[page] + 1);
        }
    }
    walk.around(b.pages, end_page * b.page_stride * size);
    for (const auto &page : users) {
        walk.expect(page.second <= 2, "a page that a sequence writes into is nobody else's");
        walk.part(static_cast<char *>(b.pages) + page.first * b.page_stride * size,
                  ((layers - 1) * b.layer_stride + of_layer) * size, page.second < 2 ? Use::READ : Use::BOTH, "a page",
                  type);
    }
    return {b.kv_heads, b.width};
}

namespace {

struct Attention {
    static constexpr const char *NAME = "attention";
    int64_t type;
    const void *batch;
    int64_t layer, heads;
    const void *queries, *keys, *values;
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;
    void *out;
    float scale;
    int64_t window;
    float softcap;

    void walk(Walk &walk) {
        walk.expect(type >= 0 && type <= 2 && layer >= 0 && window >= 0 && softcap >= 0, "what attention is asked for");
        const KeyShape keys_are = walk_batch(walk, type, batch, INT64_MAX, layer + 1, window);
        walk.expect(heads > 0 && heads % keys_are.heads == 0, "heads of queries");
        const Batch &b = *static_cast<const Batch *>(batch);
        int64_t rows = 0, size = size_of_type(type);
        for (const Sequence *s = b.sequences; s < b.sequences + b.count; ++s) rows = std::max(rows, s->first + s->count);
        with_heads(walk, queries, rows, query_row, heads, query_head, keys_are.width, "queries");
        with_heads(walk, keys, rows, key_row, keys_are.heads, key_head, keys_are.width, "keys");
        with_heads(walk, values, rows, value_row, keys_are.heads, value_head, keys_are.width, "values");
        walk.all(out, rows * heads * keys_are.width * size, Use::WRITTEN, "what attention gives", type);
    }
    void with_heads(Walk &walk, const void *&at, int64_t rows, int64_t row, int64_t heads, int64_t head, int64_t width,
                    const char *what) const {
        const int64_t size = size_of_type(type);
        walk.expect(row >= 0 && (heads < 2 || head >= width) && (rows < 2 || row >= width), what);
        if (rows < 1) return;
        walk.around(at, ((rows - 1) * row + (heads - 1) * head + width) * size);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t h = 0; h < heads; ++h)
                walk.part(Walk::bytes_at(at, (r * row + h * head) * size), width * size, Use::READ, what, type);
    }
    int64_t run() const {
        return unchecked_attention(type, batch, layer, heads, queries, keys, values, query_head, query_row, key_head,
                                   key_row, value_head, value_row, out, scale, window, softcap);
    }
};

const bool known = is_known<Attention>();

}  // namespace

extern "C" int64_t motet_attention(int64_t type, const void *batch, int64_t layer, int64_t heads, const void *queries,
                                   const void *keys, const void *values, int64_t query_head, int64_t query_row,
                                   int64_t key_head, int64_t key_row, int64_t value_head, int64_t value_row, void *out,
                                   float scale, int64_t window, float softcap) {
    return checked(Attention{type, batch, layer, heads, queries, keys, values, query_head, query_row, key_head, key_row,
                             value_head, value_row, out, scale, window, softcap});
}
