// What handlers on TBB's threads share: the engine, a stream for each thread, and how many threads a call may use.
#pragma once

#include <cstdint>
#include <utility>

#include "dnnl.hpp"
#include "tbb/parallel_for.h"
#include "tbb/task_arena.h"

namespace hotloop {

inline const dnnl::engine& engine() {
  static const dnnl::engine& shared = *new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return shared;
}

inline dnnl::stream& stream() {
  thread_local dnnl::stream own(engine());
  return own;
}

// TBB by itself uses the cores that this process may run on.
inline int64_t available_threads() { return tbb::this_task_arena::max_concurrency(); }

// Run `work` on at most `threads` threads; plans made within know that number and count on it.
template <class Work>
void run_on(int64_t threads, Work&& work) {
  if (threads >= available_threads()) {
    work();
  } else {
    tbb::task_arena(static_cast<int>(threads)).execute(std::forward<Work>(work));
  }
}

// Calls work(task) for every task, at most one on a thread at a time, and returns when all are done.
template <class Work>
void over_tasks(int64_t tasks, Work work) {
  if (tasks == 1) return work(0);
  tbb::parallel_for(int64_t{0}, tasks, work, tbb::static_partitioner());
}

}  // namespace hotloop
