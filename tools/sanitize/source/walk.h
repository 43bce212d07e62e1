// What each call of the library that computes reads and writes, described once for three walks through it: one checks the call, one
// records it, and one makes it again from a record.
//
// A description is a structure with the arguments of a call, and three members: NAME, `walk` and `run`. `walk` goes
// through all memory that the call may touch, in an order that only depends on what it has seen: where the call is made
// again, an address is another one after it has been visited.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

// What checks take does not count as memory of the library, for tests in which that fails.
template <typename T> struct Apart {
    using value_type = T;
    Apart() = default;
    template <typename Other> Apart(const Apart<Other> &) {}
    T *allocate(size_t count) {
        if (void *memory = malloc(count * sizeof(T))) return static_cast<T *>(memory);
        throw std::bad_alloc();
    }
    void deallocate(T *memory, size_t) { free(memory); }
    template <typename Other> bool operator==(const Apart<Other> &) const { return true; }
    template <typename Other> bool operator!=(const Apart<Other> &) const { return false; }
};
template <typename T> using List = std::vector<T, Apart<T>>;

enum class Use { READ, WRITTEN, BOTH };

// Of numbers, as library.py calls them, and others.
enum Numbers : int64_t { FLOATS, BFLOATS, HALVES, INT64, INT32, ANY = -1 };

class Walk {
  public:
    virtual ~Walk() = default;

    // The number of threads with which the call is made.
    virtual void threads(int64_t &) {}
    // Where the call notes how long it takes. Nobody asks when it is made again.
    virtual void clock(double *&, int64_t) {}
    // What the library takes for granted.
    virtual void expect(bool holds, const char *what) = 0;

    // Memory of which parts are used; they follow. It ends with the last one.
    template <typename P> void around(P *&at, int64_t bytes) { visit(at, bytes, &Walk::begin); }
    // A part of it.
    void part(const void *at, int64_t bytes, Use use, const char *what, int64_t numbers = ANY) {
        if (bytes > 0) use_part(const_cast<void *>(at), bytes, use, what, numbers);
    }
    // Memory of which all is used.
    template <typename P> void all(P *&at, int64_t bytes, Use use, const char *what, int64_t numbers = ANY) {
        around(at, bytes);
        part(at, bytes, use, what, numbers);
    }
    // Rows of `width` bytes, so far apart.
    template <typename P>
    void rows(P *&at, int64_t count, int64_t stride, int64_t width, Use use, const char *what, int64_t numbers) {
        expect(count >= 0 && width >= 0 && (count < 2 || stride >= width), what);
        around(at, count ? (count - 1) * stride + width : 0);
        for (int64_t row = 0; row < count; ++row) part(bytes_at(at, row * stride), width, use, what, numbers);
    }

    static const void *bytes_at(const void *at, int64_t bytes) { return static_cast<const char *>(at) + bytes; }

  private:
    // Where the memory is from now on.
    virtual void *begin(void *at, int64_t bytes) {
        (void)bytes;
        return at;
    }
    virtual void use_part(void *at, int64_t bytes, Use use, const char *what, int64_t numbers) = 0;

    template <typename P> void visit(P *&at, int64_t bytes, void *(Walk::*where)(void *, int64_t)) {
        void *before = const_cast<void *>(static_cast<const void *>(at)), *now = (this->*where)(before, bytes);
        if (now != before) at = static_cast<P *>(now);
    }
};

// A kind of calls.
struct CallKind {
    const char *name;
    int64_t bytes;  // of its arguments
    void (*walk)(void *arguments, Walk &walk);
    void (*run)(void *arguments);
};

List<CallKind> &kinds();

// Ends the process if the call is wrong. If calls are recorded, this one is.
void look_at(const CallKind &kind, void *arguments);

template <typename Call>
const CallKind kind_of = {Call::NAME, sizeof(Call),
                          [](void *call, Walk &walk) { static_cast<Call *>(call)->walk(walk); },
                          [](void *call) { (void)static_cast<Call *>(call)->run(); }};

template <typename Call> bool is_known() {
    kinds().push_back(kind_of<Call>);
    return true;
}

// Goes in place of the library's own function.
template <typename Call> auto checked(Call call) {
    look_at(kind_of<Call>, &call);
    return call.run();
}

inline int64_t size_of_type(int64_t type) { return type == 0 ? 4 : 2; }
