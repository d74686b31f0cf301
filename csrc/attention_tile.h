// The arithmetic of attention: products of a few query rows with a run of pages, softmax over one block of keys, and
// the fold of blocks. Knows no batch, no work list and no threads.
//
// The law (a row's bits depend on that row alone) holds because the arithmetic is the same for one row and for a tile:
// - keys are cut into blocks of kBlock at absolute positions; a block has its own largest score m, sum l and weighted
//   values acc; blocks are folded in ascending order, always;
// - a score is one chain over the dims, a weighted value one chain over the block's tokens, whatever the tile's size;
// - keys outside a row's range get weight 0, which changes nothing where values are finite (where not: sum_own_values in
//   paged_attention.cpp; only the key whose pair a window's odd start cuts still counts, whatever the tile), and are never
//   multiplied with unwritten memory.
// Block-wise softmax with a running fold: Milakov and Gimelshein 2018; Dao 2023 (FlashAttention-2).
#pragma once

#include <cmath>

#include "kv_layout.h"
#include "simd_math.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

constexpr int kBlock = kKeyBlock;
constexpr int kRows = 36;                 // rows of a tile at most; a row is one query head of one token
constexpr int kStride = kBlock + 32;      // elements between rows of queries and of weights
constexpr int kScoreStride = kBlock + 16; // floats between rows of scores
constexpr int kMaxPages = kBlock / 16;    // pages of a block at most

// Registers: at most most_columns(rows) vectors of outputs by most_rows(columns) rows at once. A few rows take four vectors of
// eight lanes: two lines of a page one after the other, which the processor's own prefetching likes better than every
// other line.
constexpr int kColumns = W == 4 ? 2 : 4;
constexpr int most_columns(int rows) { return W == 8 && rows > 3 ? 2 : kColumns; }
constexpr int most_rows(int columns) {
  if (W == 16) return columns == 4 ? 6 : columns == 3 ? 8 : 12;
  return columns == 4 ? 3 : columns == 3 ? 4 : columns == 2 ? 5 : 10;
}

// How a pair (2i, 2i+1) of the left side meets a pair of rows of the right side: in kSteps products, each of one element or
// of both. `A` is the left side's element.
struct PlainPairs {
  using A = float;
  static constexpr int kDegree = 5, kSteps = 2;
  static Vf left(const A* a, int step) { return vset(a[step]); }
  static Vf dot(Vf sum, Vf a, Vf b) { return vfma(a, b, sum); }
  static void store(A* out, Vf x) { vstore(out, x); }
};

struct F32Pairs : PlainPairs {
  static Vf right(const uint8_t* b, int64_t pair_bytes, int step) {
    return vload(reinterpret_cast<const float*>(b + step * (pair_bytes / 2)));
  }
  static Vf right_low(const uint8_t* b, int64_t pair_bytes) { return right(b, pair_bytes, 0); }
};

#if defined(__AVX512BF16__)
struct Bf16Pairs {
  using A = uint16_t;
  static constexpr int kDegree = 4;  // 2.8e-6, far below the rounding of the weights to bf16
  static constexpr int kSteps = 1;
  static __m512bh left(const A* a, int) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static __m512bh right(const uint8_t* b, int64_t, int) { return (__m512bh)_mm512_loadu_si512(b); }
  static __m512bh right_low(const uint8_t* b, int64_t) {
    return (__m512bh)_mm512_and_si512(_mm512_loadu_si512(b), _mm512_set1_epi32(0xffff));
  }
  static Vf dot(Vf sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
  static void store(A* out, Vf x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(x));
  }
};
#else
#if defined(__AVX2__) && !defined(__AVX512F__)
alignas(32) const uint32_t kHighHalves[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                             0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
#endif
// Without the instruction: bf16 widened in registers, queries and weights stay float32.
struct Bf16Pairs : PlainPairs {
  static Vf right(const uint8_t* b, int64_t, int step) {
    Lanes both;
    std::memcpy(&both, b, sizeof both);
    if (step == 0) return from_bits(both << 16);
#if defined(__AVX2__) && !defined(__AVX512F__)
    // The mask stays in memory: the register that it would take is one of the sums'.
    asm("vpand %1, %0, %0" : "+x"(both) : "m"(kHighHalves));
    return from_bits(both);
#else
    return from_bits(both & iset(static_cast<int32_t>(0xffff0000)));
#endif
  }
  static Vf right_low(const uint8_t* b, int64_t pair_bytes) { return right(b, pair_bytes, 0); }
};
#endif

template <KvType Type>
struct PairsOf {
  using Pairs = Bf16Pairs;  // int8 pages are unpacked to bf16, which holds them exactly
};
template <>
struct PairsOf<KvType::f32> {
  using Pairs = F32Pairs;
};

// ------------------------------------------------------------------------------------------------ products

// Row pairs [begin, end) of one page's matrix; `ahead` is what to fetch meanwhile, laid out alike.
struct Run {
  const uint8_t* data;
  const uint8_t* ahead;
  int32_t begin, end;
};

struct Right {
  const Run* runs;
  int32_t num_runs;
  bool odd;            // after the last run one more pair, of which only the first half counts
  int64_t pair_bytes;  // from one pair of rows to the next
};

// One step of a pair for all rows and columns. What there is fewer of, rows or columns, is held in registers.
template <class Pairs, int R, int Columns>
inline void add_step(Vf (&sum)[R][Columns], const typename Pairs::A* a, const uint8_t* b, int64_t pair_bytes, int step) {
  if constexpr (R < Columns) {
    decltype(Pairs::left(a, step)) left[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) left[r] = Pairs::left(a + r * kStride, step);
#pragma GCC unroll 4
    for (int v = 0; v < Columns; ++v) {
      const auto right = Pairs::right(b + v * W * 4, pair_bytes, step);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][v] = Pairs::dot(sum[r][v], left[r], right);
    }
  } else {
    decltype(Pairs::right(b, pair_bytes, step)) right[Columns];
#pragma GCC unroll 4
    for (int v = 0; v < Columns; ++v) right[v] = Pairs::right(b + v * W * 4, pair_bytes, step);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto left = Pairs::left(a + r * kStride, step);
#pragma GCC unroll 4
      for (int v = 0; v < Columns; ++v) sum[r][v] = Pairs::dot(sum[r][v], left, right[v]);
    }
  }
}

