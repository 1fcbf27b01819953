// One step of a recurrence, forward and backward, for some rows and some panels of units: the products with the recurrent
// weights into tiles, then the cell's formulas on each tile while it is in the cache. The formulas are those of
// hotloop/layers/recurrence.py; the sums of the gates are kept, and their activations worked out again on the way back.
#pragma once

#include "tiles.h"

namespace hotloop {
namespace HOTLOOP_ISA {

constexpr int64_t MOST_ROWS = 256;
constexpr int64_t TILE_FLOATS = 128 * 1024;  // of input products, half a megabyte
constexpr int64_t PACKED_ROWS = 96 * 1024;  // floats, three eighths of a megabyte: of the second-level cache

inline int64_t rows_at_once(int64_t terms) {
  return smaller(MOST_ROWS, larger(TALLEST, PACKED_ROWS / terms / TALLEST * TALLEST));
}

inline int64_t packed_floats(int64_t terms) { return larger(PACKED_ROWS, TALLEST * terms); }

// Part of a sequence's vectors: step `step`, row `row`, `count` units (at most LANES) from `unit` on.
struct Place {
  int64_t step, row, unit, count;
};

inline int64_t offset(Sizes s, Place at, int64_t gates) {
  return ((at.step * s.batch + at.row) * gates) * s.hidden + at.unit;
}

// Calls body(at, offset): where the number of these units is in a tile.
template <class Body>
inline void over_units(Sizes s, int64_t step, Range rows, int64_t panel, Body body) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t unit = panel * WIDTH + half * LANES, left = s.hidden - unit;
      if (left > 0) body(Place{step, row, unit, smaller(LANES, left)}, (row - rows.begin) * WIDTH + half * LANES);
    }
  }
}

// --- forward ---

// The input products of a few steps for some rows and panels, in tiles which the recurrent products are then added to.
// So many steps that each pass over the input weights serves many rows; so few that they stay in the cache. Where there are
// rows enough for one step at a time, each panel's input products are made just before its recurrent ones, and all panels
// have the same tile, which stays in the cache: those of all panels would be written to memory and fetched again.
struct InputTiles {
  float* data;
  int64_t gates, steps;
  Range rows, panels;

  bool is_one_panel() const { return steps == 1; }

  InputTiles(Sizes s, Range rows, Range panels, float* data)
      : data(data), gates(gates_of(s.cell)), rows(rows), panels(panels) {
    const int64_t high = rows.end - rows.begin, of_step = high * gates * (panels.end - panels.begin) * WIDTH;
    steps = smaller(s.steps, larger(1, smaller(rows_at_once(s.inputs) / high, TILE_FLOATS / of_step)));
  }

  int64_t of_gate() const { return steps * (rows.end - rows.begin) * WIDTH; }
  int64_t of_panel() const { return gates * of_gate(); }
  float* at(int64_t step, int64_t row, int64_t panel, int64_t gate) const {
    const int64_t place = step % steps * (rows.end - rows.begin) + row - rows.begin;
    const int64_t first = is_one_panel() ? 0 : panel - panels.begin;
    return data + (first * gates + gate) * of_gate() + place * WIDTH;
  }
};

inline int64_t forward_work(Sizes s, int64_t rows, int64_t panels) {
  const int64_t in_tiles = larger(rows, rows_at_once(s.inputs)) * gates_of(s.cell) * panels * WIDTH;
  return 2 * packed_floats(larger(s.inputs, s.hidden)) + MOST_ROWS * WIDTH + in_tiles;
}

// The weights of one gate: `weights` [terms, gates * hidden], or packed gate after gate.
inline Columns of_gate(const Forward& f, const float* weights, int64_t terms, int64_t gate) {
  const int64_t hidden = f.sizes.hidden;
  if (f.is_packed) return {weights + gate * terms * padded(hidden), hidden};
  return {weights + gate * hidden, hidden, gates_of(f.sizes.cell) * hidden};
}

