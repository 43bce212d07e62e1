// Reads a part of a file on several threads, and sums it up while it is in their caches: one core alone can't read as
// fast as the memory gives.
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "border.h"
#include "parallel.h"

namespace {

constexpr int64_t BYTES_OF_A_UNIT = 128 * 1024;

// Returns 0 or the number of an error.
int read_all(int file, int64_t at, char *to, int64_t bytes, int flags) {
#ifdef __linux__
    while (bytes > 0) {
        const iovec into{to, (size_t)bytes};
        const ssize_t count = preadv2(file, &into, 1, at, flags);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        if (!count) return ENODATA;  // the file ends before
        to += count, at += count, bytes -= count;
    }
    return 0;
#else
    return ENOSYS;
#endif
}

// The sum of all words; of what is no whole word, the sum of the bytes.
uint64_t sum_of(const char *from, int64_t bytes) {
    uint64_t sum = 0, word;
    int64_t at = 0;
    for (; at + (int64_t)sizeof word <= bytes; at += sizeof word) {
        memcpy(&word, from + at, sizeof word);
        sum += word;
    }
    for (; at < bytes; ++at) sum += (uint8_t)from[at];
    return sum;
}

}  // namespace

extern "C" {

// Reads these bytes of an open file, with the flags of preadv2. `sum`: gets their sum, see sum_of. Returns 0 or the
// number of an error.
int64_t motet_read_file(int64_t file, int64_t at, char *to, int64_t bytes, int64_t flags, int64_t threads,
                        uint64_t *sum) {
    return answer_of([&]() -> int64_t {
        std::atomic<uint64_t> total{0};
        std::atomic<int> error{0};
        in_parallel(threads, (bytes + BYTES_OF_A_UNIT - 1) / BYTES_OF_A_UNIT, [&](int64_t unit) {
            const int64_t begin = unit * BYTES_OF_A_UNIT, size = std::min(BYTES_OF_A_UNIT, bytes - begin);
            const int found = read_all((int)file, at + begin, to + begin, size, (int)flags);
            if (found)
                error = found;
            else
                total += sum_of(to + begin, size);
        });
        *sum = total;
        return error;
    });
}
}
