// Integer panels times int8 rows: the micro-kernels. One template for all formats and row counts.
//
// Each group: dot products in int32 (exact), then sum += float(dot) * (weight scale * row scale), and for formats with a
// minimum sum += minimum * (row scale * sum of the row's group).
#include "columns.h"
#include "linear.h"

namespace sayfa::SAYFA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kSide = 2;  // blocks of 16 columns at once: what the registers hold
#else
constexpr int kSide = 1;
#endif

template <Format F>
struct Shape {
  static constexpr FormatFacts facts = kFormatFacts[static_cast<int>(F)];
  static constexpr int64_t group = facts.group;
  static constexpr bool minimum = facts.minimum;
  static constexpr bool small = facts.bits == 4 || minimum;  // weights below 128
  static constexpr int words = facts.group * facts.bits / 32;  // of four bytes, per column and group
  static constexpr int64_t scale_bytes = minimum ? 128 : 64;
  static constexpr int64_t bytes = group_bytes(F);
};

// Where a row's sums start in a group: minus zero times the sum of the row's bytes.
template <Format F>
inline I16 start(const int32_t* neg8) {
  if (Shape<F>::minimum || (!Shape<F>::small && kStartsAtZero)) return i_set(0);
  return Shape<F>::small ? i_set(*neg8) : times_16(i_set(*neg8));
}

template <Format F>
inline I16 dot(I16 sum, I16 w, int32_t a) {
  return Shape<F>::small ? dot_small(sum, w, a) : dot_full(sum, w, a);
}

struct RowParts {
  const uint8_t* q;
  const float* scale;
  const int32_t* neg8;
  const float* sum;
};

template <Format F>
inline RowParts row_parts(const TileArgs& t, int r) {
  const uint8_t* row = t.rows + r * t.row_stride;
  const RowLayout& l = *t.layout;
  const bool wide = Shape<F>::group == 32;
  return {row + l.q, reinterpret_cast<const float*>(row + l.scale),
          reinterpret_cast<const int32_t*>(row + (wide ? l.neg32 : l.neg16)),
          reinterpret_cast<const float*>(row + (wide ? l.sum32 : l.sum16))};
}

inline int32_t four(const uint8_t* q) {
  int32_t word;
  std::memcpy(&word, q, 4);
  return word;
}

template <Format F, int R>
void tile(const TileArgs& t) {
  using S = Shape<F>;
  RowParts row[R];
  for (int r = 0; r < R; ++r) row[r] = row_parts<F>(t, r);
  const int64_t groups = t.layout->k / S::group;
  for (int side = 0; side < 2; side += kSide) {
    F16 sum[R][kSide];
    for (auto& s : sum)
      for (F16& v : s) v = f_set(0.0f);
    const uint8_t* p = t.panel;
    for (int64_t g = 0; g < groups; ++g, p += S::bytes) {
      if (t.fetch.ahead) fetch_early(t.fetch, p, S::bytes);
      I16 acc[R][kSide];
      for (int r = 0; r < R; ++r)
        for (I16& a : acc[r]) a = start<F>(row[r].neg8 + g);
      const uint8_t* words = p + S::scale_bytes + side * 64;
#pragma GCC unroll 8
      for (int i = 0; i < S::words; ++i) {
        I16 w[kSide], high[kSide];
        for (int v = 0; v < kSide; ++v) {
          w[v] = i_load(words + i * 128 + v * 64);
          if (S::facts.bits == 4) high[v] = high_nibbles(w[v]), w[v] = low_nibbles(w[v]);
        }
        for (int r = 0; r < R; ++r) {
          const uint8_t* q = row[r].q + g * S::group + 4 * i;
          const int32_t a = four(q);
          for (int v = 0; v < kSide; ++v) acc[r][v] = dot<F>(acc[r][v], w[v], a);
          if (S::facts.bits != 4) continue;
          const int32_t b = four(q + S::group / 2);
          for (int v = 0; v < kSide; ++v) acc[r][v] = dot<F>(acc[r][v], high[v], b);
        }
      }
      for (int v = 0; v < kSide; ++v) {
        const F16 scale = f_load_half(p + (side + v) * 32);
        for (int r = 0; r < R; ++r)
          sum[r][v] = f_fma(to_float(acc[r][v]), f_mul(scale, f_set(row[r].scale[g * S::group / 32])), sum[r][v]);
        if (!S::minimum) continue;
        const F16 minimum = f_load_half(p + 64 + (side + v) * 32);
        for (int r = 0; r < R; ++r) sum[r][v] = f_fma(minimum, f_set(row[r].sum[g]), sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kSide; ++v) f_store(t.tile + r * 32 + (side + v) * 16, sum[r][v]);
  }
}

template <Format F>
TileKernel pick(int rows) {
  static constexpr TileKernel kernels[] = {
      tile<F, 1>, tile<F, 2>, tile<F, 3>,
#if defined(__AVX512F__)
      tile<F, 4>, tile<F, 5>, tile<F, 6>,
#endif
  };
  return kernels[rows - 1];
}

}  // namespace

TileKernel int_tile(Format format, int rows) {
  switch (format) {
    case Format::i4g32: return pick<Format::i4g32>(rows);
    case Format::i4g32m: return pick<Format::i4g32m>(rows);
    case Format::i8g32: return pick<Format::i8g32>(rows);
    case Format::i8g32m: return pick<Format::i8g32m>(rows);
    case Format::i4g16: return pick<Format::i4g16>(rows);
    case Format::i4g16m: return pick<Format::i4g16m>(rows);
    case Format::i8g16: return pick<Format::i8g16>(rows);
    default: return nullptr;
  }
}

}  // namespace sayfa::SAYFA_ISA
