#include "grouped.h"

#include <algorithm>

#include "kernels.h"
#include "runtime.h"
#include "team.h"

namespace hotloop {

bool has_small_groups(const Geometry& g) {
  return g.channels == g.filters && g.kernel_height * g.kernel_width > 1 &&
         kernels().groups_fit(g.channels, g.channels / g.groups);
}

void convolve_small_groups(const Geometry& g, int64_t threads, const float* x, const float* w, float* y) {
  const int64_t size = g.channels / g.groups, rows = g.images * g.rows;
  const Groups groups{size,   g.height,     g.width,         g.channels, g.kernel_height, g.kernel_width, g.rows, g.columns,
                      g.row_stride, g.column_stride, g.top,      g.left,          x,              w,      y};
  const double work = static_cast<double>(rows) * g.columns * g.filters * size * g.kernel_height * g.kernel_width;
  const int64_t tasks = tasks_for(work, std::min(rows, threads));
  run_on(threads, [&] {
    over_tasks(tasks, [&](int64_t task) {
      kernels().convolve_groups(groups, {rows * task / tasks, rows * (task + 1) / tasks});
    });
  });
}

}  // namespace hotloop
