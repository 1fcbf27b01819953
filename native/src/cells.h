// One step of a recurrence, forward and backward, for some rows and some panels of units: the products with the recurrent
// weights into tiles, then the cell's formulas on each tile while it is in the cache. The formulas are those of
// hotloop/layers/recurrence.py; the sums of the gates are kept, and their activations worked out again on the way back.
#pragma once

#include "tiles.h"

namespace hotloop {
namespace HOTLOOP_ISA {

constexpr int64_t MOST_ROWS = 256;
constexpr int64_t PACKED_ROWS = 96 * 1024;  // floats, three eighths of a megabyte: of the second-level cache

inline int64_t rows_at_once(int64_t terms) {
  return smaller(MOST_ROWS, larger(TALLEST, PACKED_ROWS / terms / TALLEST * TALLEST));
}

inline int64_t step_work(Sizes s) {
  const int64_t terms = gates_of(s.cell) * s.hidden;
  return larger(PACKED_ROWS, TALLEST * terms) + 4 * MOST_ROWS * WIDTH;
}

// Part of a sequence's vectors: step `step`, row `row`, `count` units (at most LANES) from `unit` on.
struct Place {
  int64_t step, row, unit, count;
};

inline int64_t offset(Sizes s, Place at, int64_t gates) {
  return ((at.step * s.batch + at.row) * gates) * s.hidden + at.unit;
}

// Calls body(at, tile): tile is where the first product of these units is; the next is `stride` further.
template <class Body>
inline void over_units(Sizes s, int64_t step, Range rows, int64_t panel, const float* tiles, Body body) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t unit = panel * WIDTH + half * LANES, left = s.hidden - unit;
      if (left > 0) body(Place{step, row, unit, smaller(LANES, left)}, tiles + (row - rows.begin) * WIDTH + half * LANES);
    }
  }
}

// Calls body(block, packed rows, tiles) for blocks of rows whose packed form fits.
template <class Body>
inline void over_row_blocks(Range rows, int64_t terms, float* work, Body body) {
  const int64_t count = rows.end - rows.begin, most = rows_at_once(terms), blocks = (count + most - 1) / most;
  for (int64_t block = 0; block < blocks; ++block) {
    const Range part{rows.begin + count * block / blocks, rows.begin + count * (block + 1) / blocks};
    body(part, work, work + larger(PACKED_ROWS, TALLEST * terms));
  }
}

// --- forward ---

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
  const float *z, *tile;
  int64_t stride;

  Vec product(int64_t gate) const { return load(tile + gate * stride, LANES); }
  Vec input(int64_t gate) const { return load(z + gate * pass.sizes.hidden, at.count); }
  Vec keep(int64_t place, Vec sum) const {
    const Sizes s = pass.sizes;
    if (pass.sums) store(pass.sums + offset(s, at, sums_of(s.cell)) + place * s.hidden, sum, at.count);
    return sum;
  }
  Vec gate(int64_t number) const { return keep(number, input(number) + product(number)); }
  void output(Vec h) const { store(pass.h + offset(pass.sizes, at, 1), h, at.count); }
};

inline void rnn_forward(const Sums& sums) { sums.output(hyperbolic_tangent(sums.gate(0))); }

inline void lstm_forward(const Sums& sums) {
  const Forward& f = sums.pass;
  const Place at = sums.at;
  const int64_t here = at.row * f.sizes.hidden + at.unit;
  // Without sums c is one step's array, overwritten by the next.
  const Vec c_before = f.sums || at.step == 0 ? load_before(f.c0, f.c, f.sizes, at) : load(f.c + here, at.count);
  const Vec i = sigmoid(sums.gate(0)), forget = sigmoid(sums.gate(1)), g = hyperbolic_tangent(sums.gate(2));
  const Vec c = forget * c_before + i * g;
  store(f.sums ? f.c + offset(f.sizes, at, 1) : f.c + here, c, at.count);
  sums.output(sigmoid(sums.gate(3)) * hyperbolic_tangent(c));
}

inline void reset_after_forward(const Sums& sums) {
  const Forward& f = sums.pass;
  const Place at = sums.at;
  const Vec h = load_before(f.h0, f.h, f.sizes, at), of_candidate = sums.product(2) + load(f.bias + at.unit, at.count);
  const Vec reset = sigmoid(sums.gate(0)), update = sigmoid(sums.gate(1));
  const Vec candidate = hyperbolic_tangent(sums.keep(2, sums.input(2) + reset * sums.keep(3, of_candidate)));
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
  const Vec candidate = hyperbolic_tangent(sums.keep(2, sums.input(2) + sums.product(0)));
  sums.output(update * load_before(f.h0, f.h, f.sizes, at) + (1.0f - update) * candidate);
}

