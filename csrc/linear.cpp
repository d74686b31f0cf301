// The weight product as an op: workers take chunks of panels (by blocks of rows), multiply tile by tile and finish each tile
// with bias, residual or gated activation.
#include "linear.h"

#include "small_rows.h"

namespace sayfa::SAYFA_ISA {
namespace {

constexpr int kPanelColumns = 64;  // of the widest format

// One row of a finished tile to its place. `sums` has the panel's columns, `width` the row's columns that exist.
void finish_row(const LinearArgs& a, const Segment& s, int64_t panel, const float* sums, float* out_row) {
  const int64_t in_panel = facts(s.format).columns / (s.paired ? 2 : 1);
  const int64_t first = panel * in_panel;
  const int64_t width = s.columns - first < in_panel ? s.columns - first : in_panel;
  float* out = out_row + s.column + first;
  if (a.epilogue == Epilogue::silu_mul) return act_mul_row(sums, sums + in_panel, width, out, silu);
  if (a.epilogue == Epilogue::gelu_mul) return act_mul_row(sums, sums + in_panel, width, out, gelu_tanh);
  float finished[kPanelColumns];
  if (a.bias) {
    for (int64_t i = 0; i < width; ++i) finished[i] = sums[i] + a.bias[s.column + first + i];
    sums = finished;
  }
  if (a.epilogue == Epilogue::add)
    for (int64_t i = 0; i < width; ++i) out[i] += sums[i];
  else
    std::memcpy(out, sums, static_cast<size_t>(width) * 4);
}

struct Rows {
  const uint8_t* data;
  int64_t stride;
  int64_t first, count;
};

// All rows of a block by one panel, in tiles of nearly equal height.
void multiply_panel(const LinearArgs& a, const Segment& s, int64_t panel, const Rows& rows) {
  alignas(64) float sums[kTileRows * kPanelColumns];
  const int64_t columns = facts(s.format).columns;
  const int64_t tiles = (rows.count + kTileRows - 1) / kTileRows;
  // One tile: fetch what this panel needs next. More: the first one fetches the next panel while all compute on this.
  int64_t ahead = tiles == 1 ? 4096 : s.bytes;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = rows.count * tile / tiles, end = rows.count * (tile + 1) / tiles;
    const int height = static_cast<int>(end - first);
    const TileArgs args{s.data + panel * s.bytes, rows.data + first * rows.stride, rows.stride, &a.input.layout, sums, ahead};
    (is_float(s.format) ? float_tile(s.format, height) : int_tile(s.format, height))(args);
    for (int r = 0; r < height; ++r)
      finish_row(a, s, panel, sums + r * columns, a.out.row(rows.first + first + r));
    ahead = 0;
  }
}

// The prepared rows: the shared ones, the matrix itself, or this worker's own.
Rows prepared_rows(const LinearArgs& a, int64_t count, const Worker& worker) {
  if (!a.input.out) return {reinterpret_cast<const uint8_t*>(a.input.x.data), a.input.x.stride * 4, 0, count};
  if (count > a.self_prepare_rows) return {a.input.out, a.input.layout.bytes, 0, count};
  auto* own = static_cast<uint8_t*>(worker.scratch);
  auto* scratch = reinterpret_cast<float*>(own + a.self_prepare_rows * a.input.layout.bytes);
  for (int64_t r = 0; r < count; ++r)
    prepare_row(a.input, a.input.x.row(r), own + r * a.input.layout.bytes, scratch);
  return {own, a.input.layout.bytes, 0, count};
}

}  // namespace

void linear(const LinearArgs& a, const Batch& batch, const Worker& worker, Counter& counter) {
  const int64_t count = num_rows(a.input.rows, batch);
  const int64_t blocks = (count + a.row_block - 1) / a.row_block;
  const int64_t total = blocks * a.num_chunks;
  int64_t ticket = counter.fetch_add(1, std::memory_order_relaxed);
  if (ticket >= total) return;
  const Rows all = prepared_rows(a, count, worker);
  for (; ticket < total; ticket = counter.fetch_add(1, std::memory_order_relaxed)) {
    const Chunk& chunk = a.chunks[ticket % a.num_chunks];
    const Segment& segment = a.segments[chunk.segment];
    const int64_t block = ticket / a.num_chunks;
    const int64_t first = count * block / blocks, end = count * (block + 1) / blocks;
    const Rows rows{all.data + first * all.stride, all.stride, first, end - first};
    for (int64_t panel = chunk.first; panel < chunk.first + chunk.count; ++panel)
      multiply_panel(a, segment, panel, rows);
  }
}

LinearTable linear_table() { return {embed, prepare, linear, pack}; }

}  // namespace sayfa::SAYFA_ISA