// c[R][Columns vectors] = a (pairs from the first run's begin) x right.
template <class Pairs, int R, int Columns, bool Fetch>
void product(const typename Pairs::A* a, const Right& right, int64_t offset, float* c, int64_t c_stride) {
  Vf sum[R][Columns];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Columns; ++v) sum[r][v] = vzero();
  const int64_t pair_bytes = right.pair_bytes;
  const uint8_t* b = nullptr;
  for (int32_t i = 0; i < right.num_runs; ++i) {
    const Run& run = right.runs[i];
    b = run.data + run.begin * pair_bytes + offset;
    const int64_t to_ahead = run.ahead - run.data;
    for (int32_t pair = run.begin; pair < run.end; ++pair, a += 2, b += pair_bytes) {
      if (Fetch)
#pragma GCC unroll 4
        for (int byte = 0; byte < Columns * W * 4; byte += 64) __builtin_prefetch(b + to_ahead + byte, 0, 2);
      add_step<Pairs, R, Columns>(sum, a, b, pair_bytes, 0);
      if constexpr (Pairs::kSteps == 2) add_step<Pairs, R, Columns>(sum, a, b, pair_bytes, 1);
    }
  }
  if (right.odd) {
#pragma GCC unroll 4
    for (int v = 0; v < Columns; ++v) {
      const auto kv = Pairs::right_low(b + v * W * 4, pair_bytes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][v] = Pairs::dot(sum[r][v], Pairs::left(a + r * kStride, 0), kv);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Columns; ++v) vstore(c + r * c_stride + v * W, sum[r][v]);
}

template <class Pairs, int R, int Columns>
void product_rows(int rows, bool fetch, const typename Pairs::A* a, const Right& right, int64_t offset, float* c,
                  int64_t c_stride) {
  if constexpr (R == 0) {
    (void)rows, (void)fetch, (void)a, (void)right, (void)offset, (void)c, (void)c_stride;
  } else if (rows == R) {
    if (fetch)
      product<Pairs, R, Columns, true>(a, right, offset, c, c_stride);
    else
      product<Pairs, R, Columns, false>(a, right, offset, c, c_stride);
  } else {
    product_rows<Pairs, R - 1, Columns>(rows, fetch, a, right, offset, c, c_stride);
  }
}

// All rows of a tile by `Columns` vectors, rows spread evenly over the register tiles. Only the first fetches ahead.
template <class Pairs, int Columns>
void product_columns(int rows, const typename Pairs::A* a, const Right& right, int64_t offset, float* c,
                     int64_t c_stride) {
  constexpr int kMost = most_rows(Columns);
  const int tiles = (rows + kMost - 1) / kMost, step = (rows + tiles - 1) / tiles;
  for (int r = 0; r < rows; r += step) {
    const int count = rows - r < step ? rows - r : step;
    product_rows<Pairs, kMost, Columns>(count, r == 0, a + r * kStride, right, offset, c + r * c_stride, c_stride);
  }
}

// c[rows][columns vectors] = a x right, from vector `first` of the right side's rows.
template <class Pairs>
void product_all(int rows, int first, int columns, const typename Pairs::A* a, const Right& right, float* c,
                 int64_t c_stride) {
  const int most = most_columns(rows);
  const int tiles = (columns + most - 1) / most, step = tiles ? (columns + tiles - 1) / tiles : 1;
  for (int v = 0; v < columns; v += step) {
    const int64_t offset = static_cast<int64_t>(first + v) * W * 4;
    const int count = columns - v < step ? columns - v : step;
    if (count == 1) product_columns<Pairs, 1>(rows, a, right, offset, c + v * W, c_stride);
    if (count == 2) product_columns<Pairs, 2>(rows, a, right, offset, c + v * W, c_stride);
    if constexpr (kColumns == 4) {
      if (count == 3) product_columns<Pairs, 3>(rows, a, right, offset, c + v * W, c_stride);
      if (count == 4) product_columns<Pairs, 4>(rows, a, right, offset, c + v * W, c_stride);
    }
  }
}

