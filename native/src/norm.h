// Batch normalisation by a batch's own statistics, with what follows it in a residual network, and its gradient, on the
// threads of a borrowed pool. Knows nothing of XLA.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace hotloop {

// Gives y, and the mean and biased variance of each channel.
void normalise(const Norm& norm, const float* scale, const float* offset, float epsilon, float* mean, float* variance,
               int64_t threads);

// Of one value a channel each. `d_mean`, `d_variance`: what else depends on the statistics.
struct NormParameters {
  const float *scale, *offset, *mean, *variance, *d_mean, *d_variance;
  float *d_scale, *d_offset;
};

// Gives dx, d_residual where there is one, and the gradients of scale and offset.
void normalise_gradient(const NormGradient& gradient, const NormParameters& parameters, float epsilon, int64_t threads);

}  // namespace hotloop
