// 2-D convolutions of float32 by oneDNN, NHWC by HWIO, forward and both gradients. Knows nothing of XLA.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace hotloop {

// x[images, height, width, channels] by w[kernel_height, kernel_width, channels / groups, filters] gives
// y[images, rows, columns, filters]. A group's filters lie side by side.
struct Geometry {
  int64_t images, height, width, channels;
  int64_t kernel_height, kernel_width, filters;
  int64_t rows, columns;
  int64_t row_stride, column_stride;
  int64_t top, bottom, left, right;
  int64_t groups;
};

enum class Pass { forward, bias, bias_relu, bias_sum, bias_sum_relu, input_gradient, kernel_gradient };

// What is wrong with the geometry in one line, or nothing.
std::string complaint(const Geometry& g);

// Computes `result` from `first` and `second`: (x, w) -> y, (x, w, bias) -> y, (x, w, bias, residual) -> y (`sum`),
// (dy, w) -> dx or (x, dy) -> dw.
// `threads`: at most so many. Throws dnnl::error or std::bad_alloc; the geometry must have no complaint.
void convolve(Pass pass, const Geometry& g, int64_t threads, const float* first, const float* second,
              const float* bias, const float* residual, float* result);

}  // namespace hotloop
