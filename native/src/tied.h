// The outer layers of an autoencoder whose last layer has the first one's weights, and which is given its own output: each
// step is one pass over the weights, on the threads of a borrowed pool. Knows nothing of XLA.
#pragma once

#include "kernels.h"
#include "team.h"

namespace hotloop {

// Gives y, and `next` [users, units]: y.T weights.
void tied_forward(const TiedForward& pass, float* next, int64_t threads, const Team::Schedule& schedule);

// Gives z, `back` [users, units]: dz.T weights, and the sum of (z - y) squared.
void tied_refeed(const TiedRefeed& pass, float* back, float* squares, int64_t threads, const Team::Schedule& schedule);

// Gives the gradients of weights and bias, and `back` [users, units]: dy.T weights.
void tied_gradient(const TiedGradient& pass, float* back, int64_t threads, const Team::Schedule& schedule);

}  // namespace hotloop
