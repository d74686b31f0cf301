// Row functions of the small ops, for whoever fuses them with a neighbour. Each takes whole rows of float32 and gives
// a row bits that depend on that row alone.
#pragma once

#include <cmath>

#include "simd_math.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

// Sum of squares: four chains of vectors, added in a fixed order, then the rest one by one.
inline float sum_of_squares(const float* x, int64_t n) {
  Vf chain[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int c = 0; c < 4; ++c) {
      const Vf v = vload(x + i + c * W);
      chain[c] = vfma(v, v, chain[c]);
    }
  for (; i + W <= n; i += W) {
    const Vf v = vload(x + i);
    chain[0] = vfma(v, v, chain[0]);
  }
  float sum = hsum((chain[0] + chain[1]) + (chain[2] + chain[3]));
  for (; i < n; ++i) sum += x[i] * x[i];
  return sum;
}

// 1 / sqrt(mean(x²) + eps)
inline float rms_scale(const float* x, int64_t n, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

// out = x * scale * weight; out may be x.
inline void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float scale = rms_scale(x, n, eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

inline Vf silu(Vf x) { return x / (vset(1.0f) + vexp2(x * vset(-kLog2E))); }

// 0.5 x (1 + tanh(y)) with y = sqrt(2/pi) (x + 0.044715 x³), written as x / (1 + exp(-2y)).
inline Vf gelu_tanh(Vf x) {
  const Vf inner = vfma(x * x * x, vset(0.044715f), x);
  return x / (vset(1.0f) + vexp2(inner * vset(-2.0f * 0.7978845608028654f * kLog2E)));
}

template <class Act>
inline void act_mul_row(const float* gate, const float* up, int64_t n, float* out, Act act) {
  int64_t i = 0;
  for (; i + W <= n; i += W) vstore(out + i, act(vload(gate + i)) * vload(up + i));
  if (i == n) return;
  alignas(64) float g[W] = {}, u[W] = {};
  for (int64_t j = i; j < n; ++j) g[j - i] = gate[j], u[j - i] = up[j];
  vstore(g, act(vload(g)) * vload(u));
  for (int64_t j = i; j < n; ++j) out[j] = g[j - i];
}

// Turns one head. `half`: pairs (i, i + half_dim).
inline void rope_half(float* x, const float* cos, const float* sin, int64_t half_dim) {
  for (int64_t i = 0; i < half_dim; ++i) {
    const float a = x[i], b = x[i + half_dim];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half_dim] = b * cos[i] + a * sin[i];
  }
}

// Pairs (2i, 2i + 1).
inline void rope_adjacent(float* x, const float* cos, const float* sin, int64_t half_dim) {
  for (int64_t i = 0; i < half_dim; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
