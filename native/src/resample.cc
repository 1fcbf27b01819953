#include "resample.h"

#include <vector>

// One build for each generation of processors, chosen when the library is loaded; the sanitizers are not there yet then.
#ifdef HOTLOOP_ONE_BUILD
#define FOR_EACH_PROCESSOR
#else
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

namespace {

FOR_EACH_PROCESSOR void mix_rows(const uint8_t* __restrict upper, const uint8_t* __restrict lower, float weight,
                                 float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float near = upper[i], far = lower[i];
    out[i] = near + (far - near) * weight;
  }
}

FOR_EACH_PROCESSOR void mix_columns(const float* __restrict row, const int32_t* __restrict before,
                                    const int32_t* __restrict after, const float* __restrict weight,
                                    float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float near = row[before[i]], far = row[after[i]];
    out[i] = near + (far - near) * weight[i];
  }
}

}  // namespace

void hotloop_resample(const uint8_t* pixels, int64_t row_bytes, int64_t wide, const int32_t* top, const int32_t* bottom,
                      const float* down, int64_t tall, const int32_t* before, const int32_t* after, const float* right,
                      int64_t across, float* out) {
  std::vector<float> row(wide);
  for (int64_t i = 0; i < tall; ++i) {
    mix_rows(pixels + top[i] * row_bytes, pixels + bottom[i] * row_bytes, down[i], row.data(), wide);
    mix_columns(row.data(), before, after, right, out + i * across, across);
  }
}
