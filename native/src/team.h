// Threads of a borrowed pool that work through phases together: every task of a phase is done before the next begins.
//
// The calling thread takes part and never depends on the others: a task that nobody has begun is done by whoever is free,
// so a pool whose threads are all busy (perhaps in calls like this one) costs time, never a deadlock. A worker takes the
// task of its own number first in every phase, so that the weights it reads stay in its core's cache.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace hotloop {

// How many of `most` tasks so many multiplications are worth: waking a thread takes some 10 us.
inline int64_t tasks_for(double multiplications, int64_t most) {
  constexpr double WORTH_A_THREAD = 500'000;
  return std::max<int64_t>(1, std::min(most, static_cast<int64_t>(multiplications / WORTH_A_THREAD)));
}

class Team {
 public:
  using Schedule = std::function<void(std::function<void()>)>;  // runs a function soon, on another thread
  using Body = std::function<void(int64_t phase, int64_t task)>;

  // `body` must not throw.
  static void run(const Schedule& schedule, int64_t phases, int64_t tasks, Body body) {
    auto team = std::make_shared<Team>(phases, tasks, std::move(body));
    for (int64_t helper = 1; helper < tasks; ++helper) {
      schedule([team, helper] { team->join(helper); });
    }
    team->work(0);
    team->close();
  }

  Team(int64_t phases, int64_t tasks, Body body)
      : phases_(phases), tasks_(tasks), body_(std::move(body)), slots_(new Slot[tasks]) {}

 private:
  static constexpr int PATIENCE = 500;   // pauses, some 10 us, before the task of a worker that is at work is taken over
  static constexpr int SPINS = 20000;    // pauses before a waiting thread offers its core to others

  struct alignas(64) Slot {
    std::atomic<int64_t> next{0};  // the phase in which this task waits to be taken
    std::atomic<bool> joined{false};
  };

  void join(int64_t helper) {
    inside_.fetch_add(1);
    if (!closed_.load()) {
      slots_[helper].joined.store(true);
      work(helper);
    }
    inside_.fetch_sub(1);
  }

  void close() {
    closed_.store(true);
    wait([this] { return inside_.load() == 0; });
  }

  void work(int64_t own) {
    for (int64_t phase = 0; phase < phases_; ++phase) {
      wait([&] { return done_.load(std::memory_order_acquire) >= phase * tasks_; });
      take(own, phase);
      for (int64_t i = 1; i < tasks_; ++i) {
        const int64_t other = (own + i) % tasks_;
        for (int spins = 0; spins < PATIENCE && slots_[other].joined.load(std::memory_order_relaxed) &&
                            slots_[other].next.load(std::memory_order_relaxed) == phase;
             ++spins) {
          __builtin_ia32_pause();
        }
        take(other, phase);
      }
    }
    wait([&] { return done_.load(std::memory_order_acquire) >= phases_ * tasks_; });
  }

  void take(int64_t task, int64_t phase) {
    int64_t waiting = phase;
    if (!slots_[task].next.compare_exchange_strong(waiting, phase + 1, std::memory_order_acq_rel)) return;
    body_(phase, task);
    done_.fetch_add(1, std::memory_order_acq_rel);
  }

  template <class Condition>
  static void wait(Condition met) {
    for (int spins = 0; !met(); ++spins) {
      if (spins < SPINS) {
        __builtin_ia32_pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  const int64_t phases_, tasks_;
  const Body body_;
  const std::unique_ptr<Slot[]> slots_;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace hotloop
