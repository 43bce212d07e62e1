// Calls of program.cpp, which are checked first.
#define motet_program_pass unchecked_program_pass
#define motet_largest unchecked_largest
#include "program.cpp"
#undef motet_program_pass
#undef motet_largest

#include <map>

#include "packed.h"
#include "shapes.h"

namespace {

struct ProgramPass {
    static constexpr const char *NAME = "program_pass";
    const Program *program;
    const Call *call;

    void walk(Walk &walk) {
        walk.all(program, sizeof *program, Use::READ, "a program");
        walk.all(call, sizeof *call, Use::READ, "a pass");
        Program &p = const_cast<Program &>(*program);
        Call &c = const_cast<Call &>(*call);
        walk.threads(c.threads);
        walk.expect(p.type == FLOATS || p.type == BFLOATS, "the type of a pass");
        walk.expect(c.rows >= 0 && c.kept >= 0, "the rows of a pass");
        walk.all(c.keep, c.kept * (int64_t)sizeof *c.keep, Use::READ, "kept rows", INT64);
        for (int64_t i = 0; i < c.kept; ++i) walk.expect(c.keep[i] >= 0 && c.keep[i] < c.rows, "a kept row");
        walk.expect(p.stages > 0 && p.scratch_bytes >= 0, "a program");
        walk.expect(p.type_of_logits == FLOAT || p.type_of_logits == BFLOAT, "the type of logits");
        if (c.chosen) walk.all(c.chosen, c.kept * (int64_t)sizeof *c.chosen, Use::WRITTEN, "chosen", INT64);
        if (c.seconds) walk.clock(c.seconds, CHOICE + 1);

        int64_t instructions = 0, linears = 0, layers = 0, window = -1;
        walk.all(p.of_stage, p.stages * (int64_t)sizeof(Stage), Use::READ, "stages");
        for (const Stage *s = p.of_stage, *end = s + p.stages; s < end; ++s) {
            walk.expect(s->kind >= LINEARS && s->kind <= ATTENTION && s->first >= 0 && s->count >= 0, "a stage");
            if (s->kind == ROWS) instructions = std::max(instructions, s->first + s->count);
            if (s->kind == LINEARS) linears = std::max(linears, s->first + s->count);
            if (s->kind == ATTENTION) layers = std::max(layers, s->first + 1);
            if (s->kind == ATTENTION) window = window && s->window ? std::max(window, s->window) : 0;
        }
        walk.all(p.instructions, instructions * (int64_t)sizeof(Instruction), Use::READ, "instructions");
        walk.all(p.linears, linears * (int64_t)sizeof(LinearStep), Use::READ, "the linears of a program");
        for (const Instruction *i = p.instructions, *end = i + instructions; i < end; ++i)
            if (writes(i->operation)) layers = std::max(layers, i->number + 1);
        const KeyShape keys = walk_batch(walk, p.type, c.attention, c.rows, std::max<int64_t>(layers, 1),
                                         std::max<int64_t>(window, 0));

        Rows rows_of;  // of each buffer
        for (int64_t given : {0, 1, 2}) needs(rows_of, given, given < 2 ? c.rows : c.kept);
        List<Adapted> adapted;
        for (const Stage *s = p.of_stage, *end = s + p.stages; s < end; ++s) {
            const int64_t rows = s->kept ? c.kept : c.rows;
            if (s->kind == ATTENTION) {
                needs(rows_of, s->query, rows);
                needs(rows_of, s->out, rows);
            }
            for (int64_t i = s->first; s->kind != ATTENTION && i < s->first + s->count; ++i)
                if (s->kind == LINEARS) {
                    const LinearStep &l = p.linears[i];
                    needs(rows_of, l.x, rows);
                    needs(rows_of, l.y, rows);
                    walk.expect(l.lora < 0 || !s->kept, "adapters change no linear of kept rows");
                    if (l.lora >= 0) adapted.push_back({l.lora, l.inputs, l.outputs});
                } else {
                    const Instruction &what = p.instructions[i];
                    if (what.out.where == BUFFER) needs(rows_of, what.out.base, rows);
                    if (what.operation == SUM_AND_NORM && what.also.where == BUFFER)
                        needs(rows_of, what.also.base, rows);
                    for (const Operand &in : what.in)
                        if (in.where == BUFFER) needs(rows_of, in.base, what.operation == KEEP ? c.rows : rows);
                }
        }
        walk.expect(rows_of.begin()->first >= 0, "the number of a buffer");
        walk.all(p.buffers, (rows_of.rbegin()->first + 1) * (int64_t)sizeof(Buffer), Use::READ, "buffers");
        for (const auto &one : rows_of) {
            Buffer &buffer = const_cast<Buffer &>(p.buffers[one.first]);
            walk.expect(buffer.row > 0, "the bytes of a buffer's row");
            walk.all(buffer.data, one.second * buffer.row, one.first < 2 ? Use::READ : Use::WRITTEN, "a buffer");
        }
        if (c.lora)
            walk_segments(walk, p.type, c.lora, c.lora_count, c.rows, adapted, c.lora_products, MOST_LORA_LINEARS);

        for (LinearStep *l = const_cast<LinearStep *>(p.linears), *end = l + linears; l < end; ++l) {
            const int64_t size = size_of(p.type);
            walk.expect(l->inputs > 0 && l->outputs > 0 && l->x_offset >= 0, "the shape of a linear");
            walk.expect((l->x_offset + l->inputs) * size <= p.buffers[l->x].row, "x of a linear has room in its buffer");
            walk.expect(l->outputs * size <= p.buffers[l->y].row, "y of a linear has room in its buffer");
            walk.all(l->packed, packed_bytes(p.type, l->outputs, l->inputs), Use::READ, "the weight of a linear",
                     p.type);
            if (l->bias) walk.all(l->bias, l->outputs * size, Use::READ, "the bias of a linear", p.type);
        }
        for (const Stage *s = p.of_stage, *end = s + p.stages; s < end; ++s) {
            if (s->kind != ATTENTION) continue;
            const int64_t size = size_of(p.type), last = s->query_offset + (s->heads - 1) * s->head_stride + keys.width;
            walk.expect(s->heads > 0 && s->heads % keys.heads == 0 && s->query_offset >= 0, "heads of queries");
            walk.expect(s->head_stride >= 0 && last * size <= p.buffers[s->query].row, "queries have room in their buffer");
            walk.expect(s->heads * keys.width * size == p.buffers[s->out].row, "the buffer that attention writes into");
        }
        for (Instruction *i = const_cast<Instruction *>(p.instructions), *end = i + instructions; i < end; ++i)
            walk_instruction(walk, *i, keys);
    }
    int64_t run() const { return unchecked_program_pass(program, call); }

