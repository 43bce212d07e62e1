// One parallel region on the OpenMP threads that torch already has: the library brings no threads of its own, which
// would compete with them for the cores.
#pragma once

#include <cstdint>

struct Threads {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    void (*barrier)();
    int (*number)();
    int (*count)();
};

// Null pointers until motet_use_threads() is called: then everything runs in the calling thread.
extern Threads threads;

// What a region's function is told: the number of its thread, and how many there are.
struct Share {
    int thread, threads;
    void barrier() const {
        if (threads > 1) ::threads.barrier();
    }
};

template <typename Work> void in_parallel(int wanted, const Work &work) {
    if (wanted <= 1 || !threads.parallel) {
        work(Share{0, 1});
        return;
    }
    auto run = [](void *data) { (*static_cast<const Work *>(data))(Share{threads.number(), threads.count()}); };
    threads.parallel(run, const_cast<Work *>(&work), (unsigned)wanted, 0);
}