// ------------------------------------------------------------------------------------------------ softmax

// Score of a key outside the row's range: far below any other, and finite, so that subtracting the largest keeps it so.
constexpr float kMasked = -1e30f;

// One row's scores of a block (log2 units) → weights. Keys [lo, hi) count. Vectors [first, last), both multiples of
// 4, all get a weight; of those outside [lo, hi) the scores may be anything. key_scale and value_scale (int8 pages)
// hold one float per key.
template <class Pairs, bool Scaled>
void softmax_row(float* score, typename Pairs::A* weight, int first, int last, int lo, int hi, const float* key_scale,
                 const float* value_scale, float* largest, float* sum) {
  if (lo >= hi) {
    for (int v = first; v < last; ++v) Pairs::store(weight + v * W, vzero());
    *largest = -HUGE_VALF;
    *sum = 0;
    return;
  }
  const int full_from = (lo + W - 1) / W, full_to = hi / W;  // vectors [full_from, full_to) lie inside
  auto mask = [&](int from, int to) {
    for (int v = from; v < to; ++v) {
      Vf x = vload(score + v * W);
      if (Scaled) x = x * vload(key_scale + v * W);
      vstore(score + v * W, vkeep(x, lane_index(v * W), lo, hi, kMasked));
    }
  };
  mask(first, full_from);
  mask(full_to > full_from ? full_to : full_from, last);
  if (Scaled)
    for (int v = full_from; v < full_to; ++v) vstore(score + v * W, vload(score + v * W) * vload(key_scale + v * W));
  Vf best[4] = {vset(kMasked), vset(kMasked), vset(kMasked), vset(kMasked)};
  for (int v = first; v < last; v += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) best[i] = vmax(best[i], vload(score + (v + i) * W));
  const float top = hmax(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
  Vf chain[4] = {};
  for (int v = first; v < last; v += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int key = (v + i) * W;
      Vf x = vexp2<Pairs::kDegree, true>(vload(score + key) - vset(top));
      chain[i] = chain[i] + x;
      if (Scaled) {
        x = x * vload(value_scale + key);
        if (v + i < full_from || v + i >= full_to) x = vkeep(x, lane_index(key), lo, hi, 0.0f);
      }
      Pairs::store(weight + key, x);
    }
  *largest = top;
  *sum = hsum((chain[0] + chain[1]) + (chain[2] + chain[3]));
}

// ------------------------------------------------------------------------------------------------ fold

// What is known of one row after some blocks; values are acc[dim] beside it.
struct RowState {
  float largest, sum;
};

// Folds the next block into a row. A block without keys is a no-op.
inline void fold(RowState& total, float* total_acc, const RowState& block, const float* block_acc, int64_t dim) {
  if (block.largest == -HUGE_VALF && block.sum == 0) return;
  const float largest = total.largest > block.largest ? total.largest : block.largest;
  const Vf old = vexp2(vset(total.largest) - vset(largest)), now = vexp2(vset(block.largest) - vset(largest));
  total.sum = total.sum * old[0] + block.sum * now[0];
  total.largest = largest;
  for (int64_t d = 0; d < dim; d += W)
    vstore(total_acc + d, vfma(vload(total_acc + d), old, vload(block_acc + d) * now));
}

// Whether none of the numbers is NaN or infinite: times 0, those are NaN. count is a multiple of 16.
inline bool all_finite(const float* x, int64_t count) {
  constexpr int kChains = 16 / W;
  Vf chain[kChains] = {};
  for (int64_t i = 0; i < count; i += 16)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) chain[c] = vfma(vload(x + i + c * W), vzero(), chain[c]);
  for (int c = 1; c < kChains; ++c) chain[0] = chain[0] + chain[c];
  return hsum(chain[0]) == 0;
}

// int8 → bf16, exactly; fetches `ahead` meanwhile. count is a multiple of 128.
inline void unpack(const int8_t* in, const uint8_t* ahead, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 64) {
    __builtin_prefetch(ahead + i, 0, 2);
#if defined(__AVX512BF16__)
    for (int64_t j = i; j < i + 64; j += 32) {
      const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + j)));
      const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + j + 16)));
      _mm512_storeu_si512(out + j, (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low)));
    }
#else
    for (int64_t j = i; j < i + 64; ++j) {
      const float x = in[j];
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      out[j] = static_cast<uint16_t>(bits >> 16);
    }
#endif
  }
}

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