  private:
    using Rows = std::map<int64_t, int64_t, std::less<int64_t>, Apart<std::pair<const int64_t, int64_t>>>;

    static void needs(Rows &rows_of, int64_t buffer, int64_t rows) {
        rows_of[buffer] = std::max(rows_of[buffer], rows);
    }

    void walk_instruction(Walk &walk, Instruction &what, KeyShape keys) const {
        walk.expect(what.operation >= COPY && what.operation <= SILU_TIMES, "an operation");
        const bool writes_values = what.operation == WRITE_ROTATED || what.operation == WRITE_NORMED_ROTATED;
        for (int64_t size : what.sizes) walk.expect(size > 0, "the sizes of an instruction");
        const int64_t all[] = {what.sizes[0], what.sizes[1], what.sizes[2]}, one[] = {1, 1, 1};
        const int64_t of_heads[] = {1, keys.heads, keys.width};
        const bool looks_up = what.operation == LOOK_UP || what.operation == UNPACK;
        const bool reduces = what.operation == MEAN || what.operation == SUM;
        if (!writes(what.operation)) {
            const int64_t reduced[] = {what.sizes[0], what.sizes[1], 1};
            walk_operand(walk, what.out, reduces ? reduced : all, Use::WRITTEN);
        }
        if (what.operation == SUM_AND_NORM) {
            walk.expect(what.sizes[0] == 1 && what.sizes[1] == 1, "a row has one sum with its norm");
            walk_operand(walk, what.also, all, Use::WRITTEN);
        }
        if (what.operation >= MODULES_NORM) {
            const int64_t type = what.in[0].type;
            if (!writes_values) expect_together(walk, what.out, type);
            for (int i = 0; i < read_together(what.operation); ++i) {
                const bool is_wide = i == weight_of(what.operation) && what.in[i].type == FLOAT;
                expect_together(walk, what.in[i], is_wide ? (int64_t)FLOAT : type);
            }
            const bool turns = what.operation >= ROTATE && what.operation <= WRITE_NORMED_ROTATED;
            walk.expect(!turns || what.sizes[2] % 2 == 0, "a rotation has pairs of numbers");
            if (what.operation == SUM_AND_NORM) expect_together(walk, what.also, type);
        }
        if (writes_values)
            walk.expect(what.in[0].type == program->type && what.sizes[0] == 1 && what.sizes[1] == keys.heads &&
                            what.sizes[2] == keys.width,
                        "rotated keys");
        for (int i = 0; i < MOST_OPERANDS; ++i) {
            Operand &in = what.in[i];
            if (looks_up && i == 0) {
                walk.expect(in.where == CONSTANT && !in.offset && in.type == what.out.type && what.number > 0,
                            "a matrix of rows");
                const int64_t width = what.sizes[2], numbers = what.number * width;
                at_constant(walk, in, what.operation == LOOK_UP ? numbers * size_of(in.type)
                                                                : packed_bytes(in.type, what.number, width));
            } else if (looks_up && i == 1) {
                walk.expect(in.type == INTEGER, "numbers of rows");
                walk_operand(walk, in, one, Use::READ);
            } else if (what.operation == WRITE && i < 2) {
                walk.expect(in.type == program->type && in.strides[2] == 1, "keys and values");
                walk_operand(walk, in, of_heads, Use::READ);
            } else {
                walk_operand(walk, in, all, Use::READ);
            }
        }
    }

