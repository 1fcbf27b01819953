// Drives the convolutions without XLA or Python, so that the sanitizers see them: `make native-sanitize`.
// Compares every pass with plain loops in double, from several threads at once, and fills the caches over their bounds.

#include "../src/convolution.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "../src/grouped.h"
#include "../src/plan_cache.h"
#include "../src/workspace.h"
#include "check.h"

namespace {

using hotloop::Geometry;
using hotloop::Pass;
using namespace check;

Geometry geometry(int64_t images, int64_t size, int64_t channels, int64_t kernel, int64_t filters, int64_t stride,
                  int64_t before, int64_t after, int64_t groups) {
  const int64_t positions = (size + before + after - kernel) / stride + 1;
  return {images, size,   size,   channels, kernel, kernel, filters, positions, positions,
          stride, stride, before, after,    before, after,  groups};
}

struct Arrays {
  Numbers x, w, y;
};

Arrays draw(const Geometry& g) {
  return {drawn(g.images * g.height * g.width * g.channels, 1),
          drawn(g.kernel_height * g.kernel_width * g.channels / g.groups * g.filters, 2),
          drawn(g.images * g.rows * g.columns * g.filters, 3)};
}

// Calls visit(x, w, y) with the places of every product of an input by a weight that goes into an output.
template <class Visit>
void for_each_product(const Geometry& g, Visit visit) {
  const int64_t inputs = g.channels / g.groups, outputs = g.filters / g.groups;
  for (int64_t n = 0; n < g.images; ++n)
    for (int64_t row = 0; row < g.rows; ++row)
      for (int64_t column = 0; column < g.columns; ++column)
        for (int64_t i = 0; i < g.kernel_height; ++i)
          for (int64_t j = 0; j < g.kernel_width; ++j) {
            const int64_t h = row * g.row_stride + i - g.top, w = column * g.column_stride + j - g.left;
            if (h < 0 || w < 0 || h >= g.height || w >= g.width) continue;
            for (int64_t o = 0; o < g.filters; ++o)
              for (int64_t c = 0; c < inputs; ++c)
                visit(((n * g.height + h) * g.width + w) * g.channels + o / outputs * inputs + c,
                      ((i * g.kernel_width + j) * inputs + c) * g.filters + o,
                      ((n * g.rows + row) * g.columns + column) * g.filters + o);
          }
}

void check_passes(const Geometry& g, int64_t threads) {
  require(hotloop::complaint(g).empty(), "a good geometry has a complaint");
  const Arrays a = draw(g);
  const Numbers bias = drawn(g.filters, 4), residual = drawn(a.y.size(), 5);
  Exact y(a.y.size()), dx(a.x.size()), dw(a.w.size());
  for_each_product(g, [&](int64_t x, int64_t w, int64_t out) {
    y[out] += double(a.x[x]) * a.w[w];
    dx[x] += double(a.y[out]) * a.w[w];
    dw[w] += double(a.y[out]) * a.x[x];
  });
  const auto ending = [&](const Numbers& added, bool relu) {
    Exact all(y);
    for (size_t i = 0; i < y.size(); ++i) {
      all[i] += bias[i % g.filters] + (added.empty() ? 0.0 : added[i]);
      if (relu) all[i] = std::max(0.0, all[i]);
    }
    return all;
  };
  const auto check = [&](Pass pass, const Numbers& first, const Numbers& second, const Numbers& bias, const Numbers& added,
                         const Exact& expected, const char* what) {
    Numbers ours(expected.size(), NAN);
    convolve(pass, g, threads, first.data(), second.data(), bias.data(), added.data(), ours.data());
    require_close(ours, expected, what);
  };
  const Numbers none;
  check(Pass::forward, a.x, a.w, none, none, y, "y is wrong");
  check(Pass::bias, a.x, a.w, bias, none, ending(none, false), "the bias is wrong");
  check(Pass::bias_relu, a.x, a.w, bias, none, ending(none, true), "bias and ReLU are wrong");
  check(Pass::bias_sum, a.x, a.w, bias, residual, ending(residual, false), "bias and sum are wrong");
  check(Pass::bias_sum_relu, a.x, a.w, bias, residual, ending(residual, true), "bias, sum and ReLU are wrong");
  check(Pass::input_gradient, a.y, a.w, none, none, dx, "dx is wrong");
  check(Pass::kernel_gradient, a.x, a.y, none, none, dw, "dw is wrong");
}

void check_small_groups(const Geometry& g) {
  require(hotloop::has_small_groups(g), "small groups are not seen");
  const Arrays a = draw(g);
  Exact y(a.y.size());
  for_each_product(g, [&](int64_t x, int64_t w, int64_t out) { y[out] += double(a.x[x]) * a.w[w]; });
  const auto run = [&](int64_t threads) {
    Numbers ours(y.size(), NAN);
    convolve_small_groups(g, threads, a.x.data(), a.w.data(), ours.data());
    return ours;
  };
  const Numbers alone = run(1);
  require_close(alone, y, "small groups are wrong");
  require(run(3) == alone, "threads change the numbers");
}

const std::vector<Geometry> GEOMETRIES = {
    geometry(2, 9, 16, 3, 32, 1, 1, 1, 1),   geometry(2, 8, 16, 3, 32, 2, 0, 1, 1),
    geometry(2, 20, 3, 7, 16, 2, 2, 3, 1),   geometry(2, 8, 16, 1, 32, 2, 0, 0, 1),
    geometry(1, 12, 64, 3, 64, 1, 1, 1, 64), geometry(1, 9, 19, 3, 19, 1, 1, 1, 19),
    geometry(2, 9, 16, 5, 32, 1, 2, 2, 4),   geometry(1, 7, 6, 7, 9, 3, 3, 3, 3),
};

void check_complaints() {
  const Geometry good = geometry(2, 9, 16, 3, 32, 1, 1, 1, 4);
  for (int64_t Geometry::* size : {&Geometry::images, &Geometry::height, &Geometry::width, &Geometry::channels,
                                   &Geometry::kernel_height, &Geometry::kernel_width, &Geometry::filters,
                                   &Geometry::rows, &Geometry::columns}) {
    Geometry empty = good;
    empty.*size = 0;
    require(complaint(empty) == "an empty image, kernel or result cannot be convolved", "an empty geometry passes");
  }
  Geometry uneven = good;
  uneven.filters = 30;
  require(!complaint(uneven).empty(), "groups that do not divide pass");
  Geometry large = good;
  large.rows += 1;
  require(!complaint(large).empty(), "a result of the wrong size passes");
}

void check_from_threads() {
  from_threads(4, [](int t) {
    for (size_t i = 0; i < GEOMETRIES.size(); ++i) check_passes(GEOMETRIES[(i + t) % GEOMETRIES.size()], 1 + t % 2);
  });
}

void check_cache() {
  hotloop::PlanCache<int64_t> cache(3);
  int made = 0;
  const auto get = [&](int64_t key) { return *cache.get({key}, [&] { return ++made, 10 * key; }); };
  for (int64_t key : {1, 2, 3, 1, 4, 1, 3, 4}) require(get(key) == 10 * key, "the cache mixes plans up");
  require(made == 4 && cache.size() == 3, "the cache drops what was used, or keeps too much");
  require(get(2) == 20 && made == 5, "the cache keeps what was not used");
}

void check_workspace() {
  const char* kept;
  {
    hotloop::Workspace small(100), other(1000);
    require(small.data() != other.data(), "two calls at once share their memory");
    kept = small.data();
  }
  {
    hotloop::Workspace again(1), more(1);
    require(again.data() == kept || more.data() == kept, "memory is not used again");
  }
  hotloop::Workspace large(hotloop::LARGEST_KEPT + 1);
  large.data()[hotloop::LARGEST_KEPT] = 1;
}

void check_many_shapes() {
  for (int64_t size = 1; size <= 600; ++size) {
    const Geometry g = geometry(1, size, 1, 1, 1, size, 0, 0, 1);
    const Numbers x = drawn(size * size, 1), w{2.0f};
    Numbers y(1);
    convolve(Pass::forward, g, 2, x.data(), w.data(), nullptr, nullptr, y.data());
    require(y[0] == 2 * x[0], "a plan is taken for another shape's");
  }
}

}  // namespace

int main() {
  check_complaints();
  check_cache();
  check_workspace();
  for (const Geometry& g : GEOMETRIES) check_passes(g, 2);
  // Few columns and many, strides, uneven pads, and rows that three threads cannot share evenly.
  for (const Geometry& g : {geometry(2, 9, 32, 3, 32, 1, 1, 1, 8), geometry(1, 31, 128, 3, 128, 1, 1, 1, 32),
                            geometry(3, 5, 16, 5, 16, 1, 2, 1, 8), geometry(2, 21, 32, 5, 32, 2, 0, 3, 16)}) {
    check_small_groups(g);
  }
  check_from_threads();
  check_many_shapes();
  std::puts("convolution_check: all is well");
}
