// Whole sequences of a recurrent layer in float32, forward and backward, shared out among threads. Knows nothing of XLA.
#pragma once

#include "kernels.h"
#include "team.h"

namespace hotloop {

// The weights w[inputs, gates * hidden] and u[hidden, gates * hidden], or both as `pack_weights` has laid them out.
struct Weights {
  const float *w, *u, *packed = nullptr;
};

// Floats of packed weights on this processor.
int64_t packed_weights(Sizes sizes);

// Lays weights out as the products read them, once for many sequences.
void pack_weights(Sizes sizes, const float* w, const float* u, float* packed, int64_t threads,
                  const Team::Schedule& schedule);

// Fills pass.h, pass.c and pass.sums; what lies between two phases, and weights that are packed for this sequence alone,
// have their space here. Throws std::bad_alloc.
void run_forward(Forward pass, Weights weights, int64_t threads, const Team::Schedule& schedule);

// Where the gradients of the weights go; `bias`: of the candidate's product (reset after).
struct WeightGradients {
  float *w, *input_bias, *u, *bias;
};

// Fills pass.dz, pass.dh0 (rightly only where `wants_start`; else it is space to work in), pass.dc0, and the gradients of
// the weights. Throws std::bad_alloc.
void run_backward(Backward pass, const float* u, bool wants_start, const WeightGradients& gradients, int64_t threads,
                  const Team::Schedule& schedule);

}  // namespace hotloop
