#include "bernoulli.h"

#include <algorithm>

#include "workspace.h"

namespace hotloop {
namespace {

// Below so many multiplications a second thread costs more than it gains: waking it takes some 10 us.
constexpr int64_t WORTH_A_THREAD = 500'000;

int64_t tasks_for(const BernoulliNetwork& n, int64_t threads) {
  int64_t weights = 0;
  for (int64_t l = 0; l < n.count; ++l) weights += n.layers[l].inputs * n.layers[l].outputs;
  return std::clamp<int64_t>(2 * n.rows * weights / WORTH_A_THREAD, 1, std::min(n.rows, threads));
}

}  // namespace

void bernoulli_gradient(const BernoulliNetwork& network, int64_t threads, const Team::Schedule& schedule) {
  const Kernels& k = kernels();
  const int64_t tasks = tasks_for(network, threads);
  const size_t work = rounded_up(k.bernoulli_work(network) * sizeof(float));
  Workspace workspace(tasks * work);
  Team::run(schedule, 1, tasks, [&](int64_t, int64_t task) {
    const Range rows{network.rows * task / tasks, network.rows * (task + 1) / tasks};
    k.bernoulli_rows(network, rows, reinterpret_cast<float*>(workspace.data() + task * work));
  });
}

}  // namespace hotloop
