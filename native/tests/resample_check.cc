// Drives the resampling of images without Python, so that the sanitizers see it: `make native-sanitize`.
// Results are compared with the four neighbours' weighted mean in double.

#include "../src/resample.h"

#include <cmath>
#include <cstdio>

#include "check.h"

namespace {

using namespace check;

// The neighbours of `count` places along an axis of `length`, and the weight of the second.
struct Axis {
  std::vector<int32_t> near, far;
  Numbers weight;

  Axis(double first, double step, int64_t count, int32_t length) {
    for (int64_t i = 0; i < count; ++i) {
      const double at = first + i * step, below = std::floor(at);
      near.push_back(std::clamp(static_cast<int32_t>(below), 0, length - 1));
      far.push_back(std::clamp(static_cast<int32_t>(below) + 1, 0, length - 1));
      weight.push_back(static_cast<float>(at - below));
    }
  }
};

void try_out(int32_t height, int32_t width, int64_t padding, int64_t size, double first, double step) {
  const int64_t row_bytes = width + padding;
  // Nothing behind the last row's own bytes.
  std::vector<uint8_t> pixels((height - 1) * row_bytes + width);
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<uint8_t>((i * 2654435761u) >> 13);
  const Axis down(first, step, size, height), right(first, 0.8 * step, size, width);
  Numbers out(size * size, -1.0f);
  hotloop_resample(pixels.data(), row_bytes, width, down.near.data(), down.far.data(), down.weight.data(), size,
                   right.near.data(), right.far.data(), right.weight.data(), size, out.data());
  Exact expected;
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      const auto at = [&](int32_t y, int32_t x) { return static_cast<double>(pixels[y * row_bytes + x]); };
      const double v = down.weight[i], u = right.weight[j];
      const double left = at(down.near[i], right.near[j]) * (1 - v) + at(down.far[i], right.near[j]) * v;
      const double beside = at(down.near[i], right.far[j]) * (1 - v) + at(down.far[i], right.far[j]) * v;
      expected.push_back(left * (1 - u) + beside * u);
    }
  }
  require_close(out, expected, "resampled pixels");
}

}  // namespace

int main() {
  for (const int64_t size : {1, 7, 32, 67}) {
    for (const double step : {0.3, 1.0, 2.7}) {
      for (const double first : {-0.5, 0.0, 3.2}) {
        try_out(1, 1, 0, size, first, step);
        try_out(5, 33, 3, size, first, step);
        try_out(40, 19, 0, size, first, step);
      }
    }
  }
  std::puts("resample_check: right");
}
