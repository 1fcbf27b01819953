#include "norm.h"

#include <algorithm>
#include <cmath>

#include "runtime.h"
#include "workspace.h"

namespace hotloop {
namespace {

// Numbers below which a second thread costs more than it gains: waking it takes some 10 us.
constexpr int64_t WORTH_A_THREAD = 50'000;

int64_t tasks_for(int64_t rows, int64_t channels, int64_t threads) {
  return std::clamp<int64_t>(rows * channels / WORTH_A_THREAD, 1, std::min(rows, threads));
}

Range share(int64_t rows, int64_t tasks, int64_t task) { return {rows * task / tasks, rows * (task + 1) / tasks}; }

// What one task works with: two sums in doubles, and four floats a channel besides the space of the kernels.
struct Space {
  double *first, *second;
  float *slope, *mean, *tilt, *base, *work;

  static size_t bytes(int64_t channels) {
    const int64_t floats = 4 * channels + kernels().norm_work(channels);
    return rounded_up(2 * channels * sizeof(double) + floats * sizeof(float));
  }

  Space(char* memory, int64_t channels) {
    first = reinterpret_cast<double*>(memory);
    second = first + channels;
    slope = reinterpret_cast<float*>(second + channels);
    mean = slope + channels;
    tilt = mean + channels;
    base = tilt + channels;
    work = base + channels;
  }
};

// Runs sum(rows, space) for every task, then finish(task, rows, space, total), each with the sums of all tasks.
template <class Sum, class Finish>
void in_two_passes(int64_t rows, int64_t channels, int64_t threads, Sum sum, Finish finish) {
  const int64_t tasks = tasks_for(rows, channels, threads);
  const size_t bytes = Space::bytes(channels);
  Workspace workspace(tasks * bytes);
  const auto space = [&](int64_t task) { return Space(workspace.data() + task * bytes, channels); };
  const auto total = [&](bool second, int64_t c) {
    double all = 0;
    for (int64_t other = 0; other < tasks; ++other) all += (second ? space(other).second : space(other).first)[c];
    return all;
  };
  // On the threads of the convolutions beside it: XLA's would have to wake up in between, and those go to sleep.
  run_on(threads, [&] {
    over_tasks(tasks, [&](int64_t task) {
      const Space own = space(task);
      std::fill_n(own.first, 2 * channels, 0.0);
      sum(share(rows, tasks, task), own);
    });
    over_tasks(tasks, [&](int64_t task) { finish(task, share(rows, tasks, task), space(task), total); });
  });
}

}  // namespace

void normalise(const Norm& norm, const float* scale, const float* offset, float epsilon, float* mean, float* variance,
               int64_t threads) {
  const Kernels& k = kernels();
  const float* near = norm.x + norm.middle * norm.channels;
  in_two_passes(
      norm.rows, norm.channels, threads,
      [&](Range rows, const Space& own) { k.norm_sums(norm, rows, near, own.work, own.first, own.second); },
      [&](int64_t task, Range rows, const Space& own, auto total) {
        for (int64_t c = 0; c < norm.channels; ++c) {
          const double distance = total(false, c) / norm.rows, square = total(true, c) / norm.rows;
          const float center = static_cast<float>(near[c] + distance);
          const double spread = square - distance * distance;
          const float width = static_cast<float>(spread < 0 ? 0 : spread);  // NaN stays
          own.mean[c] = center;
          own.slope[c] = scale[c] / std::sqrt(width + epsilon);
          if (task == 0) {
            mean[c] = center;
            variance[c] = width;
          }
        }
        k.norm_apply(norm, rows, {own.slope, own.mean, offset});
      });
}

void normalise_gradient(const NormGradient& g, const NormParameters& p, float epsilon, int64_t threads) {
  const Kernels& k = kernels();
  in_two_passes(
      g.rows, g.channels, threads,
      [&](Range rows, const Space& own) {
        for (int64_t c = 0; c < g.channels; ++c) own.slope[c] = p.scale[c] / std::sqrt(p.variance[c] + epsilon);
        k.norm_gradient_sums(g, rows, {own.slope, p.mean, p.offset}, own.work, own.first, own.second);
      },
      [&](int64_t task, Range rows, const Space& own, auto total) {
        for (int64_t c = 0; c < g.channels; ++c) {
          const double all = total(false, c), along = total(true, c), inverse = 1 / std::sqrt(p.variance[c] + epsilon);
          own.tilt[c] = static_cast<float>((2 * p.d_variance[c] - own.slope[c] * inverse * inverse * along) / g.rows);
          own.base[c] = static_cast<float>((p.d_mean[c] - own.slope[c] * all) / g.rows);
          if (task == 0) {
            p.d_scale[c] = static_cast<float>(along * inverse);
            p.d_offset[c] = static_cast<float>(all);
          }
        }
        k.norm_gradient_apply(g, rows, {own.slope, p.mean, p.offset}, own.tilt, own.base);
      });
}

}  // namespace hotloop
