// Drives batch norms without XLA or Python, so that the sanitizers see them: `make native-sanitize`.
// Outputs and gradients are compared with plain loops in double, cut for four threads however many there are, and from
// several threads at once.

#include "../src/norm.h"

#include <cmath>
#include <cstdio>

#include "check.h"

namespace {

using namespace check;

constexpr float EPSILON = 1e-3f;

struct Sizes {
  int64_t rows, channels;
};

// What comes of a norm: sizes of a result that there is none of are zero.
struct Results {
  Numbers y, mean, variance, dx, d_residual, d_scale, d_offset;

  bool operator==(const Results& other) const {
    return y == other.y && mean == other.mean && variance == other.variance && dx == other.dx &&
           d_residual == other.d_residual && d_scale == other.d_scale && d_offset == other.d_offset;
  }
};

struct Trial {
  Sizes sizes;
  bool relu;
  Numbers x, scale, offset, residual, dy, d_mean, d_variance;

  Trial(Sizes s, bool has_residual, bool relu)
      : sizes(s), relu(relu), x(drawn(s.rows * s.channels, 1)), scale(drawn(s.channels, 2)), offset(drawn(s.channels, 3)),
        residual(drawn(has_residual ? x.size() : 0, 4)), dy(drawn(x.size(), 5)), d_mean(drawn(s.channels, 6)),
        d_variance(drawn(s.channels, 7)) {}

  Results run(int64_t threads) const {
    const auto blank = [](size_t size) { return Numbers(size, NAN); };
    const size_t images = x.size(), channels = scale.size();
    Results r{blank(images),          blank(channels), blank(channels), blank(images),
              blank(residual.size()), blank(channels), blank(channels)};
    const float* given = residual.empty() ? nullptr : residual.data();
    const hotloop::Norm norm{sizes.rows, sizes.channels, sizes.rows / 2, relu, x.data(), given, r.y.data()};
    const hotloop::NormGradient gradient{sizes.rows,  sizes.channels,
                                         relu,        dy.data(),
                                         x.data(),    given ? r.y.data() : nullptr,
                                         r.dx.data(), given ? r.d_residual.data() : nullptr};
    normalise(norm, scale.data(), offset.data(), EPSILON, r.mean.data(), r.variance.data(), threads);
    normalise_gradient(gradient,
                       {scale.data(), offset.data(), r.mean.data(), r.variance.data(), d_mean.data(), d_variance.data(),
                        r.d_scale.data(), r.d_offset.data()},
                       EPSILON, threads);
    return r;
  }
};

// The same of a trial in double. Where the ReLU's slope hangs on the last digit, `dy` becomes zero.
struct Reference {
  Exact y, mean, variance, dx, d_residual, d_scale, d_offset;

  explicit Reference(Trial& t)
      : y(t.x.size()), mean(t.scale.size()), variance(mean), dx(y), d_residual(t.residual.size()), d_scale(mean),
        d_offset(mean) {
    for (int64_t c = 0; c < t.sizes.channels; ++c) fill(t, c);
  }

 private:
  void fill(Trial& t, int64_t c) {
    const double count = t.sizes.rows;
    const auto each = [&](auto visit) {
      for (int64_t i = c; i < t.sizes.rows * t.sizes.channels; i += t.sizes.channels) visit(i);
    };
    each([&](int64_t i) { mean[c] += t.x[i] / count; });
    each([&](int64_t i) { variance[c] += (t.x[i] - mean[c]) * (t.x[i] - mean[c]) / count; });
    const double deviation = std::sqrt(variance[c] + EPSILON);
    const auto unit = [&](int64_t i) { return (t.x[i] - mean[c]) / deviation; };
    const auto passed = [&](int64_t i) { return t.relu && y[i] <= 0 ? 0.0 : t.dy[i]; };
    each([&](int64_t i) {
      y[i] = unit(i) * t.scale[c] + t.offset[c] + (t.residual.empty() ? 0.0 : t.residual[i]);
      if (t.relu && std::abs(y[i]) < 1e-4) t.dy[i] = 0;
      if (t.relu) y[i] = std::max(0.0, y[i]);
      d_scale[c] += passed(i) * unit(i);
      d_offset[c] += passed(i);
    });
    each([&](int64_t i) {
      const double standard = passed(i) - d_offset[c] / count - unit(i) * d_scale[c] / count;
      dx[i] = t.scale[c] / deviation * standard + t.d_mean[c] / count + 2 * t.d_variance[c] * (t.x[i] - mean[c]) / count;
      if (!t.residual.empty()) d_residual[i] = passed(i);
    });
  }
};

void check_norm(Sizes sizes, bool has_residual, bool relu) {
  Trial trial(sizes, has_residual, relu);
  const Reference expected(trial);
  const Results ours = trial.run(4);
  require_close(ours.y, expected.y, "y is wrong");
  require_close(ours.mean, expected.mean, "the mean is wrong");
  require_close(ours.variance, expected.variance, "the variance is wrong");
  require_close(ours.dx, expected.dx, "dx is wrong");
  require_close(ours.d_residual, expected.d_residual, "the gradient of what was added is wrong");
  require_close(ours.d_scale, expected.d_scale, "the gradient of the scale is wrong");
  require_close(ours.d_offset, expected.d_offset, "the gradient of the offset is wrong");
  require(trial.run(4) == ours, "a second call changes the numbers");
  require_close(trial.run(1).dx, expected.dx, "dx of one thread is wrong");
}

void check_norms() {
  // No whole vectors, one pixel, sums of several hundred rows, and rows that two and four threads cannot share evenly.
  for (Sizes sizes : {Sizes{1, 1}, {1, 19}, {2, 3}, {600, 1}, {37, 130}, {5301, 19}, {1501, 140}}) {
    for (bool has_residual : {false, true}) {
      for (bool relu : {false, true}) check_norm(sizes, has_residual, relu);
    }
  }
}

}  // namespace

int main() {
  check_norms();
  from_threads(3, [](int) { check_norms(); });
  std::puts("norm_check: all is well");
}
