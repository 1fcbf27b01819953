#include "product.h"

#include <algorithm>

#include "workspace.h"

namespace hotloop {
namespace {

int64_t shares(int64_t pieces, int64_t most) { return std::max<int64_t>(1, std::min(pieces, most)); }

Range share(int64_t count, int64_t parts, int64_t part, int64_t granule) {
  const int64_t granules = (count + granule - 1) / granule;
  return {granules * part / parts * granule, std::min(count, granules * (part + 1) / parts * granule)};
}

// How many parts rows and columns are cut into: the cut that copies least, since each part packs its rows and columns.
struct Grid {
  int64_t down, across;
};

Grid grid_for(const Product& p, int64_t tasks, int64_t width) {
  Grid best{1, 1};
  double least = 0;
  for (int64_t down = 1; down <= tasks; ++down) {
    const Grid grid{shares(p.rows, down), shares((p.columns + width - 1) / width, tasks / down)};
    const double copied = static_cast<double>(p.rows) / grid.down + static_cast<double>(p.columns) / grid.across;
    const bool more = grid.down * grid.across > best.down * best.across;
    if (more || (grid.down * grid.across == best.down * best.across && copied < least) || least == 0) {
      best = grid;
      least = copied;
    }
  }
  return best;
}

}  // namespace

void multiply(const Product& p, int64_t threads, const Team::Schedule& schedule) {
  if (p.terms == 0) {  // a sum of nothing
    for (int64_t row = 0; row < p.rows && !p.add; ++row) std::fill_n(p.c + row * p.width, p.columns, 0.0f);
    return;
  }
  const Kernels& k = kernels();
  const double multiplications = static_cast<double>(p.rows) * p.terms * p.columns;
  const int64_t tasks = tasks_for(multiplications, threads);
  const Grid grid = grid_for(p, tasks, k.width);
  const size_t work = rounded_up(k.product_work * sizeof(float));
  Workspace workspace(work * grid.down * grid.across);
  Team::run(schedule, 1, grid.down * grid.across, [&](int64_t, int64_t task) {
    const Range rows = share(p.rows, grid.down, task / grid.across, 1);
    const Range columns = share(p.columns, grid.across, task % grid.across, k.width);
    k.multiply(p, rows, columns, reinterpret_cast<float*>(workspace.data() + task * work));
  });
}

}  // namespace hotloop
