// Drives networks with Bernoulli outputs without XLA or Python, so that the sanitizers see them: `make native-sanitize`.
// Values and gradients are compared with plain loops in double, on one thread and on several, on pools whose threads come
// late or never, and from several threads at once.

#include "../src/bernoulli.h"

#include <cmath>
#include <cstdio>

#include "check.h"

namespace {

using namespace check;
using Widths = std::vector<int64_t>;  // of the input, of every layer

struct Results {
  Numbers values, gradients;
  bool operator==(const Results& other) const { return values == other.values && gradients == other.gradients; }
};

struct Trial {
  int64_t rows;
  Widths widths;
  std::vector<Numbers> weights, biases, transposed;
  Numbers images, inputs;

  Trial(int64_t rows, Widths of) : rows(rows), widths(std::move(of)), inputs(drawn(rows * widths[0], 1)) {
    for (size_t l = 0; l + 1 < widths.size(); ++l) {
      const int64_t in = widths[l], out = widths[l + 1];
      weights.push_back(drawn(in * out, 10 + l, 1 / std::sqrt(static_cast<float>(in))));
      biases.push_back(drawn(out, 20 + l));
      transposed.emplace_back(in * out);
      for (int64_t i = 0; i < in * out; ++i) transposed[l][i % out * in + i / out] = weights[l][i];
    }
    images = drawn(rows * widths.back(), 2);
    for (float& pixel : images) pixel = pixel > 0 ? 1.0f : 0.0f;
  }

  Results run(int64_t threads, const Team::Schedule& schedule) const {
    Results r{Numbers(rows, NAN), Numbers(inputs.size(), NAN)};
    std::vector<hotloop::NetworkLayer> layers;
    for (size_t l = 0; l < weights.size(); ++l) {
      layers.push_back({widths[l], widths[l + 1], weights[l].data(), biases[l].data(), transposed[l].data()});
    }
    hotloop::bernoulli_gradient({layers.data(), static_cast<int64_t>(layers.size()), rows, images.data(), inputs.data(),
                        r.values.data(), r.gradients.data()},
                       threads, schedule);
    return r;
  }
};

// The same of a trial in double. A unit whose sign hangs on the last digit would make the two differ: there is none.
struct Reference {
  Exact values, gradients;

  explicit Reference(const Trial& t) : values(t.rows), gradients(t.inputs.size()) {
    for (int64_t row = 0; row < t.rows; ++row) fill(t, row);
  }

 private:
  void fill(const Trial& t, int64_t row) {
    std::vector<Exact> x{Exact(t.inputs.begin() + row * t.widths[0], t.inputs.begin() + (row + 1) * t.widths[0])};
    const size_t layers = t.weights.size();
    for (size_t l = 0; l < layers; ++l) {
      Exact y(t.biases[l].begin(), t.biases[l].end());
      const int64_t out = t.widths[l + 1];
      for (int64_t j = 0; j < out; ++j) {
        for (int64_t i = 0; i < t.widths[l]; ++i) y[j] += x[l][i] * t.weights[l][i * out + j];
        if (l + 1 == layers) continue;
        require(std::abs(y[j]) > 1e-6, "a unit's sign hangs on the last digit: draw other numbers");
        y[j] = std::max(y[j], 0.0);
      }
      x.push_back(y);
    }
    Exact back = x.back();
    for (size_t j = 0; j < back.size(); ++j) {
      const double pixel = t.images[row * back.size() + j], logit = back[j];
      values[row] += pixel * logit - std::max(logit, 0.0) - std::log1p(std::exp(-std::abs(logit)));
      back[j] = pixel - 1 / (1 + std::exp(-logit));
    }
    for (size_t l = layers; l-- > 0;) {
      const int64_t in = t.widths[l], out = t.widths[l + 1];
      Exact before(in);
      for (int64_t i = 0; i < in; ++i) {
        for (int64_t j = 0; j < out; ++j) before[i] += back[j] * t.weights[l][i * out + j];
        if (l > 0 && x[l][i] <= 0) before[i] = 0;
      }
      back = before;
    }
    std::copy(back.begin(), back.end(), gradients.begin() + row * t.widths[0]);
  }
};

void check_trial(const Trial& trial) {
  const Reference expected(trial);
  const Results alone = trial.run(1, NEVER);
  require_close(alone.values, expected.values, "values");
  require_close(alone.gradients, expected.gradients, "gradients");
  Pool pool;
  require_close(trial.run(4, pool.at_once()).gradients, expected.gradients, "gradients on threads");
  require_close(trial.run(3, NEVER).gradients, expected.gradients, "gradients on threads that never come");
  require_close(trial.run(3, pool.when_over()).values, expected.values, "values on threads that come late");
}

void check_many_callers() {
  const Trial trial(100, {10, 200, 784});
  const Results expected = trial.run(1, NEVER);
  from_threads(4, [&](int) {
    for (int turn = 0; turn < 3; ++turn) {
      Pool pool;
      require(trial.run(1, pool.at_once()) == expected, "the same numbers from several threads at once");
    }
  });
}

void check_extremes() {
  Trial trial(3, {1, 40});
  std::fill(trial.weights[0].begin(), trial.weights[0].end(), 1e4f);
  trial.transposed = trial.weights;
  trial.inputs = {1.0f, -1.0f, NAN};
  const Results r = trial.run(1, NEVER);
  require(std::isfinite(r.values[0]) && std::isfinite(r.values[1]), "values of large logits are finite");
  require(std::isnan(r.values[2]) && std::isnan(r.gradients[2]), "NaN stays");
}

}  // namespace

int main() {
  // Widths around a vector, a panel and a block of terms; rows around a tile and a block of them.
  for (const Widths& widths : std::vector<Widths>{{1, 1}, {3, 5, 2}, {10, 33, 70}, {33, 31, 32, 600}, {20, 520, 16, 40}}) {
    for (int64_t rows : {1, 5, 15, 57, 120}) check_trial(Trial(rows, widths));
  }
  check_trial(Trial(2, {2, 3000}));  // more factors than one product holds
  check_many_callers();
  check_extremes();
  std::puts("bernoulli_check: all is well");
}