// Fills the tiles for the steps from `step` on.
inline void multiply_inputs(const Forward& f, int64_t step, const InputTiles& tiles, float* packed) {
  const Sizes s = f.sizes;
  const int64_t steps = smaller(tiles.steps, s.steps - step);
  const int64_t high = tiles.rows.end - tiles.rows.begin;
  // Where these are all rows of the batch, those of one step follow on those of the step before.
  const int64_t runs = high == s.batch ? 1 : steps, rows = high * steps / runs;
  for (int64_t run = 0; run < runs; ++run) {
    const float* x = f.x + ((step + run) * s.batch + tiles.rows.begin) * s.inputs;
    pack_rows({x, s.inputs, 1}, rows, s.inputs, packed + run * rows * s.inputs);
  }
  for (int64_t panel = tiles.panels.begin; panel < tiles.panels.end; ++panel) {
    for (int64_t gate = 0; gate < tiles.gates; ++gate) {
      for (int64_t run = 0; run < runs; ++run) {
        multiply_panel(packed + run * rows * s.inputs, rows, of_gate(f, f.input_weights, s.inputs, gate), s.inputs, panel,
                       tiles.at(step + run, tiles.rows.begin, panel, gate), WIDTH, false);
      }
    }
  }
}

inline const float* before(const float* start, const float* states, Sizes s, int64_t step) {
  return step == 0 ? start : states + (step - 1) * s.batch * s.hidden;
}

inline Vec load_before(const float* start, const float* states, Sizes s, Place at) {
  const float* from = before(start, states, s, at.step);
  return from ? load(from + at.row * s.hidden + at.unit, at.count) : Vec{};
}

struct Sums {
  const Forward& pass;
  Place at;
  const float* tile;  // of the first gate; the next is `stride` further
  int64_t stride;
  const float* apart;  // the candidate's product (reset after)

  Vec sum(int64_t gate) const {
    return load(tile + gate * stride, LANES) + load(pass.input_bias + gate * pass.sizes.hidden + at.unit, at.count);
  }
  Vec keep(int64_t place, Vec sum) const {
    const Sizes s = pass.sizes;
    if (pass.sums) store(pass.sums + offset(s, at, sums_of(s.cell)) + place * s.hidden, sum, at.count);
    return sum;
  }
  Vec gate(int64_t number) const { return keep(number, sum(number)); }
  void output(Vec h) const { store(pass.h + offset(pass.sizes, at, 1), h, at.count); }
};

inline void rnn_forward(const Sums& sums) { sums.output(hyperbolic_tangent(sums.gate(0))); }

inline void lstm_forward(const Sums& sums) {
  const Forward& f = sums.pass;
  const Place at = sums.at;
  const int64_t here = at.row * f.sizes.hidden + at.unit;
  // Without sums c is one step's array, overwritten by the next.
  const Vec c_before = f.sums || at.step == 0 ? load_before(f.c0, f.c, f.sizes, at) : load(f.c + here, at.count);
  const Vec forget = sigmoid(sums.gate(1)), c = forget * c_before + gated_tangent(sums.gate(0), sums.gate(2));
  store(f.sums ? f.c + offset(f.sizes, at, 1) : f.c + here, c, at.count);
  sums.output(gated_tangent(sums.gate(3), c));
}

inline void reset_after_forward(const Sums& sums) {
  const Forward& f = sums.pass;
  const Place at = sums.at;
  const Vec h = load_before(f.h0, f.h, f.sizes, at), of_candidate = load(sums.apart, LANES) + load(f.bias + at.unit, at.count);
  const Vec reset = sigmoid(sums.gate(0)), update = sigmoid(sums.gate(1));
  const Vec candidate = hyperbolic_tangent(sums.keep(2, sums.sum(2) + reset * sums.keep(3, of_candidate)));
  sums.output(update * h + (1.0f - update) * candidate);
}

inline void gru_gates_forward(const Sums& sums) {
  const Forward& f = sums.pass;
  const Place at = sums.at;
  const int64_t here = at.row * f.sizes.hidden + at.unit;
  store(f.reset_h + here, sigmoid(sums.gate(0)) * load_before(f.h0, f.h, f.sizes, at), at.count);
  store(f.update + here, sigmoid(sums.gate(1)), at.count);
}

inline void gru_candidate_forward(const Sums& sums) {
  const Forward& f = sums.pass;
  const Place at = sums.at;
  const Vec update = load(f.update + at.row * f.sizes.hidden + at.unit, at.count);
  const Vec candidate = hyperbolic_tangent(sums.gate(2));
  sums.output(update * load_before(f.h0, f.h, f.sizes, at) + (1.0f - update) * candidate);
}

using Formula = void (*)(const Sums&);

