#include "bernoulli.h"

#include <algorithm>

#include "workspace.h"

namespace hotloop {
namespace {

double multiplications_of(const BernoulliNetwork& n) {
  double weights = 0;
  for (int64_t l = 0; l < n.count; ++l) weights += static_cast<double>(n.layers[l].inputs) * n.layers[l].outputs;
  return 2 * n.rows * weights;
}

}  // namespace

void bernoulli_gradient(const BernoulliNetwork& network, int64_t threads, const Team::Schedule& schedule) {
  const Kernels& k = kernels();
  const int64_t tasks = tasks_for(multiplications_of(network), std::min(network.rows, threads));
  const size_t work = rounded_up(k.bernoulli_work(network) * sizeof(float));
  Workspace workspace(tasks * work);
  Team::run(schedule, 1, tasks, [&](int64_t, int64_t task) {
    const Range rows{network.rows * task / tasks, network.rows * (task + 1) / tasks};
    k.bernoulli_rows(network, rows, reinterpret_cast<float*>(workspace.data() + task * work));
  });
}

}  // namespace hotloop
