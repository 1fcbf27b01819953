// One build of the inner loops: CMake compiles this file once for each instruction set, HOTLOOP_ISA being its name.
#include "cells.h"

namespace hotloop {
namespace HOTLOOP_ISA {

extern const Kernels table;
const Kernels table{WIDTH, pack_columns, multiply, PRODUCT_WORK, forward, backward, step_work};

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
