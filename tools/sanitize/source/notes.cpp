#include "notes.h"

#include <pthread.h>

#include <atomic>
#include <map>
#include <mutex>

#include "walk.h"

#if defined(__SANITIZE_ADDRESS__)
// g++ has these, and no header for them.
extern "C" size_t __sanitizer_get_allocated_size(const volatile void *memory);
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void *, size_t),
                                                         void (*)(const volatile void *));

namespace {

struct Note {
    uintptr_t end;
    int64_t numbers;  // as walk.h calls them
};
using Notes = std::map<uintptr_t, Note, std::less<uintptr_t>, Apart<std::pair<const uintptr_t, Note>>>;

std::mutex mutex;
Notes &notes() {
    static Notes *all = new Notes;
    return *all;
}
// Who has the mutex. What it frees meanwhile was no tensor. Not a thread_local mark: the first look at one may allocate,
// and what that frees would be told to freed() again, without an end.
std::atomic<pthread_t> holder{};

void forget(uintptr_t begin, uintptr_t end) {
    auto next = notes().lower_bound(begin);
    if (next != notes().begin() && std::prev(next)->second.end > begin) --next;
    while (next != notes().end() && next->first < end) next = notes().erase(next);
}

template <typename Do> void with_notes(const Do &todo) {
    if (holder == pthread_self()) return;
    std::lock_guard<std::mutex> lock(mutex);
    holder = pthread_self();
    todo();
    holder = pthread_t{};
}

void freed(const volatile void *memory) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory);
    if (at) with_notes([&] { forget(at, at + __sanitizer_get_allocated_size(memory)); });
}

}  // namespace

// Of a tensor whose address somebody has asked for.
extern "C" void motet_note(uintptr_t at, int64_t bytes, int64_t numbers) {
    static const int hooked = __sanitizer_install_malloc_and_free_hooks([](const volatile void *, size_t) {}, freed);
    (void)hooked;
    with_notes([&] {
        forget(at, at + bytes);
        notes()[at] = {at + bytes, numbers};
    });
}

const char *wrong_by_its_note(const void *at, int64_t bytes, int64_t numbers) {
    const char *wrong = nullptr;
    with_notes([&] {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
        auto found = notes().upper_bound(begin);
        if (found == notes().begin() || (--found)->second.end <= begin) return;
        if (found->second.numbers != ANY && numbers != ANY && found->second.numbers != numbers)
            wrong = "has numbers of another type";
        if (begin + bytes > found->second.end) wrong = "goes beyond its tensor";
    });
    return wrong;
}

#else

const char *wrong_by_its_note(const void *, int64_t, int64_t) { return nullptr; }

#endif
