// Products of float32 matrices, shared out among threads. Knows nothing of XLA.
#pragma once

#include "kernels.h"
#include "team.h"

namespace hotloop {

// Computes product.c on at most `threads` threads. Throws std::bad_alloc.
void multiply(const Product& product, int64_t threads, const Team::Schedule& schedule);

}  // namespace hotloop
