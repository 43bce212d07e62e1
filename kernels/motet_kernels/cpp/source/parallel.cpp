#include "parallel.h"

#include "tiles.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto LOOKS = std::chrono::microseconds(50);  // how long a thread spins before it sleeps
constexpr int LOOKS_PER_CLOCK = 32;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins for a while → true if the condition came true.
template <typename Condition> bool looked(const Condition &condition) {
    for (auto end = Clock::now() + LOOKS; Clock::now() < end;)
        for (int i = 0; i < LOOKS_PER_CLOCK; ++i) {
            if (condition()) return true;
            relax();
        }
    return false;
}

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// Threads that sleep until a condition holds. The thread that makes the condition true calls wake(), which takes no
// lock if no thread sleeps.
class Sleepers {
  public:
    template <typename Condition> void sleep_until(const Condition &condition) {
        std::unique_lock<std::mutex> lock(mutex_);
        ++count_;
        changed_.wait(lock, condition);
        --count_;
    }
    void wake() {
        if (!count_) return;
        { std::lock_guard<std::mutex> lock(mutex_); }  // every counted thread now waits, or has seen the change
        changed_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::atomic<int> count_{0};
};

struct Part {
    std::function<void(int64_t)> unit;
    int64_t units;
};

struct Stage {
    size_t first, end;  // parts
    int64_t units;
    int kind;
};

struct alignas(64) Count {
    std::atomic<int64_t> units{0};
};

}  // namespace

struct Job {
    std::vector<Part> parts;
    std::vector<Stage> stages;
    int64_t threads = 0;
    std::vector<std::atomic<int64_t>> taken;  // [threads][parts] the next unit of each share; may be beyond its end
    std::vector<Count> done;                  // units of each stage
    Sleepers sleepers;
    std::atomic<bool> failed{false};
    std::exception_ptr failure;  // of the first unit that failed; to be read when all units are done

    void begin(int64_t most_threads) {
        threads = most_threads;
        taken = std::vector<std::atomic<int64_t>>(threads * parts.size());
        done = std::vector<Count>(stages.size());
    }

    // Computes the rest of a thread's share of a part.
    int64_t compute(size_t number, int64_t thread) {
        const Part &part = parts[number];
        const int64_t first = part.units * thread / threads, count = part.units * (thread + 1) / threads - first;
        std::atomic<int64_t> &next = taken[thread * parts.size() + number];
        int64_t computed = 0;
        while (next.load(std::memory_order_relaxed) < count) {
            int64_t mine = next.fetch_add(1, std::memory_order_relaxed);
            if (mine >= count) break;
            compute_unit(part, first + mine);
            ++computed;
        }
        return computed;
    }

    // If a unit throws, the exception is kept for the caller. Later units are skipped and count as done, so that no
    // thread waits for a skipped unit.
    void compute_unit(const Part &part, int64_t number) {
        if (failed.load(std::memory_order_relaxed)) return;
        try {
            part.unit(number);
        } catch (...) {
            if (!failed.exchange(true)) failure = std::current_exception();
        }
    }

    // The work of one thread: in each stage, first its own share, then units that no other thread has begun. Then it
    // waits for the stage's end.
    void work(int64_t thread, double *seconds) {
        double began = seconds ? now() : 0;
        for (size_t s = 0; s < stages.size(); ++s) {
            const Stage &stage = stages[s];
            std::atomic<int64_t> &all_done = done[s].units;
            auto ended = [&] { return all_done == stage.units; };
            if (ended()) continue;
            int64_t computed = 0;
            for (int64_t other = 0; other < threads; ++other)
                for (size_t part = stage.first; part < stage.end; ++part)
                    computed += compute(part, (thread + other) % threads);
            if (computed && all_done.fetch_add(computed) + computed == stage.units)
                sleepers.wake();
            else if (!looked(ended))
                sleepers.sleep_until(ended);
            if (seconds) {
                double ending = now();
                seconds[stage.kind] += ending - began;
                began = ending;
            }
        }
    }
};

namespace {

// The threads that help the library's callers. They never end: they sleep while there is no job.
class Helpers {
  public:
    // Wakes sleeping helpers: they spin until the job comes, which is soon.
    void rouse(int64_t count) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            hire(count);
            ++calls_;
        }
        sleepers_.wake();
    }

    void run(const std::shared_ptr<Job> &job, double *seconds) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            ++calls_;
        }
        sleepers_.wake();
        job->work(0, seconds);
        std::lock_guard<std::mutex> lock(mutex_);
        if (job_ == job) job_ = nullptr;
    }

  private:
    void hire(int64_t count) {
        if (hired_ >= count) return;
        sigset_t every, before;  // helpers block all signals: the caller's threads handle them
        sigfillset(&every);
        pthread_sigmask(SIG_BLOCK, &every, &before);
        try {
            while (hired_ < count) {
                std::thread([this, number = hired_ + 1] { help(number); }).detach();
                ++hired_;
            }
        } catch (const std::exception &) {  // no more threads can be made: those that exist compute everything
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void help(int64_t number) {
        for (int64_t seen = 0;;) {
            auto called = [&] { return calls_ != seen; };
            if (!looked(called)) sleepers_.sleep_until(called);
            std::shared_ptr<Job> job;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                seen = calls_;
                job = job_;
            }
            if (job && number < job->threads) job->work(number, nullptr);
        }
    }

    std::mutex mutex_;
    std::shared_ptr<Job> job_;  // the latest
    std::atomic<int64_t> calls_{0};
    int64_t hired_ = 0;
    Sleepers sleepers_;
};

std::atomic<Helpers *> the_helpers{nullptr};

// A forked child has none of its parent's helper threads, but a copy of their state: counts of sleeping threads, a
// mutex that a helper may hold. So the child starts with new helpers.
void forget_helpers() { the_helpers = nullptr; }

Helpers &helpers() {
    [[maybe_unused]] static const int watched = pthread_atfork(nullptr, nullptr, forget_helpers);
    Helpers *present = the_helpers;
    if (!present) {
        auto *fresh = new Helpers;  // never deleted: threads use it until the process has ended
        if (the_helpers.compare_exchange_strong(present, fresh))
            present = fresh;
        else
            delete fresh;
    }
    return *present;
}

}  // namespace

Stages::Stages(int64_t threads, double *seconds) : threads_(threads > 1 ? threads : 1), seconds_(seconds) {
    tiles::forget();
    if (threads_ > 1) {
        helpers().rouse(threads_ - 1);
        job_ = std::make_shared<Job>();
    } else if (seconds_) {
        began_ = now();
    }
}

Stages::~Stages() = default;

void Stages::add_part(int64_t units, std::function<void(int64_t)> unit) {
    job_->parts.push_back({std::move(unit), units});
}

void Stages::end_stage(int kind) {
    if (!job_) {
        if (!seconds_) return;
        double ending = now();
        seconds_[kind] += ending - began_;
        began_ = ending;
        return;
    }
    size_t first = job_->stages.empty() ? 0 : job_->stages.back().end, end = job_->parts.size();
    int64_t units = 0;
    for (size_t part = first; part < end; ++part) units += job_->parts[part].units;
    if (units) job_->stages.push_back({first, end, units, kind});
}

void Stages::run() {
    if (!job_ || job_->stages.empty()) return;
    job_->begin(threads_);
    helpers().run(job_, seconds_);
    if (job_->failed) std::rethrow_exception(job_->failure);
}
