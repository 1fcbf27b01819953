// Whole sequences of a recurrent layer in float32, forward and backward, shared out among threads. Knows nothing of XLA.
#pragma once

#include "kernels.h"
#include "team.h"

namespace hotloop {

// With the weights w[inputs, gates * hidden] and u[hidden, gates * hidden]. Fills pass.h, pass.c and pass.sums; the packed
// weights and what lies between two phases are found here. Throws std::bad_alloc.
void run_forward(Forward pass, const float* w, const float* u, int64_t threads, const Team::Schedule& schedule);

// Where the gradients of the weights go; `bias`: of the candidate's product (reset after).
struct WeightGradients {
  float *w, *input_bias, *u, *bias;
};

// Fills pass.dz, pass.dh0 (rightly only where `wants_start`; else it is space to work in), pass.dc0, and the gradients of
// the weights. Throws std::bad_alloc.
void run_backward(Backward pass, const float* u, bool wants_start, const WeightGradients& gradients, int64_t threads,
                  const Team::Schedule& schedule);

}  // namespace hotloop
