// Makes recorded calls again, on one, two and four threads: all results must be the same, bit for bit. All memory is as
// large as the call says that it is, and what a call only writes holds no numbers before.
#include <cstdio>
#include <cstring>
#include <string>

#include "tiles.h"
#include "walk.h"

#if defined(MOTET_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes)
#endif

namespace {

constexpr int NO_NUMBER = 0xff;

class Again : public Walk {
  public:
    Again(FILE *from, int64_t threads) : from_(from), threads_(threads) {}
    ~Again() {
        for (void *memory : memory_) free(memory);
    }
    void threads(int64_t &number) override {
        number = threads_;
        takes_threads = true;
    }
    void clock(double *&at, int64_t) override { at = nullptr; }
    void expect(bool, const char *) override {}  // whoever makes the call checks it

    std::string results() const {
        std::string all;
        for (const auto &one : written_) all.append(one.first, one.second);
        return all;
    }

    void read(void *into, int64_t bytes) {
        if (fread(into, 1, bytes, from_) == (size_t)bytes) return;
        fprintf(stderr, "ERROR: a record ends too early\n");
        exit(2);
    }

    bool takes_threads = false;

  private:
    void *begin(void *, int64_t bytes) override {
        void *memory = malloc(bytes);
        memset(memory, NO_NUMBER, bytes);
        ASAN_POISON_MEMORY_REGION(memory, bytes);
        memory_.push_back(memory);
        return memory;
    }
    void use_part(void *at, int64_t bytes, Use use, const char *, int64_t) override {
        ASAN_UNPOISON_MEMORY_REGION(at, bytes);
        if (use != Use::WRITTEN) read(at, bytes);
        if (use != Use::READ) written_.push_back({static_cast<const char *>(at), (size_t)bytes});
    }

    FILE *from_;
    int64_t threads_;
    List<void *> memory_;
    List<std::pair<const char *, size_t>> written_;
};

// Whether there was one, and it is the same on any number of threads.
bool replay(FILE *file, int64_t &calls, bool &same) {
    char name[64];
    if (!fgets(name, sizeof name, file)) return false;
    name[strcspn(name, "\n")] = 0;
    const CallKind *kind = nullptr;
    for (const CallKind &one : kinds())
        if (!strcmp(one.name, name)) kind = &one;
    if (!kind) {
        fprintf(stderr, "ERROR: nobody knows calls of %s\n", name);
        exit(2);
    }
    const long begin = ftell(file);
    std::string expected;
    for (int64_t threads : {1, 2, 4}) {
        fseek(file, begin, SEEK_SET);
        List<int64_t> arguments(kind->bytes / sizeof(int64_t));
        Again again(file, threads);
        again.read(arguments.data(), kind->bytes);
        kind->walk(arguments.data(), again);
        look_at(*kind, arguments.data());
        kind->run(arguments.data());
        if (threads == 1)
            expected = again.results();
        else if (expected != again.results()) {
            fprintf(stderr, "ERROR: call %lld, of %s, gives another result on %lld threads\n", (long long)calls, name,
                    (long long)threads);
            same = false;
        }
        if (!again.takes_threads) break;
    }
    ++calls;
    return true;
}

}  // namespace

int main(int count, char **paths) {
#if defined(MOTET_TILES)
    constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;  // as motet_kernels/cpp/amx_permission.py does
    if (syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA)) {
        fprintf(stderr, "ERROR: Linux does not give this process the CPU's tiles\n");
        return 2;
    }
#endif
    int64_t calls = 0;
    bool same = true;
    for (int i = 1; i < count; ++i) {
        const std::string path = paths[i], of_these = "-" + std::to_string(LANES) + ".calls";
        if (path.size() < of_these.size() || path.compare(path.size() - of_these.size(), of_these.size(), of_these))
            continue;  // other instructions have other layouts
        FILE *file = fopen(path.c_str(), "rb");
        if (!file) return 2;
        while (replay(file, calls, same)) {
        }
        fclose(file);
    }
    printf("%lld calls\n", (long long)calls);
    return same && calls ? 0 : 1;
}