    // Whether it puts keys and values into their pages.
    static bool writes(int64_t operation) {
        return operation == WRITE || operation == WRITE_ROTATED || operation == WRITE_NORMED_ROTATED;
    }

    // How many operands an instruction of together.h reads.
    static int read_together(int64_t operation) {
        if (operation == MODULES_NORM || operation == SILU_TIMES) return 2;
        if (operation == SUM_AND_NORM || operation == ROTATE) return 3;
        return operation == WRITE_NORMED_ROTATED ? 5 : 4;
    }
    // Which of them is the weight of a norm; -1: it has none.
    static int weight_of(int64_t operation) {
        if (operation == MODULES_NORM) return 1;
        if (operation == SUM_AND_NORM) return 2;
        return operation == NORM_AND_ROTATE || operation == WRITE_NORMED_ROTATED ? 3 : -1;
    }

    static void expect_together(Walk &walk, const Operand &operand, int64_t type) {
        walk.expect(operand.type == type && type != INTEGER && operand.strides[2] == 1,
                    "numbers of one type that lie together");
    }

    void walk_operand(Walk &walk, Operand &operand, const int64_t *sizes, Use use) const {
        walk.expect(operand.type >= FLOAT && operand.type <= INTEGER && operand.offset >= 0, "an operand");
        int64_t last = operand.offset;
        for (int i = 0; i < DIMENSIONS; ++i) {
            walk.expect(operand.strides[i] >= 0, "the strides of an operand");
            last += (sizes[i] - 1) * operand.strides[i];
        }
        const int64_t end = (last + 1) * size_of(operand.type);
        if (operand.where == BUFFER) {
            walk.expect(end <= program->buffers[operand.base].row, "an operand has room in its buffer");
        } else if (operand.where == SCRATCH) {
            walk.expect(operand.base >= 0 && operand.base + end <= program->scratch_bytes, "an operand has room in scratch");
        } else {
            walk.expect(operand.where == CONSTANT && use == Use::READ, "where an operand is");
            at_constant(walk, operand, end);
        }
    }

    static void at_constant(Walk &walk, Operand &operand, int64_t bytes) {
        const void *at = reinterpret_cast<const void *>(operand.base);
        walk.all(at, bytes, Use::READ, "what all rows share", operand.type == INTEGER ? (int64_t)INT64 : operand.type);
        operand.base = reinterpret_cast<int64_t>(at);
    }
};

struct Largest {
    static constexpr const char *NAME = "largest";
    int64_t type;
    const void *logits;
    int64_t rows, vocabulary;
    int64_t *chosen;

    void walk(Walk &walk) {
        walk.expect((type == FLOAT || type == BFLOAT) && rows >= 0 && vocabulary > 0, "the type and the shape of logits");
        walk.all(logits, rows * vocabulary * size_of(type), Use::READ, "logits", type);
        walk.all(chosen, rows * (int64_t)sizeof *chosen, Use::WRITTEN, "chosen", INT64);
    }
    void run() const { unchecked_largest(type, logits, rows, vocabulary, chosen); }
};

const bool known = is_known<ProgramPass>() && is_known<Largest>();

}  // namespace

extern "C" {
int64_t motet_program_pass(const Program *program, const Call *call) { return checked(ProgramPass{program, call}); }
void motet_largest(int64_t type, const void *logits, int64_t rows, int64_t vocabulary, int64_t *chosen) {
    checked(Largest{type, logits, rows, vocabulary, chosen});
}
}
