// Drives products and recurrences without XLA or Python, so that the sanitizers see them: `make native-sanitize`.
// Products are compared with plain loops in double, gradients of sequences with differences of their outputs, on one
// thread and on several, on pools whose threads come late or never, and from several threads at once.

#include "../src/recurrent.h"

#include <cmath>
#include <cstdio>

#include "../src/product.h"
#include "check.h"

namespace {

using hotloop::Cell;
using hotloop::Product;
using hotloop::Sizes;
using namespace check;

void check_product(int64_t rows, int64_t terms, int64_t columns, bool across_a, bool across_b, bool add) {
  const Numbers a = drawn(rows * terms, 1), b = drawn(terms * columns, 2);
  const Numbers before = add ? drawn(rows * columns, 3) : Numbers(rows * columns, NAN);
  Numbers c = before;
  Pool pool;
  hotloop::multiply({rows, terms, columns, {a.data(), across_a ? 1 : terms, across_a ? rows : 1},
            {b.data(), across_b ? 1 : columns, across_b ? terms : 1}, c.data(), columns, add},
           3, pool.at_once());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double sum = add ? before[i * columns + j] : 0.0;
      for (int64_t k = 0; k < terms; ++k) {
        sum += double(a[across_a ? k * rows + i : i * terms + k]) * b[across_b ? j * terms + k : k * columns + j];
      }
      require(std::abs(c[i * columns + j] - sum) < 1e-5 * terms, "a product is wrong");
    }
  }
}

struct Trial {
  Sizes sizes;
  bool has_start;
  Numbers x, w, input_bias, u, bias, h0, c0;

  Trial(Sizes s, bool has_start)
      : sizes(s), has_start(has_start), x(drawn(s.steps * s.batch * s.inputs, 1)),
        w(drawn(s.inputs * gates_of(s.cell) * s.hidden, 6, 0.3f)), input_bias(drawn(gates_of(s.cell) * s.hidden, 7)),
        u(drawn(s.hidden * gates_of(s.cell) * s.hidden, 2, 0.3f)), bias(drawn(s.hidden, 3)),
        h0(drawn(s.batch * s.hidden, 4)), c0(drawn(s.batch * s.hidden, 5)) {}

  int64_t states() const { return sizes.steps * sizes.batch * sizes.hidden; }

  hotloop::Forward pass(Numbers& h, Numbers& c, float* sums) const {
    return {sizes, x.data(), input_bias.data(), bias.data(), has_start ? h0.data() : nullptr,
            has_start ? c0.data() : nullptr, nullptr, nullptr, h.data(), c.data(), sums, nullptr, nullptr};
  }

  Numbers infer(int64_t threads, const Team::Schedule& schedule) const {
    Numbers h(states(), NAN), c(sizes.batch * sizes.hidden, NAN);
    run_forward(pass(h, c, nullptr), {w.data(), u.data()}, threads, schedule);
    Numbers packed(hotloop::packed_weights(sizes), NAN), again(states(), NAN);
    hotloop::pack_weights(sizes, w.data(), u.data(), packed.data(), threads, schedule);
    run_forward(pass(again, c, nullptr), {nullptr, nullptr, packed.data()}, threads, schedule);
    require(h == again, "weights that were packed before give other numbers");
    return h;
  }
};

