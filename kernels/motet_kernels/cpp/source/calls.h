// Functions of add_lora and attention for other parts of the library. Types of elements: 0 float, 1 bfloat, 2 half.
#pragma once

#include <cstdint>
#include <vector>

#include "later.h"
#include "parallel.h"

// A linear that adapters change. x and y have the rows of the iteration.
struct LoraLinear {
    int64_t index, inputs, outputs;
    const void *x;
    int64_t x_stride;
    void *y;
    int64_t y_stride;
};

constexpr int MOST_LORA_LINEARS = 3;

// Linears that are fed the same x.
struct LoraGroup {
    int count = 0;
    LoraLinear linears[MOST_LORA_LINEARS];
};

// The rows of an iteration that have adapters: the same for all linears.
class LoraRows {
  public:
    struct Piece;  // rows of one segment
    // `products` has room for the x · A of MOST_LORA_LINEARS linears.
    LoraRows(int64_t type, const void *segments, int64_t count, float *products);
    ~LoraRows();

    int64_t pieces() const;
    int64_t first_row(int64_t piece) const;
    int64_t rows(int64_t piece) const;

    // Adds to the list the matrices that shrinks and expands will read, in parts of at most `most` bytes: for each
    // thread's share of the rows all B, then all A.
    void list(const LoraGroup &group, int64_t threads, int64_t most, std::vector<Later> &into) const;
    // Adds the products x · A of all rows to the stage.
    void add_shrinks(Stages &stages, const LoraGroup &group) const;
    // Adds y += products · B of all rows to the stage.
    void add_expands(Stages &stages, const LoraGroup &group) const;
    // Adds the shrinks and expands of a group with one linear, and ends the stage.
    void add_all(Stages &stages, const LoraGroup &group) const;
    // y += products · B for these rows of a piece, and the columns [from, to) of a linear. `to` is the number of outputs,
    // or `to - from` is a multiple of PAIR.
    void expand(const LoraGroup &group, int linear, int64_t piece, int64_t row, int64_t rows, int64_t from,
                int64_t to) const;

  private:
    // Calls `with` with the Work of these linears, for the type of the elements.
    template <typename With> void with_work(const LoraGroup &group, const With &with) const;

    int64_t type_;
    float *products_;
    int64_t products_of_a_linear_ = 0;
    std::vector<Piece> pieces_;
};

struct AttentionOptions {
    float scale;
    int64_t window;  // 0: all tokens before
    float softcap;   // 0: none
    int64_t first_key(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

// The distances from a head and from a row to the next, in elements.
struct Strides {
    int64_t head, row;
};

// The addresses of the key and the value of a row's first head; null if the row is in no sequence.
struct KeyPlace {
    char *key, *value;
    int64_t bytes_of_head;  // from one head to the next
};

// Attention of the rows of an iteration to pages: the same for all layers.
class AttentionRows {
  public:
    AttentionRows(int64_t type, const void *batch);

    KeyPlace place(int64_t layer, int64_t row) const;
    // Writes the key and value of a row to its place.
    void write(int64_t layer, int64_t row, const void *key, int64_t key_head, const void *value,
               int64_t value_head) const;
    // Adds the attention of the queries to the stage. `out` is [rows, heads, width].
    void add_to(Stages &stages, int64_t layer, int64_t heads, const void *queries, Strides of_queries, void *out,
                AttentionOptions options) const;
    // One more than the last row of any sequence.
    int64_t rows() const { return (int64_t)places_.size(); }

  private:
    int64_t type_;
    const void *batch_;
    std::vector<int64_t> places_;  // of each row's key, in elements from the layer's first page; -1: none
};
