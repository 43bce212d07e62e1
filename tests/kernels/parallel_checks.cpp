// What parallel.h promises, with units that note who computes them and when. Prints what does not hold.
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "parallel.h"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::atomic<int> failures{0};

void expect(bool holds, const char *what) {
    if (!holds && failures++ < 20) printf("%s\n", what);
}

template <typename Condition> bool soon(const Condition &condition) {
    for (auto end = Clock::now() + 5s; !condition(); std::this_thread::yield())
        if (Clock::now() > end) return false;
    return true;
}

class Threads {
  public:
    void note() {
        std::lock_guard<std::mutex> lock(mutex_);
        seen_.insert(std::this_thread::get_id());
    }
    size_t count() {
        std::lock_guard<std::mutex> lock(mutex_);
        return seen_.size();
    }

  private:
    std::mutex mutex_;
    std::set<std::thread::id> seen_;
};

// Stages of two parts, some of them empty. Each unit runs once, after all units of the stages before.
void stages_in_order(int64_t threads, int64_t units, int64_t count, std::chrono::microseconds pause) {
    std::vector<std::atomic<int>> runs(units * count);
    std::vector<std::atomic<int64_t>> done(count);
    Stages stages(threads);
    for (int64_t stage = 0; stage < count; ++stage) {
        const int64_t here = stage % 5 == 4 ? 0 : units, first = here / 3;
        auto unit = [&, stage](int64_t number) {
            if (stage > 0) expect(done[stage - 1] == ((stage - 1) % 5 == 4 ? 0 : units), "a stage began too early");
            if (pause.count() && number % 7 == 3) std::this_thread::sleep_for(pause);
            expect(runs[stage * units + number]++ == 0, "a unit ran twice");
            ++done[stage];
        };
        stages.add(first, unit);
        stages.add(here - first, [=](int64_t number) { unit(first + number); });
        stages.end_stage();
    }
    stages.run();
    for (int64_t stage = 0; stage < count; ++stage)
        expect(done[stage] == (stage % 5 == 4 ? 0 : units), "run() returned before all units were done");
}

// Two units that wait for each other: one thread alone would wait for ever.
void helpers_help(std::chrono::milliseconds idle) {
    in_parallel(2, 2, [](int64_t) {});
    std::this_thread::sleep_for(idle);
    std::atomic<int> begun{0};
    in_parallel(2, 2, [&](int64_t) {
        ++begun;
        expect(soon([&] { return begun == 2; }), "nobody helped");
    });
}

// One unit ends after all others: whoever is not in it computes the others, whosever share they are.
void shares_of_others_are_taken(int64_t long_one) {
    std::atomic<int> others{0};
    in_parallel(2, 8, [&](int64_t unit) {
        if (unit == long_one)
            expect(soon([&] { return others == 7; }), "a thread waited beside units that nobody had begun");
        else
            ++others;
    });
}

void no_more_threads_than_allowed() {
    in_parallel(4, 4, [](int64_t) { std::this_thread::sleep_for(2ms); });
    Threads threads;
    in_parallel(2, 40, [&](int64_t) {
        threads.note();
        std::this_thread::sleep_for(500us);
    });
    expect(threads.count() <= 2, "more threads computed than were allowed");
}

// A helper that sleeps within a job, while another thread ends the stage, goes on with the next stage.
void sleepers_within_a_job_wake() {
    Stages stages(2);
    stages.add(2, [](int64_t unit) { std::this_thread::sleep_for(unit ? 20ms : 0ms); });
    stages.end_stage();
    std::atomic<int> begun{0};
    stages.add(2, [&](int64_t) {
        ++begun;
        expect(soon([&] { return begun == 2; }), "a thread that slept in a stage missed the next one");
    });
    stages.end_stage();
    stages.run();
}

void helpers_take_no_signals() {
    const auto caller = std::this_thread::get_id();
    std::atomic<int> begun{0};
    in_parallel(2, 2, [&](int64_t) {
        ++begun;
        soon([&] { return begun == 2; });
        if (std::this_thread::get_id() == caller) return;
        sigset_t blocked;
        pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
        expect(sigismember(&blocked, SIGINT) && sigismember(&blocked, SIGTERM), "a helper takes signals");
    });
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    expect(!sigismember(&blocked, SIGINT), "the caller takes no signals any more");
}

void callers_at_the_same_time() {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller)
        callers.emplace_back([] {
            for (int call = 0; call < 300; ++call) stages_in_order(1 + call % 4, call % 50, 6, 0us);
        });
    for (std::thread &caller : callers) caller.join();
}

void idle_helpers_sleep() {
    in_parallel(4, 4, [](int64_t) { std::this_thread::sleep_for(2ms); });
    std::this_thread::sleep_for(20ms);
    const clock_t before = clock();
    std::this_thread::sleep_for(200ms);
    expect(clock() - before < CLOCKS_PER_SEC / 10, "helpers compute without a job");
}

// From whichever thread. Nobody waits for what is left, and nobody computes what comes after it.
void failures_reach_the_caller(bool of_a_helper) {
    const auto caller = std::this_thread::get_id();
    std::atomic<int> begun{0}, later{0};
    Stages stages(2);
    stages.add(2, [&](int64_t) {
        ++begun;
        expect(soon([&] { return begun == 2; }), "nobody helped");
        if ((std::this_thread::get_id() != caller) == of_a_helper) throw std::runtime_error("no room");
    });
    stages.end_stage();
    stages.add(40, [&](int64_t) { ++later; });
    stages.end_stage();
    try {
        stages.run();
        expect(false, "a failure was lost");
    } catch (const std::runtime_error &error) {
        expect(error.what() == std::string("no room"), "another failure came");
    }
    expect(later == 0, "units were computed after one before them had failed");
}

void one_thread_keeps_the_order() {
    std::vector<int64_t> seen;
    in_parallel(1, 5, [&](int64_t unit) { seen.push_back(unit); });
    expect(seen == std::vector<int64_t>{0, 1, 2, 3, 4}, "one thread changed the order");
}

}  // namespace

int main() {
    setvbuf(stdout, nullptr, _IONBF, 0);
    one_thread_keeps_the_order();
    for (int64_t threads : {1, 2, 3, 8})
        for (int64_t units : {1, 2, 40}) {
            stages_in_order(threads, units, 12, 0us);
            stages_in_order(threads, units, 12, 300us);
        }
    for (int call = 0; call < 200; ++call) stages_in_order(3, 500, 4, 0us);
    for (auto idle : {0ms, 20ms}) helpers_help(idle);
    for (int64_t unit = 0; unit < 8; ++unit) shares_of_others_are_taken(unit);
    for (int call = 0; call < 5; ++call) sleepers_within_a_job_wake();
    for (int call = 0; call < 20; ++call) failures_reach_the_caller(call % 2);
    no_more_threads_than_allowed();
    helpers_take_no_signals();
    callers_at_the_same_time();
    idle_helpers_sleep();
    return failures ? 1 : 0;
}
