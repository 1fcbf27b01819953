#include "recurrent.h"

#include <algorithm>
#include <vector>

#include "product.h"
#include "workspace.h"

namespace hotloop {
namespace {

// From so many rows a thread on, each thread runs whole sequences of its own rows and never waits for another. With fewer
// rows they share the units of each step: the weights of one thread's units may then fit in its core's cache.
constexpr int64_t ROWS_OF_A_THREAD = 14;
// Multiplications of a step that make it worth sharing: threads that meet after each step lose about a microsecond.
constexpr int64_t WORTH_SHARING = 30'000;

int64_t panels_of(int64_t hidden) { return (hidden + kernels().width - 1) / kernels().width; }

Range share(int64_t count, int64_t parts, int64_t part) { return {count * part / parts, count * (part + 1) / parts}; }

// How the work on a sequence is divided: parts of the rows, or of the units (in panels).
struct Division {
  bool by_rows;
  int64_t tasks;

  Division(Sizes s, int64_t threads) {
    by_rows = s.batch >= threads * ROWS_OF_A_THREAD;
    const int64_t step = s.batch * s.hidden * s.hidden * gates_of(s.cell);
    const int64_t most = std::min({threads, panels_of(s.hidden), step / WORTH_SHARING});
    tasks = by_rows ? threads : std::max<int64_t>(1, most);
  }
};

// Runs step_phase(phase, rows, panels, work) for all phases of a sequence, after pack(panel range).
template <class Pack, class StepPhase>
void run_phases(Sizes s, int64_t phases, int64_t threads, const Team::Schedule& schedule, char* work, size_t work_bytes,
                Pack pack, StepPhase step_phase) {
  const Division division(s, threads);
  const int64_t panels = panels_of(s.hidden);
  const auto work_of = [&](int64_t task) { return reinterpret_cast<float*>(work + task * work_bytes); };
  Team::run(schedule, division.by_rows ? 2 : 1 + phases, division.tasks, [&](int64_t phase, int64_t task) {
    if (phase == 0) return pack(share(panels, division.tasks, task));
    if (!division.by_rows) {
      return step_phase(phase - 1, Range{0, s.batch}, share(panels, division.tasks, task), work_of(task));
    }
    const Range rows = share(s.batch, division.tasks, task);
    for (int64_t own = 0; own < phases; ++own) step_phase(own, rows, Range{0, panels}, work_of(task));
  });
}

// The memory of one pass: packed weights, one task's space to work in after the other, and `extra` floats besides.
struct Memory {
  size_t weights, work, extra;

  Memory(Sizes s, int64_t extra_floats)
      : weights(rounded_up(gates_of(s.cell) * s.hidden * panels_of(s.hidden) * kernels().width * sizeof(float))),
        work(rounded_up(kernels().step_work(s) * sizeof(float))),
        extra(rounded_up(extra_floats * sizeof(float))) {}

  size_t bytes(int64_t threads) const { return weights + extra + work * threads; }
};

// du[:, gates] = (h before each step)' dz[:, gates], for `count` gates from `gate` on; gradients' rows are `width` apart.
void weight_gradient(const Backward& b, Matrix states_before, int64_t steps, const float* gradients, int64_t width,
                     int64_t gate, int64_t count, bool add, float* du, int64_t threads, const Team::Schedule& schedule) {
  const Sizes s = b.sizes;
  const int64_t across = gates_of(s.cell) * s.hidden;
  multiply({s.hidden, steps * s.batch, count * s.hidden, states_before, {gradients, width, 1}, du + gate * s.hidden, across, add},
           threads, schedule);
}

// The same over all steps where the state before is h: h0's step, if it has one, and the others.
void weight_gradient_of_h(const Backward& b, const float* gradients, int64_t width, int64_t gate, int64_t count,
                          float* du, int64_t threads, const Team::Schedule& schedule) {
  const Sizes s = b.sizes;
  if (b.h0) {
    weight_gradient(b, {b.h0, 1, s.hidden}, 1, gradients, width, gate, count, false, du, threads, schedule);
  }
  if (s.steps == 1 && b.h0) return;
  const float* later = gradients + s.batch * width;
  weight_gradient(b, {b.h, 1, s.hidden}, s.steps - 1, later, width, gate, count, b.h0 != nullptr, du, threads, schedule);
}

// In double: a float would lose the last digits of a sum over all steps and rows.
void sum_rows(const float* rows, int64_t count, int64_t columns, float* total) {
  std::vector<double> sums(columns);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t j = 0; j < columns; ++j) sums[j] += rows[row * columns + j];
  }
  std::copy(sums.begin(), sums.end(), total);
}

