// Convolutions of many small groups, on several threads.
#pragma once

#include "convolution.h"

namespace hotloop {

// Whether `convolve_small_groups` takes it: groups of 2 or 4 channels and as many filters, in whole vectors, by kernels of
// several taps.
bool has_small_groups(const Geometry& g);

// (x, w) -> y; the geometry must have no complaint.
void convolve_small_groups(const Geometry& g, int64_t threads, const float* x, const float* w, float* y);

}  // namespace hotloop
