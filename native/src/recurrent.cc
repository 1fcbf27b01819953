#include "recurrent.h"

#include <algorithm>

#include "product.h"
#include "workspace.h"

namespace hotloop {
namespace {

// From so many rows a thread on, each thread runs whole sequences of its own rows and never waits for another. With fewer
// rows they share the units of each step: the weights of one thread's units may then fit in its core's cache.
constexpr int64_t ROWS_OF_A_THREAD = 14;
// Multiplications of a thread in a step that make it worth sharing: threads that meet after each step lose about a
// microsecond, and the one row of an LSTM of 128 units takes no longer than that.
constexpr int64_t WORTH_SHARING = 60'000;

// Rows of all steps up to which weights are read where they lie: to pack them costs as much as two or three steps of one row.
constexpr int64_t ROWS_NOT_WORTH_PACKING = 16;

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

  int64_t rows(Sizes s) const { return by_rows ? (s.batch + tasks - 1) / tasks : s.batch; }
  int64_t panels(Sizes s) const { return by_rows ? panels_of(s.hidden) : (panels_of(s.hidden) + tasks - 1) / tasks; }
};

// Runs step_phase(phase, rows, panels, task) for all phases of a sequence, after pack(panel range). A thread with rows of
// its own takes `most` of them through the whole sequence before the next.
template <class Pack, class StepPhase>
void run_phases(Sizes s, int64_t phases, int64_t most, const Division& division, const Team::Schedule& schedule,
                Pack pack, StepPhase step_phase) {
  const int64_t panels = panels_of(s.hidden);
  Team::run(schedule, division.by_rows ? 2 : 1 + phases, division.tasks, [&](int64_t phase, int64_t task) {
    if (phase == 0) return pack(share(panels, division.tasks, task));
    if (!division.by_rows) {
      return step_phase(phase - 1, Range{0, s.batch}, share(panels, division.tasks, task), task);
    }
    const Range own = share(s.batch, division.tasks, task);
    const int64_t parts = (own.end - own.begin + most - 1) / most;
    for (int64_t part = 0; part < parts; ++part) {
      const Range within = share(own.end - own.begin, parts, part);
      const Range rows{own.begin + within.begin, own.begin + within.end};
      for (int64_t own_phase = 0; own_phase < phases; ++own_phase) step_phase(own_phase, rows, Range{0, panels}, task);
    }
  });
}

int64_t aligned(int64_t floats) { return static_cast<int64_t>(rounded_up(floats * sizeof(float)) / sizeof(float)); }

// Parts of one workspace, one after the other.
class Layout {
 public:
  template <class Number>
  size_t add(int64_t count) {
    const size_t begin = bytes_;
    bytes_ += rounded_up(count * sizeof(Number));
    return begin;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

template <class Number>
Number* at(Workspace& workspace, size_t begin) {
  return reinterpret_cast<Number*>(workspace.data() + begin);
}

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

void all_weight_gradients(const Backward& b, const WeightGradients& d, int64_t threads, const Team::Schedule& schedule) {
  const Sizes s = b.sizes;
  const int64_t width = gates_of(s.cell) * s.hidden;
  multiply({s.inputs, s.steps * s.batch, width, {b.x, 1, s.inputs}, {b.dz, width, 1}, d.w, width, false}, threads,
           schedule);
  weight_gradient_of_h(b, b.dz, width, 0, first_part(s.cell), d.u, threads, schedule);
  if (s.cell == Cell::gru) {
    weight_gradient(b, {b.beside, 1, s.hidden}, s.steps, b.dz + 2 * s.hidden, width, 2, 1, false, d.u, threads, schedule);
  }
  if (s.cell == Cell::gru_reset_after) weight_gradient_of_h(b, b.beside, s.hidden, 2, 1, d.u, threads, schedule);
}

// Where the recurrent weights begin among packed ones.
int64_t packed_inputs(Sizes s) { return gates_of(s.cell) * s.inputs * panels_of(s.hidden) * kernels().width; }

// Some panels of all gates: the input weights gate after gate, then the recurrent ones.
void pack_panels(Sizes s, const float* w, const float* u, Range panels, float* packed) {
  const Kernels& k = kernels();
  const int64_t across = gates_of(s.cell) * s.hidden, padded = panels_of(s.hidden) * k.width;
  for (int64_t gate = 0; gate < gates_of(s.cell); ++gate) {
    const int64_t first = gate * s.hidden;
    k.pack({w + first, across, 1}, s.inputs, s.hidden, panels, packed + gate * s.inputs * padded);
    k.pack({u + first, across, 1}, s.hidden, s.hidden, panels, packed + packed_inputs(s) + gate * s.hidden * padded);
  }
}

// The biases' gradients from what each task has summed.
void add_totals(Sizes s, const double* totals, int64_t tasks, const WeightGradients& d) {
  const int64_t width = gates_of(s.cell) * s.hidden, count = biases_of(s.cell) * s.hidden;
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;
    for (int64_t task = 0; task < tasks; ++task) sum += totals[task * count + i];
    (i < width ? d.input_bias[i] : d.bias[i - width]) = static_cast<float>(sum);
  }
}

}  // namespace

int64_t packed_weights(Sizes s) {
  return gates_of(s.cell) * (s.inputs + s.hidden) * panels_of(s.hidden) * kernels().width;
}

void pack_weights(Sizes s, const float* w, const float* u, float* packed, int64_t threads, const Team::Schedule& schedule) {
  const int64_t tasks = tasks_for(static_cast<double>(packed_weights(s)), std::min(threads, panels_of(s.hidden)));
  Team::run(schedule, 1, tasks, [&](int64_t, int64_t task) {
    pack_panels(s, w, u, share(panels_of(s.hidden), tasks, task), packed);
  });
}

void run_forward(Forward pass, Weights weights, int64_t threads, const Team::Schedule& schedule) {
  const Kernels& k = kernels();
  const Sizes s = pass.sizes;
  const Division division(s, threads);
  const int64_t most = k.rows_at_once(s.hidden);
  pass.is_packed = weights.packed || s.steps * s.batch > ROWS_NOT_WORTH_PACKING || s.hidden % k.width != 0;
  const bool packs = pass.is_packed && !weights.packed;
  const int64_t work_floats = aligned(k.forward_work(s, std::min(most, division.rows(s)), division.panels(s)));
  Layout layout;
  const size_t packed = layout.add<float>(packs ? packed_weights(s) : 0);
  const size_t reset_h = layout.add<float>(s.batch * s.hidden), update = layout.add<float>(s.batch * s.hidden);
  const size_t work = layout.add<float>(work_floats * division.tasks);
  Workspace workspace(layout.bytes());
  const float* from = packs ? at<float>(workspace, packed) : weights.packed;
  pass.input_weights = pass.is_packed ? from : weights.w;
  pass.weights = pass.is_packed ? from + packed_inputs(s) : weights.u;
  pass.reset_h = at<float>(workspace, reset_h);
  pass.update = at<float>(workspace, update);
  run_phases(
      s, s.steps * phases_of(s.cell), most, division, schedule,
      [&](Range panels) {
        if (packs) pack_panels(s, weights.w, weights.u, panels, at<float>(workspace, packed));
      },
      [&](int64_t phase, Range rows, Range panels, int64_t task) {
        k.forward(pass, phase, rows, panels, at<float>(workspace, work) + task * work_floats);
      });
}

void run_backward(Backward pass, const float* u, bool wants_start, const WeightGradients& gradients, int64_t threads,
                  const Team::Schedule& schedule) {
  const Kernels& k = kernels();
  const Sizes s = pass.sizes;
  const Division division(s, threads);
  const int64_t gates = gates_of(s.cell), first = first_part(s.cell), padded = panels_of(s.hidden) * k.width;
  const int64_t biases = biases_of(s.cell) * s.hidden, work_floats = aligned(k.backward_work(s));
  const bool has_beside = s.cell == Cell::gru || s.cell == Cell::gru_reset_after;
  Layout layout;
  const size_t of_weights = layout.add<float>(gates * s.hidden * padded);
  const size_t beside = layout.add<float>(has_beside ? s.steps * s.batch * s.hidden : 0);
  const size_t of_totals = layout.add<double>(biases * division.tasks);
  const size_t work = layout.add<float>(work_floats * division.tasks);
  Workspace workspace(layout.bytes());
  float* weights = at<float>(workspace, of_weights);
  double* totals = at<double>(workspace, of_totals);
  pass.weights = weights;
  pass.beside = at<float>(workspace, beside);
  std::fill_n(totals, biases * division.tasks, 0.0);
  run_phases(
      s, s.steps * phases_of(s.cell) + (wants_start ? 1 : 0), k.rows_at_once(gates * s.hidden), division, schedule,
      [&](Range panels) {
        const Matrix across{u, 1, gates * s.hidden}, rest{u + first * s.hidden, 1, gates * s.hidden};
        k.pack(across, first * s.hidden, s.hidden, panels, weights);
        if (first < gates) k.pack(rest, s.hidden, s.hidden, panels, weights + first * s.hidden * padded);
      },
      [&](int64_t phase, Range rows, Range panels, int64_t task) {
        k.backward(pass, phase, rows, panels, at<float>(workspace, work) + task * work_floats, totals + task * biases);
      });
  add_totals(s, totals, division.tasks, gradients);
  all_weight_gradients(pass, gradients, threads, schedule);
}

}  // namespace hotloop
