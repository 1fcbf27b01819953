// The log-likelihood of a network with Bernoulli outputs, and its gradient in the input, on several threads.
#pragma once

#include "kernels.h"
#include "team.h"

namespace hotloop {

void bernoulli_gradient(const BernoulliNetwork& network, int64_t threads, const Team::Schedule& schedule);

}  // namespace hotloop
