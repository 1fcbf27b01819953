// Convolutions of many small groups with as many filters as channels each: a vector holds whole groups, and each of a
// group's channels is spread over the group's lanes, so that nothing has to be laid out anew.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace hotloop {
namespace HOTLOOP_ISA {

constexpr int ABREAST = 8;  // pixels at once: as many sums, which hide an addition's latency

// In each run of SIZE lanes: the number in its lane `channel`.
template <int SIZE>
inline Vec spread(Vec x, int channel) {
  Ints from{};
#pragma GCC unroll 16
  for (int lane = 0; lane < LANES; ++lane) from[lane] = lane / SIZE * SIZE + channel;
  return __builtin_shuffle(x, from);
}

// Filters [first, first + LANES) of PIXELS pixels from `column` on in one row of the result. A tap beyond an edge reads zeros.
template <int SIZE, int PIXELS>
inline void convolve_pixels(const Groups& g, int64_t image, int64_t row, int64_t column, int64_t first) {
  static const float zeros[LANES] = {};
  Vec sums[PIXELS];
#pragma GCC unroll 8
  for (int p = 0; p < PIXELS; ++p) sums[p] = Vec{};
  for (int64_t i = 0; i < g.kernel_height; ++i) {
    const int64_t y = row * g.row_stride + i - g.top;
    if (y < 0 || y >= g.height) continue;
    const float* line = g.x + (image * g.height + y) * g.width * g.channels + first;
    for (int64_t j = 0; j < g.kernel_width; ++j) {
      const float* weights = g.kernel + (i * g.kernel_width + j) * SIZE * g.channels + first;
      const int64_t start = column * g.column_stride + j - g.left;
      Vec x[PIXELS];
#pragma GCC unroll 8
      for (int p = 0; p < PIXELS; ++p) {
        const int64_t at = start + p * g.column_stride;
        x[p] = load(at < 0 || at >= g.width ? zeros : line + at * g.channels, LANES);
      }
#pragma GCC unroll 16
      for (int channel = 0; channel < SIZE; ++channel) {
        const Vec weight = load(weights + channel * g.channels, LANES);
#pragma GCC unroll 8
        for (int p = 0; p < PIXELS; ++p) sums[p] += spread<SIZE>(x[p], channel) * weight;
      }
    }
  }
  float* out = g.y + ((image * g.rows + row) * g.columns + column) * g.channels + first;
#pragma GCC unroll 8
  for (int p = 0; p < PIXELS; ++p) store(out + p * g.channels, sums[p], LANES);
}

template <int SIZE>
void convolve_rows(const Groups& g, Range rows) {
  for (int64_t at = rows.begin; at < rows.end; ++at) {
    const int64_t image = at / g.rows, row = at % g.rows;
    for (int64_t first = 0; first < g.channels; first += LANES) {
      if (g.columns < ABREAST) {
        for (int64_t column = 0; column < g.columns; ++column) convolve_pixels<SIZE, 1>(g, image, row, column, first);
        continue;
      }
      // The last pixels end where the row does and share some with those before them.
      for (int64_t column = 0; column < g.columns; column += ABREAST) {
        convolve_pixels<SIZE, ABREAST>(g, image, row, smaller(column, g.columns - ABREAST), first);
      }
    }
  }
}

// Of 8 channels oneDNN's kernels are faster.
inline bool groups_fit(int64_t channels, int64_t size) {
  return (size == 2 || size == 4) && channels % LANES == 0;
}

inline void convolve_groups(const Groups& g, Range rows) {
  g.size == 2 ? convolve_rows<2>(g, rows) : convolve_rows<4>(g, rows);
}

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