using Formula = void (*)(const Sums&);

// `from` [batch, hidden] (null: zero) times `gates` gates from `first_gate` on, then `formula`.
template <Formula formula>
inline void forward_phase(const Forward& f, int64_t step, const float* from, int64_t first_gate, int64_t gates,
                          Range rows, Range panels, float* work) {
  const Sizes s = f.sizes;
  const int64_t hidden = s.hidden, of_gate = hidden * padded(hidden);
  over_row_blocks(rows, hidden, work, [&](Range part, float* packed, float* tiles) {
    const int64_t high = part.end - part.begin, stride = high * WIDTH;
    if (from) pack_rows({from + part.begin * hidden, hidden, 1}, high, hidden, packed);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      for (int64_t gate = 0; gate < gates; ++gate) {
        float* tile = tiles + gate * stride;
        const float* weights = f.weights + (first_gate + gate) * of_gate;
        if (from) multiply_panel(packed, high, weights, hidden, hidden, panel, tile, WIDTH, false);
        for (int64_t i = 0; !from && i < stride; ++i) tile[i] = 0.0f;
      }
      over_units(s, step, part, panel, tiles, [&](Place at, const float* tile) {
        formula(Sums{f, at, f.z + offset(s, at, gates_of(s.cell)), tile, stride});
      });
    }
  });
}

inline void forward(const Forward& f, int64_t phase, Range rows, Range panels, float* work) {
  const Cell cell = f.sizes.cell;
  const int64_t step = phase / phases_of(cell);
  const float* h = before(f.h0, f.h, f.sizes, step);
  if (cell == Cell::rnn) return forward_phase<rnn_forward>(f, step, h, 0, 1, rows, panels, work);
  if (cell == Cell::lstm) return forward_phase<lstm_forward>(f, step, h, 0, 4, rows, panels, work);
  if (cell == Cell::gru_reset_after) {
    return forward_phase<reset_after_forward>(f, step, h, 0, 3, rows, panels, work);
  }
  if (phase % 2 == 0) return forward_phase<gru_gates_forward>(f, step, h, 0, 2, rows, panels, work);
  forward_phase<gru_candidate_forward>(f, step, h ? f.reset_h : nullptr, 2, 1, rows, panels, work);
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

template <void (*formula)(const Gradients&)>
inline void backward_phase(const Backward& b, int64_t step, const Parts& parts, Range rows, Range panels, float* work) {
  const Sizes s = b.sizes;
  over_row_blocks(rows, gates_of(s.cell) * s.hidden, work, [&](Range block, float* packed, float* tiles) {
    const int64_t high = block.end - block.begin;
    float* packed_parts[2] = {packed, packed + high * parts.part[0].terms};
    for (int64_t i = 0; i < parts.count; ++i) {
      const Part& part = parts.part[i];
      pack_rows({part.gradients + block.begin * part.row, part.row, 1}, high, part.terms, packed_parts[i]);
    }
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      for (int64_t i = 0; i < parts.count; ++i) {
        const Part& part = parts.part[i];
        multiply_panel(packed_parts[i], high, part.weights, part.terms, s.hidden, panel, tiles, WIDTH, i > 0);
      }
      over_units(s, step, block, panel, tiles, [&](Place at, const float* tile) { formula(Gradients{b, at, tile}); });
    }
  });
}

inline void backward(const Backward& b, int64_t phase, Range rows, Range panels, float* work) {
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
  if (step < 0) return backward_phase<start_backward>(b, step, parts, rows, panels, work);
  if (s.cell == Cell::rnn) return backward_phase<rnn_backward>(b, step, parts, rows, panels, work);
  if (s.cell == Cell::lstm) return backward_phase<lstm_backward>(b, step, parts, rows, panels, work);
  if (s.cell == Cell::gru_reset_after) return backward_phase<reset_after_backward>(b, step, parts, rows, panels, work);
  if (phase % 2 == 0) return backward_phase<gru_candidate_backward>(b, step, parts, rows, panels, work);
  const float* of_candidate = b.dz + step * s.batch * gates * hidden + 2 * hidden;
  parts = {{{of_candidate, gates * hidden, hidden, second_weights}, {}}, 1};
  backward_phase<gru_reset_backward>(b, step, parts, rows, panels, work);
}

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