// Adds `from` [batch, hidden] (null: zero) times `gates` gates from `first_gate` on to their tiles, then `formula`.
template <Formula formula>
inline void forward_phase(const Forward& f, int64_t step, const float* from, int64_t first_gate, int64_t gates,
                          const InputTiles& tiles, float* packed, float* packed_inputs, float* apart) {
  const Sizes s = f.sizes;
  const int64_t hidden = s.hidden, widest = larger(s.inputs, hidden);
  over_row_blocks(tiles.rows, rows_at_once(tiles.is_one_panel() ? widest : hidden), [&](Range block) {
    const int64_t high = block.end - block.begin;
    const float *h = nullptr, *x = nullptr;
    if (from) h = packed_rows(from + block.begin * hidden, high, hidden, packed);
    if (tiles.is_one_panel()) {
      x = packed_rows(f.x + (step * s.batch + block.begin) * s.inputs, high, s.inputs, packed_inputs);
    }
    const auto is_apart = [&](int64_t gate) { return s.cell == Cell::gru_reset_after && gate == 2; };
    const auto multiply_gate = [&](int64_t panel, int64_t gate) {
      if (tiles.is_one_panel()) {
        multiply_panel(x, high, of_gate(f, f.input_weights, s.inputs, gate), s.inputs, panel,
                       tiles.at(step, block.begin, panel, gate), WIDTH, false);
      }
      float* tile = is_apart(gate) ? apart : tiles.at(step, block.begin, panel, gate);
      if (from) {
        multiply_panel(h, high, of_gate(f, f.weights, hidden, gate), hidden, panel, tile, WIDTH, !is_apart(gate));
      }
      for (int64_t i = 0; !from && is_apart(gate) && i < high * WIDTH; ++i) apart[i] = 0.0f;
    };
    const auto finish = [&](int64_t panel, const float* apart) {
      const float* tile = tiles.at(step, block.begin, panel, 0);
      over_units(s, step, block, panel, [&](Place at, int64_t place) {
        formula(Sums{f, at, tile + place, tiles.of_gate(), apart + place});
      });
    };
    const Range panels = tiles.panels;
    // A single row does little but fetch weights, fastest in the order in which they are packed: gate by gate.
    const bool gate_by_gate = from && high == 1 && !tiles.is_one_panel() && panels.end - panels.begin <= MOST_ROWS;
    for (int64_t gate = first_gate; gate_by_gate && gate < first_gate + gates; ++gate) {
      const Columns weights = of_gate(f, f.weights, hidden, gate);
      if (is_apart(gate)) {
        multiply_row(h, weights, hidden, panels, apart, WIDTH, false);
      } else {
        multiply_row(h, weights, hidden, panels, tiles.at(step, block.begin, panels.begin, gate), tiles.of_panel(), true);
      }
    }
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      for (int64_t gate = first_gate; !gate_by_gate && gate < first_gate + gates; ++gate) multiply_gate(panel, gate);
      finish(panel, gate_by_gate ? apart + (panel - panels.begin) * WIDTH : apart);
    }
  });
}

inline void forward(const Forward& f, int64_t phase, Range rows, Range panels, float* work) {
  const Sizes s = f.sizes;
  const int64_t step = phase / phases_of(s.cell);
  const float* h = before(f.h0, f.h, s, step);
  float* packed_inputs = work + packed_floats(larger(s.inputs, s.hidden));
  float* apart = packed_inputs + packed_floats(larger(s.inputs, s.hidden));
  const InputTiles tiles(s, rows, panels, apart + MOST_ROWS * WIDTH);
  if (!tiles.is_one_panel() && phase % (phases_of(s.cell) * tiles.steps) == 0) multiply_inputs(f, step, tiles, work);
  if (s.cell == Cell::rnn) return forward_phase<rnn_forward>(f, step, h, 0, 1, tiles, work, packed_inputs, apart);
  if (s.cell == Cell::lstm) return forward_phase<lstm_forward>(f, step, h, 0, 4, tiles, work, packed_inputs, apart);
  if (s.cell == Cell::gru_reset_after) {
    return forward_phase<reset_after_forward>(f, step, h, 0, 3, tiles, work, packed_inputs, apart);
  }
  if (phase % 2 == 0) return forward_phase<gru_gates_forward>(f, step, h, 0, 2, tiles, work, packed_inputs, apart);
  forward_phase<gru_candidate_forward>(f, step, h ? f.reset_h : nullptr, 2, 1, tiles, work, packed_inputs, apart);
}

// --- backward ---

struct Gradients {
  const Backward& pass;
  Place at;
  const float* tile;

