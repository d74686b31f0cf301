// Sixteen output columns side by side, in as many vectors as the instruction set needs: float sums and integer dot products
// of the weight panels. Included by linear_*.cpp only; everything here is in the anonymous namespace.
#pragma once

#include "half.h"
#include "linear.h"
#include "simd_math.h"
#include "small_rows.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

constexpr int kParts = 16 / W;

struct F16 {
  Vf v[kParts];
};

inline F16 f_set(float x) {
  F16 r;
  for (Vf& v : r.v) v = vset(x);
  return r;
}

// Loads and stores go vector by vector: copied as one piece, they would pass through the stack.
inline F16 f_load(const void* p) {
  F16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = vload(static_cast<const float*>(p) + i * W);
  return r;
}

inline void f_store(float* p, F16 x) {
  for (int i = 0; i < kParts; ++i) vstore(p + i * W, x.v[i]);
}

inline F16 f_add(F16 a, F16 b) {
  for (int i = 0; i < kParts; ++i) a.v[i] = a.v[i] + b.v[i];
  return a;
}

inline F16 f_mul(F16 a, F16 b) {
  for (int i = 0; i < kParts; ++i) a.v[i] = a.v[i] * b.v[i];
  return a;
}

inline F16 f_fma(F16 a, F16 b, F16 c) {
  for (int i = 0; i < kParts; ++i) c.v[i] = vfma(a.v[i], b.v[i], c.v[i]);
  return c;
}

// Sixteen float16 numbers.
inline F16 f_load_half(const uint8_t* p) {
  F16 r;
#if defined(__AVX512F__)
  r.v[0] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) r.v[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i)));
#else
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = half_to_float(load16(p + 2 * i));
  r = f_load(lanes);
#endif
  return r;
}

// ---------------------------------------------------------------------------------------------- integers

// 16 columns of four bytes each, or 16 int32 sums.
#if defined(__AVX2__)
struct I16 {
  Vi v[kParts];
};
#else
struct I16 {
  int32_t v[16];
};
#endif

inline I16 i_load(const uint8_t* p) {
  I16 r;
#if defined(__AVX2__)
  for (int i = 0; i < kParts; ++i) std::memcpy(&r.v[i], p + i * sizeof(Vi), sizeof(Vi));
#else
  std::memcpy(&r, p, sizeof r);
#endif
  return r;
}

inline I16 i_set(int32_t x) {
  I16 r;
#if defined(__AVX512F__)
  r.v[0] = _mm512_set1_epi32(x);
#elif defined(__AVX2__)
  for (Vi& v : r.v) v = _mm256_set1_epi32(x);
#else
  for (int32_t& v : r.v) v = x;
#endif
  return r;
}

// Sixteen times each number.
inline I16 times_16(I16 x) {
#if defined(__AVX512F__)
  x.v[0] = _mm512_slli_epi32(x.v[0], 4);
#elif defined(__AVX2__)
  for (Vi& v : x.v) v = _mm256_slli_epi32(v, 4);
#else
  for (int32_t& v : x.v) v *= 16;
#endif
  return x;
}

inline I16 low_nibbles(I16 w) {
#if defined(__AVX512F__)
  w.v[0] = _mm512_and_si512(w.v[0], _mm512_set1_epi8(15));
#elif defined(__AVX2__)
  for (Vi& v : w.v) v = _mm256_and_si256(v, _mm256_set1_epi8(15));
#else
  for (int32_t& v : w.v) v = v & 0x0f0f0f0f;
#endif
  return w;
}

inline I16 high_nibbles(I16 w) {
#if defined(__AVX512F__)
  w.v[0] = _mm512_and_si512(_mm512_srli_epi32(w.v[0], 4), _mm512_set1_epi8(15));
#elif defined(__AVX2__)
  for (Vi& v : w.v) v = _mm256_and_si256(_mm256_srli_epi32(v, 4), _mm256_set1_epi8(15));
#else
  for (int32_t& v : w.v) v = static_cast<int32_t>(static_cast<uint32_t>(v) >> 4) & 0x0f0f0f0f;
#endif
  return w;
}

inline int byte_of(int32_t word, int i) { return static_cast<int8_t>(static_cast<uint32_t>(word) >> (8 * i)); }

