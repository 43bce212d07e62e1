// Work in stages, on the library's own threads.
//
// A stage has units, which threads compute in any order; the next stage begins when all units are done. Each thread
// begins with its share of the units, in order, and then takes units that other threads have not begun. So a thread
// that gets no core delays the others only if it has begun a unit. A unit's result does not depend on the thread that
// computes it.
//
// A waiting thread spins for some microseconds and then sleeps: longer spinning would take a core from other threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

struct Job;

class Stages {
  public:
    // `seconds`: gets the time of each kind of stage; null: no clock is read.
    explicit Stages(int64_t threads, double *seconds = nullptr);
    ~Stages();

    int64_t threads() const { return threads_; }

    // Adds unit(i) for each i below `units` to the stage. With one thread, this call computes the units.
    template <typename Unit> void add(int64_t units, Unit unit) {
        if (threads_ > 1) {
            if (units > 0) add_part(units, std::move(unit));
        } else {
            for (int64_t i = 0; i < units; ++i) unit(i);
        }
    }

    // Ends the stage. `kind`: the index in `seconds` for its time.
    void end_stage(int kind = 0);

    // Computes all stages, and returns when all units are done. If a unit throws, on any thread, run() throws the same
    // exception, and later units may be skipped.
    void run();

  private:
    void add_part(int64_t units, std::function<void(int64_t)> unit);

    int64_t threads_;
    double *seconds_;
    double began_ = 0;
    std::shared_ptr<Job> job_;
};

// Computes one stage.
template <typename Unit> void in_parallel(int64_t threads, int64_t units, const Unit &unit) {
    if (threads > units) threads = units;
    Stages stages(threads);
    stages.add(units, unit);
    stages.end_stage();
    stages.run();
}