  Vec sum(int64_t place) const {
    const Sizes s = pass.sizes;
    return load(pass.sums + offset(s, at, sums_of(s.cell)) + place * s.hidden, at.count);
  }
  float* carried(float* array) const { return array + at.row * pass.sizes.hidden + at.unit; }
  Vec carry(const float* array) const { return load(array + at.row * pass.sizes.hidden + at.unit, at.count); }
  Vec h_before() const { return load_before(pass.h0, pass.h, pass.sizes, at); }
  bool is_last() const { return at.step == pass.sizes.steps - 1; }
  void give(int64_t gate, Vec gradient) const {
    const Sizes s = pass.sizes;
    store(pass.dz + offset(s, at, gates_of(s.cell)) + gate * s.hidden, gradient, at.count);
  }
  void give_beside(Vec value) const { store(pass.beside + offset(pass.sizes, at, 1), value, at.count); }
  // The gradient of this step's h: what the step after hands down (with `carries`, besides the product) and its output's.
  Vec of_h(bool carries) const {
    Vec dh = is_last() ? carry(pass.dh_last) : load(tile, LANES);
    if (carries && !is_last()) dh += carry(pass.dh0);
    return pass.d_outputs ? dh + load(pass.d_outputs + offset(pass.sizes, at, 1), at.count) : dh;
  }
};

inline void rnn_backward(const Gradients& d) {
  const Vec h = load(d.pass.h + offset(d.pass.sizes, d.at, 1), d.at.count);
  d.give(0, d.of_h(false) * (1.0f - h * h));
}

inline void lstm_backward(const Gradients& d) {
  const Backward& b = d.pass;
  const Vec i = sigmoid(d.sum(0)), forget = sigmoid(d.sum(1)), g = hyperbolic_tangent(d.sum(2)), o = sigmoid(d.sum(3));
  const Vec c_before = load_before(b.c0, b.c, b.sizes, d.at), dh = d.of_h(false);
  const Vec tanh_c = hyperbolic_tangent(load(b.c + offset(b.sizes, d.at, 1), d.at.count));
  const Vec dc = d.carry(d.is_last() ? b.dc_last : b.dc0) + dh * o * (1.0f - tanh_c * tanh_c);
  d.give(0, dc * g * slope(i));
  d.give(1, dc * c_before * slope(forget));
  d.give(2, dc * i * (1.0f - g * g));
  d.give(3, dh * tanh_c * slope(o));
  store(d.carried(b.dc0), dc * forget, d.at.count);
}

inline void reset_after_backward(const Gradients& d) {
  const Vec reset = sigmoid(d.sum(0)), update = sigmoid(d.sum(1)), candidate = hyperbolic_tangent(d.sum(2));
  const Vec dh = d.of_h(true), d_candidate = dh * (1.0f - update) * (1.0f - candidate * candidate);
  d.give(0, d_candidate * d.sum(3) * slope(reset));
  d.give(1, dh * (d.h_before() - candidate) * slope(update));
  d.give(2, d_candidate);
  d.give_beside(d_candidate * reset);
  store(d.carried(d.pass.dh0), dh * update, d.at.count);
}

inline void gru_candidate_backward(const Gradients& d) {
  const Vec update = sigmoid(d.sum(1)), candidate = hyperbolic_tangent(d.sum(2)), dh = d.of_h(true);
  d.give(1, dh * (d.h_before() - candidate) * slope(update));
  d.give(2, dh * (1.0f - update) * (1.0f - candidate * candidate));
  store(d.carried(d.pass.dh0), dh, d.at.count);
}

inline void gru_reset_backward(const Gradients& d) {
  const Vec reset = sigmoid(d.sum(0)), update = sigmoid(d.sum(1)), h = d.h_before(), d_reset_h = load(d.tile, LANES);
  d.give(0, d_reset_h * h * slope(reset));
  d.give_beside(reset * h);
  store(d.carried(d.pass.dh0), d.carry(d.pass.dh0) * update + d_reset_h * reset, d.at.count);
}

inline void start_backward(const Gradients& d) {
  const bool carries = d.pass.sizes.cell == Cell::gru || d.pass.sizes.cell == Cell::gru_reset_after;
  const Vec product = load(d.tile, LANES);
  store(d.carried(d.pass.dh0), carries ? d.carry(d.pass.dh0) + product : product, d.at.count);
}

// Gate gradients of one step, [batch, terms] with rows `row` apart, and the transposed weights they are multiplied with.
struct Part {
  const float* gradients;
  int64_t row, terms;
  const float* weights;
};

struct Parts {
  Part part[2];
  int64_t count;
};

