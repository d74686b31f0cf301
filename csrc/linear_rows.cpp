// Prepares activation rows for the weight products: optional RMS norm, then int8 by groups of 32, bfloat16 or float32.
#include "half.h"
#include "linear.h"
#include "small_rows.h"

namespace sayfa::SAYFA_ISA {
namespace {

constexpr int kGroup = 32;
constexpr int kVectors = kGroup / W;

// Largest magnitude of a group as its bits. Integer order on |x| is float order, with infinity and then NaN on top: so a
// NaN reaches the scale and, through it, every result of the row.
inline float largest_magnitude(const Vf* x) {
  Lanes most = bits_of(x[0]) & 0x7fffffff;
  for (int i = 1; i < kVectors; ++i) {
    const Lanes next = bits_of(x[i]) & 0x7fffffff;
    most = most > next ? most : next;
  }
  int32_t largest = 0;
  for (int i = 0; i < W; ++i) largest = largest > most[i] ? largest : most[i];
  return float_of_bits(static_cast<uint32_t>(largest));
}

// Quantizes one group of 32: returns the scale, writes q and the sums of both halves.
inline float quantize_group(const float* x, int8_t* q, int32_t* sums) {
  Vf v[kVectors];
  for (int i = 0; i < kVectors; ++i) v[i] = vload(x + i * W);
  const float largest = largest_magnitude(v);
  // Below this the reciprocal would overflow; such a group is zero for all purposes. A NaN is not below anything.
  const bool zero = largest < 1e-30f;
  const Vf inverse = vset(zero ? 0.0f : 127.0f / largest);
  for (int half = 0; half < 2; ++half) {
    Lanes sum = Lanes{};
    for (int i = half * kVectors / 2; i < (half + 1) * kVectors / 2; ++i) {
      const Lanes whole = vint(vround(v[i] * inverse));
      sum += whole;
      for (int j = 0; j < W; ++j) q[i * W + j] = static_cast<int8_t>(whole[j]);
    }
    int32_t total = 0;
    for (int j = 0; j < W; ++j) total += sum[j];
    sums[half] = total;
  }
  return zero ? 0.0f : largest / 127.0f;
}

void quantize_row(const RowLayout& l, const float* x, uint8_t* out) {
  auto* q = reinterpret_cast<int8_t*>(out + l.q);
  auto* scale = reinterpret_cast<float*>(out + l.scale);
  auto* neg32 = reinterpret_cast<int32_t*>(out + l.neg32);
  auto* sum32 = reinterpret_cast<float*>(out + l.sum32);
  for (int64_t g = 0; g < l.k / kGroup; ++g) {
    int32_t sums[2];
    scale[g] = quantize_group(x + g * kGroup, q + g * kGroup, sums);
    neg32[g] = -8 * (sums[0] + sums[1]);
    sum32[g] = scale[g] * static_cast<float>(sums[0] + sums[1]);
    if (l.neg16 < 0) continue;
    for (int64_t half = 0; half < 2; ++half) {
      reinterpret_cast<int32_t*>(out + l.neg16)[2 * g + half] = -8 * sums[half];
      reinterpret_cast<float*>(out + l.sum16)[2 * g + half] = scale[g] * static_cast<float>(sums[half]);
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

void prepare(const PrepareArgs& a, const Batch& batch, const Worker& worker, Counter& counter) {
  constexpr int64_t kRows = 4;
  const int64_t rows = num_rows(a.rows, batch);
  for (int64_t first; (first = counter.fetch_add(kRows, std::memory_order_relaxed)) < rows;)
    for (int64_t r = first; r < first + kRows && r < rows; ++r)
      prepare_row(a, a.x.row(r), a.out + r * a.layout.bytes, static_cast<float*>(worker.scratch));
}

}  // namespace sayfa::SAYFA_ISA
