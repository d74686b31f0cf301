// The weight product as an op: workers take chunks of panels (by blocks of rows), multiply tile by tile and finish each tile
// with bias, residual or gated activation.
#include <algorithm>

#include "linear.h"

#include "columns.h"
#include "small_rows.h"

namespace sayfa::SAYFA_ISA {
namespace {

constexpr int kPanelColumns = 64;  // of the widest format
constexpr int64_t kFetchAhead = 4096;  // bytes in front of the place of use, at one tile of rows

// One row of a finished tile to its place, `width` columns. `bias` and `out` point at the first of them.
inline void finish_row(Epilogue epilogue, const float* sums, const float* bias, int64_t width, int64_t in_panel, float* out) {
  if (epilogue == Epilogue::silu_mul) return act_mul_row(sums, sums + in_panel, width, out, silu);
  if (epilogue == Epilogue::gelu_mul) return act_mul_row(sums, sums + in_panel, width, out, gelu_tanh);
  const bool add = epilogue == Epilogue::add;
  int64_t i = 0;
  for (; i + W <= width; i += W) {
    Vf value = vload(sums + i);
    if (bias) value = value + vload(bias + i);
    if (add) value = vload(out + i) + value;
    vstore(out + i, value);
  }
  for (; i < width; ++i) {
    const float value = bias ? sums[i] + bias[i] : sums[i];
    out[i] = add ? out[i] + value : value;
  }
}

// The rows of a finished tile of one panel. `sums` has all of the panel's columns for each row.
void finish_tile(const LinearArgs& a, const Segment& s, int64_t panel, const float* sums, int64_t first_row, int height) {
  const int64_t columns = facts(s.format).columns, in_panel = columns / (s.paired ? 2 : 1);
  const int64_t first = panel * in_panel, column = s.column + first;
  const int64_t width = s.columns - first < in_panel ? s.columns - first : in_panel;
  const float* bias = a.bias ? a.bias + column : nullptr;
  for (int r = 0; r < height; ++r)
    finish_row(a.epilogue, sums + r * columns, bias, width, in_panel, a.out.row(first_row + r) + column);
}

struct Rows {
  const uint8_t* data;
  int64_t stride;
  int64_t first, count;
};

// All rows of a block by one panel, in tiles of nearly equal height. The panel's chunk ends at `end`; what is wanted after
// it starts at `next`.
void multiply_panel(const LinearArgs& a, const Segment& s, int64_t panel, const Rows& rows, const uint8_t* end,
                    const uint8_t* next) {
  alignas(64) float sums[kTileRows * kPanelColumns];
  const int64_t tiles = (rows.count + kTileRows - 1) / kTileRows;
  // One tile: fetch what is needed soon. More: the first one fetches the next panel while all compute on this.
  Fetch fetch{tiles == 1 ? kFetchAhead : s.bytes, end, next};
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = rows.count * tile / tiles, last = rows.count * (tile + 1) / tiles;
    const int height = static_cast<int>(last - first);
    const TileArgs args{s.data + panel * s.bytes, rows.data + first * rows.stride, rows.stride, &a.input.layout, sums, fetch};
    (is_float(s.format) ? float_tile(s.format, height) : int_tile(s.format, height))(args);
    finish_tile(a, s, panel, sums, rows.first + first, height);
    fetch.ahead = 0;
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

void fetch_start(const uint8_t* start) {
  for (int64_t i = 0; i < kFetchAhead; i += 64) __builtin_prefetch(start + i, 0, 3);
}

// Where chunk `ticket` starts (tickets count chunks, again for each block of rows).
const uint8_t* start_of(const LinearArgs& a, int64_t ticket) {
  const Chunk& chunk = a.chunks[ticket % a.num_chunks];
  const Segment& segment = a.segments[chunk.segment];
  return segment.data + chunk.first * segment.bytes;
}

// What this worker will read after the op: its likely first chunk of the next product.
const uint8_t* start_after(const LinearArgs& a, const Worker& worker) {
  return a.next && worker.id < a.next->num_chunks ? start_of(*a.next, worker.id) : nullptr;
}

}  // namespace

void linear(const LinearArgs& a, const Batch& batch, const Worker& worker, Counter& counter) {
  const int64_t count = num_rows(a.input.rows, batch);
  const int64_t blocks = (count + a.row_block - 1) / a.row_block;
  const int64_t total = blocks * a.num_chunks;
  auto take = [&counter] { return counter.fetch_add(1, std::memory_order_relaxed); };
  int64_t ticket = take();
  if (ticket >= total) return;
  // While a worker prepares its row, memory is idle: have the first lines of its chunk on their way.
  if (count <= a.self_prepare_rows) fetch_start(start_of(a, ticket));
  const Rows all = prepared_rows(a, count, worker);
  if (count > a.self_prepare_rows)
    for (int64_t i = 0; i < std::min<int64_t>(count * all.stride, 64 << 10); i += 64) __builtin_prefetch(all.data + i, 0, 2);
  while (ticket < total) {
    const Chunk& chunk = a.chunks[ticket % a.num_chunks];
    const Segment& segment = a.segments[chunk.segment];
    const int64_t block = ticket / a.num_chunks;
    const int64_t first = count * block / blocks, last = count * (block + 1) / blocks;
    const Rows rows{all.data + first * all.stride, all.stride, first, last - first};
    const int64_t end_panel = chunk.first + chunk.count;
    const uint8_t* end = segment.data + end_panel * segment.bytes;
    for (int64_t panel = chunk.first; panel < end_panel; ++panel) {
      const uint8_t* next = nullptr;
      if (panel + 1 == end_panel) {  // the next chunk is taken now, so that its start is fetched in time
        ticket = take();
        next = ticket < total ? start_of(a, ticket) : start_after(a, worker);
      }
      multiply_panel(a, segment, panel, rows, end, next);
    }
  }
}

LinearTable linear_table() { return {embed, prepare, linear, pack}; }

}  // namespace sayfa::SAYFA_ISA