inline int64_t backward_work(Sizes s) { return packed_floats(gates_of(s.cell) * s.hidden) + MOST_ROWS * WIDTH; }

// Adds the sums of `count` columns over some rows, `row` apart. In double from one step to the next: a float would lose the
// last digits of a sum over all steps.
inline void add_rows(const float* from, int64_t row, int64_t rows, int64_t count, double* totals) {
  Vec sum{};
  for (int64_t r = 0; r < rows; ++r) sum += load(from + r * row, count);
  for (int64_t lane = 0; lane < count; ++lane) totals[lane] += sum[lane];
}

// The part of the biases' gradients that comes from some rows of one step and one panel of the gates that it has.
inline void add_biases(const Backward& b, int64_t step, Range gates, Range rows, int64_t panel, double* totals) {
  const Sizes s = b.sizes;
  over_units(s, step, {rows.begin, rows.begin + 1}, panel, [&](Place at, int64_t) {
    for (int64_t gate = gates.begin; gate < gates.end; ++gate) {
      const bool is_beside = gate == gates_of(s.cell);
      const int64_t across = is_beside ? 1 : gates_of(s.cell);
      const float* from = is_beside ? b.beside : b.dz + gate * s.hidden;
      add_rows(from + offset(s, at, across), across * s.hidden, rows.end - rows.begin, at.count,
               totals + gate * s.hidden + at.unit);
    }
  });
}

// `gates`: those whose gradients the formula gives.
template <void (*formula)(const Gradients&)>
inline void backward_phase(const Backward& b, int64_t step, const Parts& parts, Range gates, Range rows, Range panels,
                           float* packed, double* totals) {
  const Sizes s = b.sizes;
  const int64_t terms = gates_of(s.cell) * s.hidden;
  float* tile = packed + packed_floats(terms);
  over_row_blocks(rows, rows_at_once(terms), [&](Range block) {
    const int64_t high = block.end - block.begin;
    float* packed_parts[2] = {packed, packed + high * parts.part[0].terms};
    for (int64_t i = 0; i < parts.count; ++i) {
      const Part& part = parts.part[i];
      pack_rows({part.gradients + block.begin * part.row, part.row, 1}, high, part.terms, packed_parts[i]);
    }
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      for (int64_t i = 0; i < parts.count; ++i) {
        const Part& part = parts.part[i];
        multiply_panel(packed_parts[i], high, {part.weights, s.hidden}, part.terms, panel, tile, WIDTH, i > 0);
      }
      over_units(s, step, block, panel, [&](Place at, int64_t place) { formula(Gradients{b, at, tile + place}); });
      add_biases(b, step, gates, block, panel, totals);
    }
  });
}

inline void backward(const Backward& b, int64_t phase, Range rows, Range panels, float* work, double* totals) {
  const Sizes s = b.sizes;
  const int64_t gates = gates_of(s.cell), first = first_part(s.cell), hidden = s.hidden;
  const int64_t step = s.steps - 1 - phase / phases_of(s.cell);
  const float* after = b.dz + (step + 1) * s.batch * gates * hidden;
  const float* second_weights = b.weights + first * hidden * padded(hidden);
  Parts parts{{{after, gates * hidden, first * hidden, b.weights}, {}}, 1};
  if (s.cell == Cell::gru_reset_after) {
    parts.part[1] = {b.beside + (step + 1) * s.batch * hidden, hidden, hidden, second_weights};
    parts.count = 2;
  }
  if (step == s.steps - 1) parts.count = 0;  // nothing comes after it
  const auto run = [&](auto phase_of_cell, Range given) {
    phase_of_cell(b, step, parts, given, rows, panels, work, totals);
  };
  const Range all_biases{0, biases_of(s.cell)};
  if (step < 0) return run(backward_phase<start_backward>, {0, 0});
  if (s.cell == Cell::rnn) return run(backward_phase<rnn_backward>, all_biases);
  if (s.cell == Cell::lstm) return run(backward_phase<lstm_backward>, all_biases);
  if (s.cell == Cell::gru_reset_after) return run(backward_phase<reset_after_backward>, all_biases);
  if (phase % 2 == 0) return run(backward_phase<gru_candidate_backward>, {1, 3});
  const float* of_candidate = b.dz + step * s.batch * gates * hidden + 2 * hidden;
  parts = {{{of_candidate, gates * hidden, hidden, second_weights}, {}}, 1};
  run(backward_phase<gru_reset_backward>, {0, 1});
}

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
