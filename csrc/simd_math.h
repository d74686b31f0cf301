// Vectors of float32, one width per instruction set: 16 lanes (AVX-512), 8 (AVX2), 4 (SSE2, NEON and plain C), and the
// functions on them. Included by kernel sources only; everything here is in the anonymous namespace.
//
// Lane-wise functions give a lane the same bits whatever its place, and sums have one fixed order; that is what the
// law in sayfa.h rests on. NaN rule: vmax(a, b) and vmin(a, b) return b when either is NaN, as the x86 instructions
// do.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
// False alarms inside g++ 12's own AVX-512 header (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace sayfa {
namespace SAYFA_ISA {
namespace {

#if defined(__AVX512F__)
using Vf = __m512;
using Vi = __m512i;
constexpr int W = 16;
#elif defined(__AVX2__)
using Vf = __m256;
using Vi = __m256i;
constexpr int W = 8;
#elif defined(__x86_64__)
using Vf = __m128;
using Vi = __m128i;
constexpr int W = 4;
#else
typedef float Vf __attribute__((vector_size(16)));
typedef int64_t Vi __attribute__((vector_size(16)));
constexpr int W = 4;
#endif
typedef int32_t Lanes __attribute__((vector_size(W * 4)));  // integer lanes for operators

inline Vf vset(float x) { return x - Vf{}; }
inline Vf vzero() { return Vf{}; }
inline Vf vload(const float* p) {
  Vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void vstore(float* p, Vf v) { std::memcpy(p, &v, sizeof v); }

inline Lanes bits_of(Vf v) { return (Lanes)v; }
inline Vf from_bits(Lanes v) { return (Vf)v; }
inline Lanes iset(int32_t x) { return x - Lanes{}; }

inline Vf vfma(Vf a, Vf b, Vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return (Vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Vf vmax(Vf a, Vf b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__x86_64__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Vf vmin(Vf a, Vf b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__x86_64__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// Lanes first, first + 1, ... as integers.
inline Lanes lane_index(int32_t first) {
  Lanes lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  return lanes + first;
}

// `inside` lanes of x, `fill` elsewhere; a lane with index i is inside when lo <= i < hi. x may hold anything outside.
inline Vf vkeep(Vf x, Lanes index, int32_t lo, int32_t hi, float fill) {
  const Lanes inside = (index >= lo) & (index < hi);
  return from_bits((bits_of(x) & inside) | (bits_of(vset(fill)) & ~inside));
}

// Bit i is set where lane i of a is at least (more: greater than) lane i of b. NaN sets nothing.
inline uint32_t mask_at_least(Vf a, Vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpge_ps(a, b)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < W; ++i) mask |= static_cast<uint32_t>(a[i] >= b[i]) << i;
  return mask;
#endif
}

inline uint32_t mask_more(Vf a, Vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpgt_ps(a, b)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < W; ++i) mask |= static_cast<uint32_t>(a[i] > b[i]) << i;
  return mask;
#endif
}

// Sum and largest of the lanes, in a fixed tree.
inline float hsum(Vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float lane[W];
  vstore(lane, v);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
#endif
}

inline float hmax(Vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float lane[W];
  vstore(lane, v);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
#endif
}

// Nearest integer, |x| < 2^22.
inline Vf vround(Vf x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vf magic = vset(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
#endif
}

// Integer lanes of a vector that holds whole numbers.
inline Lanes vint(Vf x) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtps_epi32(x);
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtps_epi32(x);
#else
  return __builtin_convertvector(x, Lanes);
#endif
}

// p * 2^n for whole n in [-252, 254]; results below the least denormal are 0, above the largest float infinite.
inline Vf vscale2(Vf p, Vf n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  const Lanes whole = vint(n), half = whole >> 1;
  return p * from_bits((half + 127) << 23) * from_bits((whole - half + 127) << 23);
#endif
}

// 2^x; relative error 9e-8 (the polynomial; degree 4: 2.8e-6). Exact 1 at 0, exact 0 below -160, NaN for NaN.
// `Finite`: the caller promises that x is not infinite, which saves the bounds where the scaling instruction has its
// own. Coefficients: minimax of the relative error on [-1/2, 1/2] with the constant term held at 1.
template <int Degree = 5, bool Finite = false>
inline Vf vexp2(Vf x) {
#if defined(__AVX512F__)
  if (!Finite) x = vmin(vset(129.0f), vmax(vset(-200.0f), x));
#else
  x = vmin(vset(129.0f), vmax(vset(-200.0f), x));
#endif
  const Vf n = vround(x), r = x - n;
  Vf p;
  if (Degree == 4) {
    p = vfma(vset(0.009582852944731712f), r, vset(0.055906426161527634f));
    p = vfma(p, r, vset(0.24024099111557007f));
    p = vfma(p, r, vset(0.6931241750717163f));
  } else {
    p = vfma(vset(0.001326472731307149f), r, vset(0.009671512991189957f));
    p = vfma(p, r, vset(0.05550733581185341f));
    p = vfma(p, r, vset(0.24022242426872253f));
    p = vfma(p, r, vset(0.6931470036506653f));
  }
  return vscale2(vfma(p, r, vset(1.0f)), n);
}

constexpr float kLog2E = 1.4426950408889634f;

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
