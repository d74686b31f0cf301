// Float panels: bfloat16 pairs with float32 sums, and plain float32. One chain of sums along K for each row and column.
#include "columns.h"
#include "linear.h"

namespace sayfa::SAYFA_ISA {
namespace {

#if defined(__AVX512BF16__)
// One pair along K. A prepared row is padded with a zero to an even K.
template <int R, int Sides>
inline void add_pair(F16 (&sum)[R][Sides], const uint8_t* p, const Walk& x, bool) {
  for (int r = 0; r < R; ++r) {
    const uint32_t pair = load32(x.row(r));
    for (int v = 0; v < Sides; ++v) sum[r][v] = dot_bf16(sum[r][v], p + v * 64, pair);
  }
}
#else
// One pair along K, or the last single one. Rows are float32: with weights that must be widened, nothing is won by rounding.
template <int R, int Sides>
inline void add_pair(F16 (&sum)[R][Sides], const uint8_t* p, const Walk& x, bool whole) {
  for (int half = 0; half < (whole ? 2 : 1); ++half) {
    F16 w[Sides];
    for (int v = 0; v < Sides; ++v) w[v] = widened(p + v * 64, half == 1);
    for (int r = 0; r < R; ++r) {
      const F16 one = f_set(float_of_bits(load32(x.row(r) + 4 * half)));
      for (int v = 0; v < Sides; ++v) sum[r][v] = f_fma(w[v], one, sum[r][v]);
    }
  }
}
#endif

template <int R>
void tile_bf16(const TileArgs& t) {
  constexpr int kSides = 4 / passes_bf16(R);  // blocks of 16 columns at once
  const int64_t pairs = t.layout->k / 2;
  for (int side = 0; side < 4; side += kSides) {
    F16 sum[R][kSides];
    for (auto& s : sum)
      for (F16& v : s) v = f_set(0.0f);
    const uint8_t* p = t.panel + side * 64;
    Walk x(t.rows + (kBf16Rows ? t.layout->bf16 : t.layout->f32), t.row_stride);
    for (int64_t k = 0; k < pairs; ++k, p += 256, x.advance(kBf16Rows ? 4 : 8)) {
      fetch_step(t.ahead, side / kSides * pairs + k);
      add_pair<R, kSides>(sum, p, x, true);
    }
    if (t.layout->k % 2) add_pair<R, kSides>(sum, p, x, false);
    put_sums<4>(t.to, side, sum);
  }
}

template <int R>
void tile_f32(const TileArgs& t) {
  const int64_t k_end = t.layout->k;
  constexpr int kSides = 2 / passes_f32(R);
  for (int side = 0; side < 2; side += kSides) {
    F16 sum[R][kSides];
    for (auto& s : sum)
      for (F16& v : s) v = f_set(0.0f);
    const uint8_t* p = t.panel + side * 64;
    for (int64_t k = 0; k < k_end; ++k, p += 128) {
      fetch_step(t.ahead, side / kSides * k_end + k);
      for (int r = 0; r < R; ++r) {
        const F16 x = f_set(reinterpret_cast<const float*>(t.rows + r * t.row_stride + t.layout->f32)[k]);
        for (int v = 0; v < kSides; ++v) sum[r][v] = f_fma(f_load(p + v * 64), x, sum[r][v]);
      }
    }
    put_sums<2>(t.to, side, sum);
  }
}

}  // namespace

TileKernel float_tile(Format format, int rows) {
  static constexpr TileKernel bf16[] = {
      tile_bf16<1>, tile_bf16<2>, tile_bf16<3>, tile_bf16<4>, tile_bf16<5>,
#if defined(__AVX512F__)
      tile_bf16<6>,
#endif
  };
  static constexpr TileKernel f32[] = {
      tile_f32<1>, tile_f32<2>, tile_f32<3>, tile_f32<4>, tile_f32<5>,
#if defined(__AVX512F__)
      tile_f32<6>,
#endif
  };
  return format == Format::bf16 ? bf16[rows - 1] : f32[rows - 1];
}

}  // namespace sayfa::SAYFA_ISA