void all_weight_gradients(const Backward& b, float* du, float* d_bias, int64_t threads,
                          const Team::Schedule& schedule) {
  const Sizes s = b.sizes;
  const int64_t gates = gates_of(s.cell), width = gates * s.hidden;
  weight_gradient_of_h(b, b.dz, width, 0, first_part(s.cell), du, threads, schedule);
  if (s.cell == Cell::gru) {
    weight_gradient(b, {b.beside, 1, s.hidden}, s.steps, b.dz + 2 * s.hidden, width, 2, 1, false, du, threads, schedule);
  }
  if (s.cell == Cell::gru_reset_after) {
    weight_gradient_of_h(b, b.beside, s.hidden, 2, 1, du, threads, schedule);
    sum_rows(b.beside, s.steps * s.batch, s.hidden, d_bias);
  }
}

}  // namespace

void run_forward(Forward pass, const float* u, int64_t threads, const Team::Schedule& schedule) {
  const Kernels& k = kernels();
  const Sizes s = pass.sizes;
  const int64_t gates = gates_of(s.cell), padded = panels_of(s.hidden) * k.width, state = s.batch * s.hidden;
  const Memory memory(s, 2 * state);
  Workspace workspace(memory.bytes(threads));
  float* weights = reinterpret_cast<float*>(workspace.data());
  pass.weights = weights;
  pass.reset_h = reinterpret_cast<float*>(workspace.data() + memory.weights);
  pass.update = pass.reset_h + state;
  run_phases(
      s, s.steps * phases_of(s.cell), threads, schedule, workspace.data() + memory.weights + memory.extra, memory.work,
      [&](Range panels) {
        for (int64_t gate = 0; gate < gates; ++gate) {
          const Matrix of_gate{u + gate * s.hidden, gates * s.hidden, 1};
          k.pack(of_gate, s.hidden, s.hidden, panels, weights + gate * s.hidden * padded);
        }
      },
      [&](int64_t phase, Range rows, Range panels, float* work) { k.forward(pass, phase, rows, panels, work); });
}

void run_backward(Backward pass, const float* u, bool wants_start, float* du, float* d_bias, int64_t threads,
                  const Team::Schedule& schedule) {
  const Kernels& k = kernels();
  const Sizes s = pass.sizes;
  const int64_t gates = gates_of(s.cell), first = first_part(s.cell), padded = panels_of(s.hidden) * k.width;
  const bool has_beside = s.cell == Cell::gru || s.cell == Cell::gru_reset_after;
  const Memory memory(s, has_beside ? s.steps * s.batch * s.hidden : 0);
  Workspace workspace(memory.bytes(threads));
  float* weights = reinterpret_cast<float*>(workspace.data());
  pass.weights = weights;
  pass.beside = reinterpret_cast<float*>(workspace.data() + memory.weights);
  const int64_t phases = s.steps * phases_of(s.cell) + (wants_start ? 1 : 0);
  run_phases(
      s, phases, threads, schedule, workspace.data() + memory.weights + memory.extra, memory.work,
      [&](Range panels) {
        const Matrix across{u, 1, gates * s.hidden}, rest{u + first * s.hidden, 1, gates * s.hidden};
        k.pack(across, first * s.hidden, s.hidden, panels, weights);
        if (first < gates) k.pack(rest, s.hidden, s.hidden, panels, weights + first * s.hidden * padded);
      },
      [&](int64_t phase, Range rows, Range panels, float* work) { k.backward(pass, phase, rows, panels, work); });
  all_weight_gradients(pass, du, d_bias, threads, schedule);
}

}  // namespace hotloop
