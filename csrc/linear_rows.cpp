// Prepares activation rows for the weight products: optional RMS norm, then int8 by groups of 32, bfloat16 or float32.
#include "half.h"
#include "linear.h"
#include "shares.h"
#include "small_rows.h"

namespace sayfa::SAYFA_ISA {
namespace {

constexpr int kGroup = 32;
constexpr int kVectors = kGroup / W;

// Largest of all lanes, and their sum.
inline int32_t lanes_max(Lanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t largest = x[0];
  for (int i = 1; i < W; ++i) largest = largest > x[i] ? largest : x[i];
  return largest;
#endif
}

inline int32_t lanes_sum(Lanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = x[0];
  for (int i = 1; i < W; ++i) sum += x[i];
  return sum;
#endif
}

// W whole numbers of at most 127 as bytes.
inline void store_bytes(int8_t* to, Lanes x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
#else
  for (int i = 0; i < W; ++i) to[i] = static_cast<int8_t>(x[i]);
#endif
}

// Largest magnitude of a group as its bits. Integer order on |x| is float order, with infinity and then NaN on top: so a
// NaN reaches the scale and, through it, every result of the row.
inline float largest_magnitude(const float* x) {
  Lanes most = bits_of(vload(x)) & 0x7fffffff;
  for (int i = 1; i < kVectors; ++i) {
    const Lanes next = bits_of(vload(x + i * W)) & 0x7fffffff;
    most = most > next ? most : next;
  }
  return float_of_bits(static_cast<uint32_t>(lanes_max(most)));
}

// One group of 32 times `inverse` as bytes; the sum of the bytes, or of each half.
template <int Sums>
inline void quantize_group(const float* x, float inverse, int8_t* q, int32_t* sums) {
  constexpr int kPart = kVectors / Sums;
  for (int part = 0; part < Sums; ++part) {
    Lanes sum = Lanes{};
    for (int i = part * kPart; i < (part + 1) * kPart; ++i) {
      const Lanes whole = vint(vround(vload(x + i * W) * vset(inverse)));
      sum += whole;
      store_bytes(q + i * W, whole);
    }
    sums[part] = lanes_sum(sum);
  }
}

inline GroupFacts facts_of(float scale, int32_t sum) { return {scale, -8 * sum, scale * static_cast<float>(sum), 0}; }

void quantize_row(const RowLayout& l, const float* x, uint8_t* out) {
  auto* q = reinterpret_cast<int8_t*>(out + l.q);
  auto* facts32 = reinterpret_cast<GroupFacts*>(out + l.facts32);
  auto* facts16 = reinterpret_cast<GroupFacts*>(out + l.facts16);
  const int64_t groups = l.k / kGroup;
  constexpr int64_t kSpan = 64;  // groups whose divisions are made side by side
  float scale[kSpan], inverse[kSpan];
  for (int64_t start = 0; start < groups; start += kSpan) {
    const int64_t count = groups - start < kSpan ? groups - start : kSpan;
    for (int64_t g = 0; g < count; ++g) scale[g] = largest_magnitude(x + (start + g) * kGroup);
    for (int64_t g = 0; g < count; ++g) {
      // Below this the inverse would overflow; such a group is zero for all purposes. A NaN is not below anything.
      const bool zero = scale[g] < 1e-30f;
      inverse[g] = zero ? 0.0f : 127.0f / scale[g];
      scale[g] = zero ? 0.0f : scale[g] / 127.0f;
    }
    for (int64_t g = 0; g < count; ++g) {
      int32_t sums[2] = {0, 0};
      const int64_t at = start + g;
      if (!std::isfinite(scale[g])) {
        std::memset(q + at * kGroup, 0, kGroup);  // infinity or NaN times zero is NaN in every result
        if (l.facts16 >= 0) facts16[2 * at] = facts16[2 * at + 1] = facts_of(scale[g], 0);
      } else if (l.facts16 < 0) {
        quantize_group<1>(x + at * kGroup, inverse[g], q + at * kGroup, sums);
      } else {
        quantize_group<2>(x + at * kGroup, inverse[g], q + at * kGroup, sums);
        for (int64_t half = 0; half < 2; ++half) facts16[2 * at + half] = facts_of(scale[g], sums[half]);
      }
      facts32[at] = facts_of(scale[g], sums[0] + sums[1]);
    }
  }
}

void round_row(const RowLayout& l, const float* x, uint8_t* out) {
  auto* to = reinterpret_cast<uint16_t*>(out + l.bf16);
  for (int64_t i = 0; i < l.k; ++i) to[i] = float_to_bfloat(x[i]);
  if (l.k % 2) to[l.k] = 0;
}

}  // namespace

void prepare_row(const PrepareArgs& a, const float* x, uint8_t* out, float* scratch) {
  const RowLayout& l = a.layout;
  if (a.norm_weight) {
    float* normed = l.f32 >= 0 ? reinterpret_cast<float*>(out + l.f32) : scratch;
    rms_norm_row(x, a.norm_weight, l.k, a.eps, normed);
    x = normed;
  } else if (l.f32 >= 0) {
    std::memcpy(out + l.f32, x, static_cast<size_t>(l.k) * 4);
  }
  if (l.q >= 0) quantize_row(l, x, out);
  if (l.bf16 >= 0) round_row(l, x, out);
}

void prepare(const PrepareArgs& a, const Batch& batch, const Worker& worker) {
  constexpr int64_t kRows = 4;
  const int64_t rows = num_rows(a.rows, batch);
  for_shares(worker, rows, kRows, [&](int64_t first, int64_t end) {
    // Other cores have just written these rows: ask for all the lines at once.
    for (int64_t r = first; r < end; ++r)
      for (int64_t i = 0; i < a.layout.k; i += 16) __builtin_prefetch(a.x.row(r) + i, 0, 3);
    for (int64_t r = first; r < end; ++r)
      prepare_row(a, a.x.row(r), a.out + r * a.layout.bytes, static_cast<float*>(worker.scratch));
  });
}

}  // namespace sayfa::SAYFA_ISA
