// Work in stages, on threads of the library's own.
//
// A stage has units, which threads compute in any order; the next stage begins when all are done. Each thread begins
// with its share of the units, neighbours one after the other, and then takes those that others have not begun. So
// nobody waits for a thread that does not run because the machine is busy, only for units that were begun: whoever runs
// computes everything. Who computes a unit makes no difference to its result.
//
// A thread that waits looks for some microseconds and then sleeps: one that spins would take a core from the others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

struct Job;

class Stages {
  public:
    // `seconds`: gets what each kind of stage takes; null: no clock is read.
    explicit Stages(int64_t threads, double *seconds = nullptr);
    ~Stages();

    int64_t threads() const { return threads_; }

    // Adds to the stage: unit(i) for each i below `units`. A thread alone computes them at once.
    template <typename Unit> void add(int64_t units, Unit unit) {
        if (threads_ > 1) {
            if (units > 0) add_part(units, std::move(unit));
        } else {
            for (int64_t i = 0; i < units; ++i) unit(i);
        }
    }

    // Ends the stage. `kind`: where its time is added.
    void end_stage(int kind = 0);

    // Computes all stages. All units are done when it returns. If one throws, this throws it, whoever computed it, and
    // those after it may not be computed.
    void run();

  private:
    void add_part(int64_t units, std::function<void(int64_t)> unit);

    int64_t threads_;
    double *seconds_;
    double began_ = 0;
    std::shared_ptr<Job> job_;
};

// One stage.
template <typename Unit> void in_parallel(int64_t threads, int64_t units, const Unit &unit) {
    if (threads > units) threads = units;
    Stages stages(threads);
    stages.add(units, unit);
    stages.end_stage();
    stages.run();
}
