#include "tied.h"

#include <algorithm>

#include "workspace.h"

namespace hotloop {
namespace {

Range share(int64_t count, int64_t tasks, int64_t task) { return {count * task / tasks, count * (task + 1) / tasks}; }

// Runs pass(items, work, square) for every part of the items, then adds up the parts of `product` [users, units] and of the
// squares, always in the same order.
template <class Pass>
double over_items(const Tied& t, float* product, int64_t threads, const Team::Schedule& schedule, Pass pass) {
  const Kernels& k = kernels();
  const int64_t tasks = tasks_for(static_cast<double>(t.items) * t.users * t.units, std::min(t.items, threads));
  const int64_t across = (t.units + k.width - 1) / k.width * k.width;
  const size_t bytes = rounded_up(k.tied_work(t) * sizeof(float) + ALIGNMENT);
  Workspace workspace(tasks * bytes);
  const auto square = [&](int64_t task) { return reinterpret_cast<double*>(workspace.data() + task * bytes); };
  const auto work = [&](int64_t task) { return reinterpret_cast<float*>(workspace.data() + task * bytes + ALIGNMENT); };
  Team::run(schedule, 2, tasks, [&](int64_t phase, int64_t task) {
    if (phase == 0) {
      *square(task) = pass(share(t.items, tasks, task), work(task));
      return;
    }
    const Range users = share(t.users, tasks, task);
    for (int64_t user = users.begin; user < users.end; ++user) {
      for (int64_t unit = 0; unit < t.units; ++unit) {
        float sum = 0.0f;
        for (int64_t part = 0; part < tasks; ++part) sum += work(part)[user * across + unit];
        product[user * t.units + unit] = sum;
      }
    }
  });
  double squares = 0;
  for (int64_t task = 0; task < tasks; ++task) squares += *square(task);
  return squares;
}

}  // namespace

void tied_forward(const TiedForward& pass, float* next, int64_t threads, const Team::Schedule& schedule) {
  over_items(pass.layer, next, threads, schedule, [&](Range items, float* work) {
    kernels().tied_forward(pass, items, work);
    return 0.0;
  });
}

void tied_refeed(const TiedRefeed& pass, float* back, float* squares, int64_t threads, const Team::Schedule& schedule) {
  *squares = static_cast<float>(over_items(pass.layer, back, threads, schedule, [&](Range items, float* work) {
    return kernels().tied_refeed(pass, items, work);
  }));
}

void tied_gradient(const TiedGradient& pass, float* back, int64_t threads, const Team::Schedule& schedule) {
  over_items(pass.layer, back, threads, schedule, [&](Range items, float* work) {
    kernels().tied_gradient(pass, items, work);
    return 0.0;
  });
}

}  // namespace hotloop
