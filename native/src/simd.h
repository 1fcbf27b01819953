// Vectors of floats as wide as the instruction set that a file is compiled for, and the functions of the gates on them.
//
// Everything lies in the namespace HOTLOOP_ISA of its build and uses nothing of the standard library: a function that the
// linker merged with its namesake of another build could hold instructions that the processor does not have.
#pragma once

#include <cstdint>

namespace hotloop {
namespace HOTLOOP_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16, TALLEST = 14;
#elif defined(__AVX2__)
constexpr int LANES = 8, TALLEST = 6;
#else
constexpr int LANES = 4, TALLEST = 6;
#endif
constexpr int64_t WIDTH = 2 * LANES;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The first `count` lanes; the others are zero, and are not written.
inline Vec load(const float* from, int64_t count) {
  if (count >= LANES) return *reinterpret_cast<const Unaligned*>(from);
  Vec v{};
  for (int64_t lane = 0; lane < count; ++lane) v[lane] = from[lane];
  return v;
}

inline void store(float* to, Vec v, int64_t count) {
  if (count >= LANES) {
    *reinterpret_cast<Unaligned*>(to) = v;
    return;
  }
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = v[lane];
}

// Rows become columns: each turn interleaves one half of the rows with the other.
inline void transpose(Vec (&rows)[LANES]) {
  Ints low{}, high{};
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) {
    low[i] = i / 2 + i % 2 * LANES;
    high[i] = low[i] + LANES / 2;
  }
#pragma GCC unroll 4
  for (int turn = 1; turn < LANES; turn *= 2) {
    Vec mixed[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; ++i) {
      mixed[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
      mixed[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) rows[i] = mixed[i];
  }
}

inline Vec all(float x) { return Vec{} + x; }

// NaN stays: of two numbers of which one is NaN, these instructions give the second.
inline Vec clamp(Vec x, float low, float high) {
#if defined(__AVX512F__)
  x = __builtin_ia32_maxps512_mask(all(low), x, x, -1, 4);  // 4: rounded as everything else
  return __builtin_ia32_minps512_mask(all(high), x, x, -1, 4);
#elif defined(__AVX2__)
  return __builtin_ia32_minps256(all(high), __builtin_ia32_maxps256(all(low), x));
#else
  return __builtin_ia32_minps(all(high), __builtin_ia32_maxps(all(low), x));
#endif
}

// e^x within 2e-7 of it, by Cephes' polynomial on [-ln 2 / 2, ln 2 / 2]; beyond +-87 as at +-87.
__attribute__((always_inline)) inline Vec exponential(Vec x) {
  x = clamp(x, -87.0f, 87.0f);
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number
  const Vec shifted = x * 1.44269504088896341f + magic;
  const Vec whole = shifted - magic;
  const Vec r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = ((Ints)shifted - (Ints)magic + 127) << 23;
  return p * (Vec)power;
}

struct Quotient {
  Vec above, below;
};

// A quotient of polynomials within 3e-7 of it (Eigen's and XLA's); +-1 in float32 from where it is cut off.
inline Quotient tangent_quotient(Vec x) {
  x = clamp(x, -7.90531110763549805f, 7.90531110763549805f);
  const Vec s = x * x;
  Vec p = s * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * s + -8.60467152213735e-11f;
  p = p * s + 5.12229709037114e-08f;
  p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f;
  p = p * s + 4.89352455891786e-03f;
  Vec q = s * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f;
  q = q * s + 4.89352518554385e-03f;
  return {x * p, q};
}

inline Vec hyperbolic_tangent(Vec x) {
  const Quotient t = tangent_quotient(x);
  return t.above / t.below;
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

// sigmoid(gate) * tanh(x) with one division for both: the divisor is below 1e38.
inline Vec gated_tangent(Vec gate, Vec x) {
  const Quotient t = tangent_quotient(x);
  return t.above / (t.below * (1.0f + exponential(-gate)));
}

inline Vec slope(Vec gate) { return gate * (1.0f - gate); }

}  // namespace HOTLOOP_ISA
}  // namespace hotloop
