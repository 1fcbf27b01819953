#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace hotloop {

namespace baseline {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}

namespace {

// HOTLOOP_NATIVE_ISA asks for an older set than the processor has: for tests, and for processors that slow down.
bool may_use(const char* name) {
  const char* most = std::getenv("HOTLOOP_NATIVE_ISA");
  if (!most || !*most || !std::strcmp(most, "avx512")) return true;
  return !std::strcmp(most, "avx2") && !std::strcmp(name, "avx2");
}

const Kernels& choose() {
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && may_use("avx512")) return avx512::table;
  if (has_avx2 && may_use("avx2")) return avx2::table;
  return baseline::table;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& best = choose();
  return best;
}

}  // namespace hotloop
