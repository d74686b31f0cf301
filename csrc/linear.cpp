// The weight product as an op: workers take chunks of panels (by blocks of rows), multiply tile by tile and finish each tile
// with bias, residual or gated activation.
#include <algorithm>

#include "linear.h"

#include "columns.h"
#include "shares.h"
#include "small_rows.h"

namespace sayfa::SAYFA_ISA {
namespace {

constexpr int kPanelColumns = 64;  // of the widest format
// Bytes in front of the place of use, where a panel is read once. Measured: the wider the weights, the less.
constexpr int64_t fetch_ahead(Format format) { return facts(format).bits == 4 ? 6144 : facts(format).bits == 8 ? 4096 : 2048; }

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

// Result columns of a whole panel.
int64_t panel_results(const Segment& s) { return facts(s.format).columns / (s.paired ? 2 : 1); }

// The rows of a tile whose sums are in memory. `sums` has all of the panel's columns for each row.
void finish_tile(const LinearArgs& a, const Segment& s, int64_t panel, const float* sums, int64_t first_row, int height) {
  const int64_t columns = facts(s.format).columns, in_panel = panel_results(s);
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

int passes_of(Format format, int rows) {
  return format == Format::bf16 ? passes_bf16(rows) : format == Format::f32 ? passes_f32(rows) : passes_int(rows);
}

// What the first of `tiles` tiles of `rows` rows fetches. A panel that is read once runs ahead of itself; else each tile
// fetches a part of the next one, since all of it at once would wait for memory.
Ahead fetched_ahead(const Segment& s, const uint8_t* panel, const uint8_t* next, int64_t tiles, int rows) {
  const int64_t step = group_bytes(s.format), passes = passes_of(s.format, rows), reads = tiles * passes;
  const uint8_t* end = panel + s.bytes;
  if (reads == 1) return {panel + fetch_ahead(s.format), end, next, step, step / 64, 0};
  if (!next) return {end, end, nullptr, 0, 0, 0};
  const int64_t lines = (step / 64 + reads - 1) / reads;
  return {next, next + s.bytes, nullptr, lines * 64, lines, s.bytes / step * passes * lines * 64};
}

int64_t tiles_of(Format format, int64_t rows) {
  const int64_t most = is_float(format) ? kFloatTileRows : kIntTileRows;
  return (rows + most - 1) / most;
}

// One of `count` pieces of a panel's tiles.
struct Piece {
  int64_t index, count;
};

// What a tile adds to is not in the caches, which prepared rows and panels fill: it comes while the tile is multiplied.
void fetch_rows(const float* first, int64_t stride, int rows, int64_t width) {
  for (int r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(first + r * stride + i, 1, 3);
}

// A piece of the tiles, of nearly equal height, in which one panel meets all rows of a block. `next` is what this worker reads
// after it, or null.
void multiply_panel(const LinearArgs& a, const Segment& s, int64_t panel, const Rows& rows, Piece piece, const uint8_t* next) {
  alignas(64) float sums[std::max(kIntTileRows, kFloatTileRows) * kPanelColumns];
  const int64_t tiles = tiles_of(s.format, rows.count);
  const int64_t begin = tiles * piece.index / piece.count, end = tiles * (piece.index + 1) / piece.count;
  const uint8_t* data = s.data + panel * s.bytes;
  Ahead ahead = fetched_ahead(s, data, next, end - begin, static_cast<int>(rows.count / tiles));
  const bool is_whole = !a.bias && (panel + 1) * panel_results(s) <= s.columns;
  for (int64_t tile = begin; tile < end; ++tile, ahead.start += ahead.advance) {
    const int64_t first = rows.count * tile / tiles, last = rows.count * (tile + 1) / tiles;
    const int height = static_cast<int>(last - first);
    float* out = nullptr;
    if (is_whole && passes_of(s.format, height) == 1) {
      out = a.out.row(rows.first + first) + s.column + panel * panel_results(s);
      if (a.epilogue == Epilogue::add) fetch_rows(out, a.out.stride, height, panel_results(s));
    }
    const TileOut to{sums, out, a.out.stride, a.epilogue};
    const TileArgs args{data, rows.data + first * rows.stride, rows.stride, &a.input.layout, to, ahead};
    (is_float(s.format) ? float_tile(s.format, height) : int_tile(s.format, height))(args);
    if (!out) finish_tile(a, s, panel, sums, rows.first + first, height);
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
  for (int64_t i = 0; i < 4096; i += 64) __builtin_prefetch(start + i, 0, 3);
}

// A panel by its number among all of the weight.
struct Panel {
  const Segment* segment;
  int64_t index;
  const uint8_t* data() const { return segment->data + index * segment->bytes; }
};

Panel panel_at(const LinearArgs& a, int64_t number) {
  const Segment* segment = a.segments;
  for (; number >= segment->panels; ++segment) number -= segment->panels;
  return {segment, number};
}

// What one lane multiplies: some rows by some panels. With enough rows the lanes part them, and each goes through all panels;
// else `sharing` lanes have the same rows and part the panels.
struct Field {
  Share rows, panels;
  int64_t sharing;
};

// Rows from which on a part is worth it. Every part reads all weights and the workers share one memory: the more of them, and
// the wider the weights, the more rows must each reading serve. Measured with two workers.
int64_t part_rows(Format format, int lanes) { return int64_t{8} * std::min(lanes, 8) * std::max(facts(format).bits / 8, 1); }

Field field_of(const LinearArgs& a, int64_t rows, int lane, int lanes) {
  const int64_t parts = std::clamp<int64_t>(rows / part_rows(a.segments[0].format, lanes), 1, lanes);
  const int64_t part = lane * parts / lanes;
  const int64_t first = (part * lanes + parts - 1) / parts, end = ((part + 1) * lanes + parts - 1) / parts;
  return {{rows * first / lanes, rows * end / lanes}, share_of(a.num_panels, lane - first, end - first), end - first};
}

// Where this worker goes on after `number`: the next panel of the field, or its first panel of the next product.
const uint8_t* start_after(const LinearArgs& a, const Worker& worker, const Share& panels, int64_t rows, int64_t number) {
  if (number + 1 < panels.end) return panel_at(a, number + 1).data();
  if (!a.next) return nullptr;
  const Share next = field_of(*a.next, rows, worker.id, worker.count).panels;
  return next.count() > 0 ? panel_at(*a.next, next.first).data() : nullptr;
}

// In how many pieces a lane's last panel is handed out, so that where one lane has a panel more than another nobody waits for a
// whole panel. A piece has two tiles at least: with fewer, memory is what all wait for.
int64_t last_pieces(const LinearArgs& a, const Field& field, int64_t rows, int workers) {
  if (a.num_panels % field.sharing == 0) return 1;
  const int64_t tiles = tiles_of(panel_at(a, field.panels.end - 1).segment->format, rows);
  return std::clamp<int64_t>(tiles / 2, 1, workers);
}

// Works off one lane: every panel of its field, for one block of rows after another.
void work_lane(const LinearArgs& a, const Worker& worker, Visit& visit, const Rows& all) {
  const Field field = field_of(a, all.count, visit.lane(), worker.count);
  const int64_t panels = field.panels.count(), height = field.rows.count();
  if (panels == 0 || height == 0) return;
  const int64_t blocks = (height + a.row_block - 1) / a.row_block, whole = blocks * panels - 1;
  const int64_t pieces = last_pieces(a, field, height / blocks, worker.count);
  for (int64_t taken; (taken = visit.take(whole + pieces)) >= 0;) {
    const Piece piece = taken < whole ? Piece{0, 1} : Piece{taken - whole, pieces};
    const int64_t unit = std::min(taken, whole), block = unit / panels, number = field.panels.first + unit % panels;
    const int64_t first = field.rows.first + height * block / blocks, last = field.rows.first + height * (block + 1) / blocks;
    const Rows rows{all.data + first * all.stride, all.stride, first, last - first};
    const Panel panel = panel_at(a, number);
    const uint8_t* next = start_after(a, worker, field.panels, all.count, number);
    multiply_panel(a, *panel.segment, panel.index, rows, piece, next);
  }
}

}  // namespace

void linear(const LinearArgs& a, const Batch& batch, const Worker& worker) {
  const int64_t count = num_rows(a.input.rows, batch);
  const Field own = field_of(a, count, worker.id, worker.count);
  // While a worker prepares its row, memory is idle: have the first lines of its share on their way.
  if (count <= a.self_prepare_rows && own.panels.count() > 0) fetch_start(panel_at(a, own.panels.first).data());
  const Rows all = prepared_rows(a, count, worker);
  // Rows that others have prepared are asked for at once. Those of another part stay where they are.
  if (count > a.self_prepare_rows && own.sharing > 1)
    for (int64_t i = 0; i < std::min<int64_t>(own.rows.count() * all.stride, 64 << 10); i += 64)
      __builtin_prefetch(all.data + own.rows.first * all.stride + i, 0, 2);
  Visit visit(worker);
  do work_lane(a, worker, visit, all);
  while (visit.next());
}

LinearTable linear_table() { return {embed, prepare, linear, pack, kBf16Rows}; }

}  // namespace sayfa::SAYFA_ISA
