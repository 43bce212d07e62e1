// Checks and records calls, in the library that Python loads and in the program that makes recorded calls again.
#include "walk.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

#include "notes.h"
#include "vectors.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

List<CallKind> &kinds() {
    static List<CallKind> *all = new List<CallKind>;
    return *all;
}

namespace {

constexpr int64_t MOST_BYTES = 48 << 20, MOST_CALLS = 60;  // that a process records, and of each kind

class Check : public Walk {
  public:
    explicit Check(const char *name) : name_(name) {}
    void threads(int64_t &number) override { expect(number >= 1, "the number of threads"); }
    void clock(double *&at, int64_t count) override { all(at, count * (int64_t)sizeof *at, Use::BOTH, "seconds"); }
    void expect(bool holds, const char *what) override {
        if (!holds) refuse(what, "is not what the library needs", nullptr);
    }

  private:
    void use_part(void *at, int64_t bytes, Use, const char *what, int64_t numbers) override {
        if (!at) refuse(what, "is nowhere", nullptr);
#if defined(__SANITIZE_ADDRESS__)
        if (void *bad = __asan_region_is_poisoned(at, bytes)) refuse(what, "ends before the call's last number of it", bad);
#endif
        if (const char *wrong = wrong_by_its_note(at, bytes, numbers)) refuse(what, wrong, at);
    }

    [[noreturn]] void refuse(const char *what, const char *why, void *at) {
        fprintf(stderr, "ERROR: wrong call of %s: %s %s\n", name_, what, why);
#if defined(__SANITIZE_ADDRESS__)
        if (at) __asan_describe_address(at);
#endif
        (void)at;
        fflush(stderr);
        abort();
    }

    const char *name_;
};

// Calls with memory of the same sizes are recorded once.
class Shape : public Walk {
  public:
    void expect(bool, const char *) override {}
    uint64_t hash = 14695981039346656037u;
    int64_t bytes = 0;

  private:
    void use_part(void *, int64_t of_part, Use use, const char *, int64_t) override {
        hash = (hash ^ (uint64_t)of_part) * 1099511628211u;
        if (use != Use::WRITTEN) bytes += of_part;
    }
};

class Record : public Walk {
  public:
    explicit Record(FILE *into) : into_(into) {}
    void expect(bool, const char *) override {}

  private:
    void use_part(void *at, int64_t bytes, Use use, const char *, int64_t) override {
        if (use != Use::WRITTEN) fwrite(at, 1, bytes, into_);
    }
    FILE *into_;
};

FILE *record_of_this_process() {
    const char *folder = getenv("MOTET_RECORD_CALLS");
    if (!folder || !*folder) return nullptr;
    char path[512];
    snprintf(path, sizeof path, "%s/%d-%d.calls", folder, (int)getpid(), LANES);
    return fopen(path, "ab");
}

void record(const CallKind &kind, void *arguments) {
    static FILE *const into = record_of_this_process();
    if (!into) return;
    static std::mutex mutex;
    static int64_t left = MOST_BYTES;
    using Hashes = std::set<uint64_t, std::less<uint64_t>, Apart<uint64_t>>;
    static Hashes *seen = new Hashes;
    static List<int64_t> *calls = new List<int64_t>(kinds().size());
    Shape shape;
    kind.walk(arguments, shape);
    std::lock_guard<std::mutex> lock(mutex);
    size_t number = 0;
    while (strcmp(kinds()[number].name, kind.name)) ++number;
    if ((*calls)[number] == MOST_CALLS || shape.bytes > left || !seen->insert(shape.hash).second) return;
    ++(*calls)[number];
    left -= shape.bytes;
    fprintf(into, "%s\n", kind.name);
    fwrite(arguments, 1, kind.bytes, into);
    Record into_file(into);
    kind.walk(arguments, into_file);
    fflush(into);
}

}  // namespace

void look_at(const CallKind &kind, void *arguments) {
    Check check(kind.name);
    kind.walk(arguments, check);
    record(kind, arguments);
}