// sum + unsigned weight bytes . the four int8 of `a`. Without VNNI the weights must be below 128 (16-bit sums).
inline I16 dot_small(I16 sum, I16 w, int32_t a) {
#if defined(__AVX512VNNI__)
  sum.v[0] = _mm512_dpbusd_epi32(sum.v[0], w.v[0], _mm512_set1_epi32(a));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) {
    const __m256i pairs = _mm256_maddubs_epi16(w.v[i], _mm256_set1_epi32(a));
    sum.v[i] = _mm256_add_epi32(sum.v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#else
  for (int b = 0; b < 4; ++b)
    for (int i = 0; i < 16; ++i) sum.v[i] += (static_cast<uint32_t>(w.v[i]) >> (8 * b) & 255) * byte_of(a, b);
#endif
  return sum;
}

// Four-bit weights without VNNI: the sums of a group fit 16 bits (8 * 2 * 15 * 127 = 30,480), two to a column, so they are
// widened once a group.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool kShortSums = true;
inline I16 dot_short(I16 sums, I16 w, int32_t a) {
  for (int i = 0; i < 2; ++i)
    sums.v[i] = _mm256_add_epi16(sums.v[i], _mm256_maddubs_epi16(w.v[i], _mm256_set1_epi32(a)));
  return sums;
}
inline I16 widen_short(I16 start, I16 sums) {
  for (int i = 0; i < 2; ++i)
    start.v[i] = _mm256_add_epi32(start.v[i], _mm256_madd_epi16(sums.v[i], _mm256_set1_epi16(1)));
  return start;
}
#else
constexpr bool kShortSums = false;
inline I16 dot_short(I16 sums, I16, int32_t) { return sums; }
inline I16 widen_short(I16, I16 sums) { return sums; }
#endif

// Full bytes, zero at 128. With VNNI the weights stay unsigned and the sum starts at -128 * sum(a); elsewhere they are made
// signed here and the sum starts at 0.
#if defined(__AVX512VNNI__)
constexpr bool kStartsAtZero = false;
inline I16 dot_full(I16 sum, I16 w, int32_t a) { return dot_small(sum, w, a); }
#else
constexpr bool kStartsAtZero = true;
inline I16 dot_full(I16 sum, I16 w, int32_t a) {
#if defined(__AVX2__)
  for (int i = 0; i < 2; ++i) {
    // |w| <= 128 and |a| <= 127, so a pair is at most 32,512: maddubs does not saturate.
    const __m256i weights = _mm256_xor_si256(w.v[i], _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(_mm256_set1_epi32(a), weights));
    sum.v[i] = _mm256_add_epi32(sum.v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#else
  for (int b = 0; b < 4; ++b)
    for (int i = 0; i < 16; ++i) sum.v[i] += byte_of(w.v[i] ^ static_cast<int32_t>(0x80808080), b) * byte_of(a, b);
#endif
  return sum;
}
#endif

inline F16 to_float(I16 x) {
  F16 r;
#if defined(__AVX512F__)
  r.v[0] = _mm512_cvtepi32_ps(x.v[0]);
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) r.v[i] = _mm256_cvtepi32_ps(x.v[i]);
#else
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(x.v[i]);
  r = f_load(lanes);
#endif
  return r;
}

// ---------------------------------------------------------------------------------------------- bfloat16

#if defined(__AVX512BF16__)
// sum + w0 * x0 + w1 * x1, where each column holds the pair (w0, w1) and `pair` the activations (x0, x1).
inline F16 dot_bf16(F16 sum, const uint8_t* w, uint32_t pair) {
  const __m512i weights = _mm512_loadu_si512(w);
  sum.v[0] = _mm512_dpbf16_ps(sum.v[0], (__m512bh)weights, (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(pair)));
  return sum;
}
#else
// The first, or the second, of each column's pair of weights, widened.
inline F16 widened(const uint8_t* w, bool second) {
  F16 r;
  for (int i = 0; i < kParts; ++i) {
    const Lanes pairs = bits_of(vload(reinterpret_cast<const float*>(w) + i * W));
    r.v[i] = from_bits(second ? pairs & static_cast<int32_t>(0xffff0000) : pairs << 16);
  }
  return r;
}
#endif

// One part of the R rows, walked along K. The addresses of rows 1 and 2, 4 and 5 are those of 0 and 3 plus one or two
// strides, which the processor adds for free; two pointers stand for six rows, and the compiler, which would make six of
// them and run out of registers, is kept from looking through.
class Walk {
 public:
  Walk(const uint8_t* first, int64_t stride) : low_(first), high_(first + 3 * stride), stride_(stride) { hide(); }
  const uint8_t* row(int r) const { return (r < 3 ? low_ : high_) + (r % 3) * stride_; }
  void advance(int64_t bytes) {
    low_ += bytes;
    high_ += bytes;
    hide();
  }

 private:
  void hide() { asm("" : "+r"(low_), "+r"(high_), "+r"(stride_)); }
  const uint8_t* low_;
  const uint8_t* high_;
  int64_t stride_;
};

// ---------------------------------------------------------------------------------------------- a tile's end

// gate and up, half of the columns each.
template <int R, int V, class Act>
inline void put_gated(const TileOut& to, const F16 (&sums)[R][V], Act act) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V / 2; ++v)
      for (int i = 0; i < kParts; ++i)
        vstore(to.out + r * to.stride + v * 16 + i * W, act(sums[r][v].v[i]) * sums[r][V / 2 + v].v[i]);
}

template <int R, int V>
inline void put_results(const TileOut& to, const F16 (&sums)[R][V]) {
  if (to.epilogue == Epilogue::silu_mul) return put_gated(to, sums, silu);
  if (to.epilogue == Epilogue::gelu_mul) return put_gated(to, sums, gelu_tanh);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* at = to.out + r * to.stride + v * 16;
      f_store(at, to.epilogue == Epilogue::add ? f_add(f_load(at), sums[r][v]) : sums[r][v]);
    }
}

// The sums of R rows and V blocks of 16 columns, from block `first` on, of the All that the panel has, to where they go.
template <int All, int R, int V>
__attribute__((always_inline)) inline void put_sums(const TileOut& to, int first, const F16 (&sums)[R][V]) {
  if constexpr (V == All)
    if (to.out) {
      // A copy: loops over it that the compiler does not unroll need it in memory. Over the sums themselves they would keep
      // those in memory all along K, which takes twice the time.
      F16 ended[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) ended[r][v] = sums[r][v];
      return put_results(to, ended);
    }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) f_store(to.sums + (r * All + first + v) * 16, sums[r][v]);
}

// Fetches what belongs to a step along K, counted over all passes of the tile. Into the second-level cache: what comes later
// would push out of the first what is needed now.
inline void fetch_step(const Ahead& ahead, int64_t step) {
  const uint8_t* at = ahead.start + step * ahead.stride;
  if (at >= ahead.end) {
    if (!ahead.next) return;
    at = ahead.next + (at - ahead.end);
  }
  for (int64_t i = 0; i < ahead.lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
}

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