// Of the outputs' sum, by each of a few weights, first states and sums: the slope found against a difference.
void check_gradients(Sizes s, bool has_start, const Team::Schedule& schedule) {
  Trial trial(s, has_start);
  Numbers h(trial.states(), NAN), c(trial.states(), NAN), sums(trial.states() * sums_of(s.cell), NAN);
  run_forward(trial.pass(h, c, sums.data()), {trial.w.data(), trial.u.data()}, 2, schedule);
  require(h == trial.infer(2, schedule), "inference has other numbers");
  const Numbers ones(trial.states(), 1.0f), none(s.batch * s.hidden, 0.0f);
  Numbers dz(trial.states() * gates_of(s.cell), NAN), dw(trial.w.size(), NAN), d_input_bias(trial.input_bias.size(), NAN);
  Numbers du(trial.u.size(), NAN), d_bias(s.hidden, NAN), dh0(none), dc0(none);
  hotloop::Backward pass{s, ones.data(), trial.x.data(), sums.data(), h.data(), c.data(), has_start ? trial.h0.data() : nullptr,
                         has_start ? trial.c0.data() : nullptr, none.data(), none.data(), nullptr,
                         dz.data(), dh0.data(), dc0.data(), nullptr};
  run_backward(pass, trial.u.data(), has_start, {dw.data(), d_input_bias.data(), du.data(), d_bias.data()}, 2, schedule);
  const auto total = [&] {
    double sum = 0;
    for (float value : trial.infer(1, NEVER)) sum += value;
    return sum;
  };
  const auto check = [&](Numbers& numbers, const Numbers& slopes, const char* what) {
    for (size_t i = 0; i < numbers.size(); i += 1 + numbers.size() / 5) {
      const float kept = numbers[i], step = 1e-2f;
      numbers[i] = kept + step;
      const double above = total();
      numbers[i] = kept - step;
      const double below = total();
      numbers[i] = kept;
      require(std::abs((above - below) / (2 * step) - slopes[i]) < 1e-2 * (1 + std::abs(slopes[i])), what);
    }
  };
  check(trial.w, dw, "the gradient of the input weights is wrong");
  check(trial.input_bias, d_input_bias, "the gradient of the input bias is wrong");
  check(trial.u, du, "the gradient of the weights is wrong");
  if (s.cell == Cell::gru_reset_after) check(trial.bias, d_bias, "the gradient of the bias is wrong");
  if (has_start) check(trial.h0, dh0, "the gradient of the first h is wrong");
  if (has_start && s.cell == Cell::lstm) check(trial.c0, dc0, "the gradient of the first c is wrong");
}

void check_cells(const Team::Schedule& schedule) {
  for (Cell cell : {Cell::rnn, Cell::gru, Cell::gru_reset_after, Cell::lstm}) {
    for (bool has_start : {false, true}) {
      check_gradients({cell, 3, 2, 5, 70}, has_start, schedule);
      check_gradients({cell, 2, 31, 40, 19}, has_start, schedule);
      check_gradients({cell, 5, 1, 9, 64}, has_start, schedule);  // weights are read where they lie
      check_gradients({cell, 2, 8, 600, 544}, has_start, schedule);
    }
    check_gradients({cell, 1, 1, 1, 1}, false, schedule);
  }
}

void check_pools() {
  for (Cell cell : {Cell::gru, Cell::lstm}) {
    for (Sizes s : {Sizes{cell, 20, 1, 16, 256}, Sizes{cell, 5, 1, 16, 128}, Sizes{cell, 3, 60, 33, 64}}) {
      const Trial trial(s, true);
      const Numbers alone = trial.infer(4, NEVER);
      for (int i = 0; i < 10; ++i) {
        Pool pool;
        require(trial.infer(4, pool.at_once()) == alone, "threads change the numbers");
        require(trial.infer(4, pool.when_over()) == alone, "threads that come late change the numbers");
      }
    }
  }
}

}  // namespace

int main() {
  for (bool across_a : {false, true}) {
    for (bool across_b : {false, true}) {
      check_product(1, 1, 1, across_a, across_b, false);
      check_product(33, 70, 45, across_a, across_b, true);
      check_product(150, 530, 100, across_a, across_b, across_a);
      check_product(3, 600, 1100, across_a, across_b, across_b);
    }
  }
  check_cells(NEVER);
  {
    Pool pool;
    check_cells(pool.at_once());
  }
  check_pools();
  from_threads(3, [](int) { check_pools(); });
  std::puts("recurrent_check: all is well");
}
