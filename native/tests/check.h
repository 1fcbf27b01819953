// What the check programs share: requirements that end them, numbers that are drawn and compared, and pools of threads.
#pragma once

#include <errno.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "../src/team.h"

namespace check {

using Numbers = std::vector<float>;
using Exact = std::vector<double>;
using hotloop::Team;

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, what);
  std::exit(1);
}

inline Numbers drawn(int64_t count, unsigned seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Numbers numbers(count);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

inline void require_close(const Numbers& ours, const Exact& expected, const char* what) {
  double largest = 1, error = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    require(!std::isnan(ours[i]), what);
    largest = std::max(largest, std::abs(expected[i]));
    error = std::max(error, std::abs(ours[i] - expected[i]));
  }
  require(error < 1e-5 * largest, what);
}

// Pools: threads that start at once, threads that never do, and threads that come when all is over.
struct Pool {
  std::vector<std::thread> threads;
  std::vector<std::function<void()>> late;
  ~Pool() {
    for (auto& task : late) task();
    for (auto& thread : threads) thread.join();
  }
  Team::Schedule at_once() {
    return [this](std::function<void()> task) { threads.emplace_back(std::move(task)); };
  }
  Team::Schedule when_over() {
    return [this](std::function<void()> task) { late.push_back(std::move(task)); };
  }
};

const Team::Schedule NEVER = [](std::function<void()>) {};

// Calls work(caller) on so many threads at once.
template <class Work>
void from_threads(int callers, Work work) {
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; ++caller) threads.emplace_back(work, caller);
  for (auto& thread : threads) thread.join();
}

}  // namespace check
