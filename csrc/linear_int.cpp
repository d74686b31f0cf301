// Integer panels times int8 rows: the micro-kernels. One template for all formats and row counts.
//
// Each group: dot products in int32 (exact), then sum += float(dot) * (weight scale * row scale), and for formats with a
// minimum sum += minimum * (row scale * sum of the row's group).
#include "columns.h"
#include "linear.h"

namespace sayfa::SAYFA_ISA {
namespace {

// Whether the float sums stay in registers between the groups. With half as many registers, those of more than one row wait in
// the tile.
#if defined(__AVX512F__)
constexpr bool keeps_sums(int) { return true; }
#else
constexpr bool keeps_sums(int rows) { return rows == 1; }
#endif

// Keeps the compiler from moving what comes later in front of this: it would run ahead and out of registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
inline void settle(I16& x) {
  for (Vi& v : x.v) asm volatile("" : "+x"(v));
}
#else
inline void settle(I16&) {}
#endif

template <Format F>
struct Shape {
  static constexpr FormatFacts facts = kFormatFacts[static_cast<int>(F)];
  static constexpr int64_t group = facts.group;
  static constexpr bool minimum = facts.minimum;
  static constexpr bool short_sums = kShortSums && facts.bits == 4;
  static constexpr bool small = facts.bits == 4 || minimum;  // weights below 128
  static constexpr int words = facts.group * facts.bits / 32;  // of four bytes, per column and group
  static constexpr int64_t scale_bytes = minimum ? 128 : 64;
  static constexpr int64_t bytes = group_bytes(F);
};

// Where a row's sums start in a group: minus zero times the sum of the row's bytes.
template <Format F>
inline I16 start(const uint8_t* facts) {
  if (Shape<F>::minimum || (!Shape<F>::small && kStartsAtZero)) return i_set(0);
  const I16 minus_eight = i_set(static_cast<int32_t>(load32(facts + offsetof(GroupFacts, neg8))));
  return Shape<F>::small ? minus_eight : times_16(minus_eight);
}

template <Format F>
inline I16 dot(I16 sum, I16 w, const uint8_t* q) {
  const auto four = static_cast<int32_t>(load32(q));
  if (Shape<F>::short_sums) return dot_short(sum, w, four);
  return Shape<F>::small ? dot_small(sum, w, four) : dot_full(sum, w, four);
}

inline F16 f_spread(const uint8_t* x) { return f_set(float_of_bits(load32(x))); }

// sum + dots * (scale of the column * scale of the row) and, where the format has one, minimum * (the row's scaled sum).
template <Format F>
inline F16 add_group(F16 sum, I16 dots, F16 scale, F16 minimum, const uint8_t* facts) {
  sum = f_fma(to_float(dots), f_mul(scale, f_spread(facts)), sum);
  return Shape<F>::minimum ? f_fma(minimum, f_spread(facts + offsetof(GroupFacts, sum)), sum) : sum;
}

template <Format F, int R>
void tile(const TileArgs& t) {
  using S = Shape<F>;
  constexpr int kSides = 2 / passes_int(R);  // blocks of 16 columns at once
  constexpr bool kKeeps = keeps_sums(R);
  const RowLayout& l = *t.layout;
  const bool wide = S::group == 32;
  const int64_t groups = l.k / S::group;
  for (int side = 0; side < 2; side += kSides) {
    F16 kept[R][kSides];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kSides; ++v) {
        kept[r][v] = f_set(0.0f);
        if (!kKeeps) f_store(t.to.sums + r * 32 + (side + v) * 16, kept[r][v]);
      }
    const uint8_t* p = t.panel;
    Walk q(t.rows + l.q, t.row_stride), facts(t.rows + (wide ? l.facts32 : l.facts16), t.row_stride);
    for (int64_t g = 0; g < groups; ++g, p += S::bytes) {
      fetch_step(t.ahead, side / kSides * groups + g);
      I16 acc[R][kSides];
      for (int r = 0; r < R; ++r)
        for (I16& a : acc[r]) a = S::short_sums ? i_set(0) : start<F>(facts.row(r));
      const uint8_t* words = p + S::scale_bytes + side * 64;
      auto word = [&](int i) __attribute__((always_inline)) {
        I16 w[kSides], high[kSides];
        for (int v = 0; v < kSides; ++v) {
          w[v] = i_load(words + i * 128 + v * 64);
          if (S::facts.bits == 4) high[v] = high_nibbles(w[v]), w[v] = low_nibbles(w[v]);
        }
        for (int r = 0; r < R; ++r) {
          const uint8_t* at = q.row(r) + 4 * i;
          for (int v = 0; v < kSides; ++v) acc[r][v] = dot<F>(acc[r][v], w[v], at);
          if (S::facts.bits != 4) continue;
          for (int v = 0; v < kSides; ++v) acc[r][v] = dot<F>(acc[r][v], high[v], at + S::group / 2);
        }
      };
#pragma GCC unroll 8
      for (int i = 0; i < S::words; ++i) {
        word(i);
        for (int r = 0; r < R; ++r)
          for (I16& a : acc[r]) settle(a);
      }
      if (S::short_sums)
        for (int r = 0; r < R; ++r)
          for (I16& a : acc[r]) a = widen_short(start<F>(facts.row(r)), a);
      // Not left to the compiler: sums that a loop indexes lie in memory, where AVX2's one row adds to them once a group.
#if defined(__AVX2__)
#pragma GCC unroll 2
#endif
      for (int v = 0; v < kSides; ++v) {
        const F16 scale = f_load_half(p + (side + v) * 32);
        const F16 minimum = S::minimum ? f_load_half(p + 64 + (side + v) * 32) : f_set(0.0f);
        for (int r = 0; r < R; ++r) {
          if (kKeeps) {
            kept[r][v] = add_group<F>(kept[r][v], acc[r][v], scale, minimum, facts.row(r));
          } else {
            float* at = t.to.sums + r * 32 + (side + v) * 16;
            f_store(at, add_group<F>(f_load(at), acc[r][v], scale, minimum, facts.row(r)));
          }
        }
      }
      q.advance(S::group);
      facts.advance(sizeof(GroupFacts));
    }
    if (kKeeps) put_sums<2>(t.to, side, kept);
  }
}

template <Format F>
TileKernel pick(int rows) {
  static constexpr TileKernel kernels[] = {
      tile<F, 1>, tile<F, 2>, tile<F, 3>, tile<F, 4>,
#if defined(__AVX512F__)
      tile<F, 5>, tile<F, 6>,
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
