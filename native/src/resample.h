// An image on a grid of places: rows first, then columns, each a mean of two weighted neighbours, in float32 and in that
// order, without fused multiply-add: the bits are those of the same formulas in numpy.
#pragma once

#include <cstdint>

extern "C" {

// pixels: rows of `row_bytes` bytes, of which `wide` are read. Output row i lies between rows top[i] and bottom[i]; its
// number j between numbers before[j] and after[j] of that row. out[tall, across].
__attribute__((visibility("default"))) void hotloop_resample(const uint8_t* pixels, int64_t row_bytes, int64_t wide,
                                                             const int32_t* top, const int32_t* bottom,
                                                             const float* down, int64_t tall, const int32_t* before,
                                                             const int32_t* after, const float* right, int64_t across,
                                                             float* out);
}
