// The passes of a batch norm over some rows [rows, channels] of its images: sums, then what follows from them, with a
// ReLU and with something added before it. Sums of a few hundred rows are floats, all beyond are doubles.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace hotloop {
namespace HOTLOOP_ISA {

constexpr int64_t ROWS_IN_FLOATS = 256;

inline int64_t norm_work(int64_t channels) { return 2 * channels; }

// Calls add(row, channel, count, first, second) for every vector of a row, then adds both sums of all rows in doubles.
template <class Add>
inline void sum_rows(int64_t channels, Range rows, float* work, double* first, double* second, Add add) {
  float *a = work, *b = work + channels;
  for (int64_t start = rows.begin; start < rows.end; start += ROWS_IN_FLOATS) {
    const int64_t end = smaller(rows.end, start + ROWS_IN_FLOATS);
    for (int64_t c = 0; c < 2 * channels; ++c) work[c] = 0.0f;
    // Row by row: several side by side, whose sums would stay in registers, take twice as long.
    for (int64_t row = start; row < end; ++row) {
      for (int64_t c = 0; c < channels; c += LANES) {
        const int64_t count = smaller(LANES, channels - c);
        Vec s = load(a + c, count), t = load(b + c, count);
        add(row, c, count, s, t);
        store(a + c, s, count);
        store(b + c, t, count);
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      first[c] += a[c];
      second[c] += b[c];
    }
  }
}

// Of the distances to one pixel: a large common offset does not cancel the variance away.
inline void norm_sums(const Norm& n, Range rows, const float* near, float* work, double* sum, double* square) {
  sum_rows(n.channels, rows, work, sum, square, [&](int64_t row, int64_t c, int64_t count, Vec& s, Vec& t) {
    const Vec d = load(n.x + row * n.channels + c, count) - load(near + c, count);
    s += d;
    t += d * d;
  });
}

// NaN stays.
inline Vec rectify(Vec x) { return x < 0.0f ? Vec{} : x; }

// Not as slope x + shift: a large mean would cancel digits away.
inline Vec line(const NormLine& l, Vec x, int64_t c, int64_t count) {
  return (x - load(l.mean + c, count)) * load(l.slope + c, count) + load(l.offset + c, count);
}

inline void norm_apply(const Norm& n, Range rows, const NormLine& l) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t c = 0; c < n.channels; c += LANES) {
      const int64_t count = smaller(LANES, n.channels - c), at = row * n.channels + c;
      Vec y = line(l, load(n.x + at, count), c, count);
      if (n.residual) y += load(n.residual + at, count);
      store(n.y + at, n.relu ? rectify(y) : y, count);
    }
  }
}

// The gradient of what the ReLU was given; without anything added that is worked out again, not read.
inline Vec passed(const NormGradient& g, const NormLine& l, Vec x, int64_t at, int64_t c, int64_t count) {
  const Vec dy = load(g.dy + at, count);
  if (!g.relu) return dy;
  const Vec y = g.y ? load(g.y + at, count) : line(l, x, c, count);
  return y > 0.0f ? dy : Vec{};
}

inline void norm_gradient_sums(const NormGradient& g, Range rows, const NormLine& l, float* work, double* total,
                               double* along) {
  sum_rows(g.channels, rows, work, total, along, [&](int64_t row, int64_t c, int64_t count, Vec& s, Vec& t) {
    const int64_t at = row * g.channels + c;
    const Vec x = load(g.x + at, count), d = passed(g, l, x, at, c, count);
    s += d;
    t += d * (x - load(l.mean + c, count));
    if (g.d_residual) store(g.d_residual + at, d, count);
  });
}

// dx = slope d + tilt (x - mean) + base.
inline void norm_gradient_apply(const NormGradient& g, Range rows, const NormLine& l, const float* tilt,
                                const float* base) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t c = 0; c < g.channels; c += LANES) {
      const int64_t count = smaller(LANES, g.channels - c), at = row * g.channels + c;
      const Vec x = load(g.x + at, count);
      const Vec d = g.d_residual ? load(g.d_residual + at, count) : passed(g, l, x, at, c, count);
      const Vec tilted = load(tilt + c, count) * (x - load(l.mean + c, count)) + load(base + c, count);
      store(g.dx + at, load(l.slope + c, count) * d + tilted, count);
    }
  }
}

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
