// One build of the inner loops: CMake compiles this file once for each instruction set, HOTLOOP_ISA being its name.
#include "bernoulli_network.h"
#include "cells.h"
#include "groups.h"
#include "norms.h"
#include "tied_passes.h"

namespace hotloop {
namespace HOTLOOP_ISA {

extern const Kernels table;
const Kernels table{WIDTH,         pack_columns, multiply,   PRODUCT_WORK,       forward,             forward_work,
                    backward,      backward_work, rows_at_once, norm_sums, norm_apply, norm_gradient_sums,
                    norm_gradient_apply, norm_work, bernoulli_rows, bernoulli_work, groups_fit, convolve_groups,
                    tied_forward,  tied_refeed,  tied_gradient, tied_work};

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
