#include "weight.h"

#include <algorithm>
#include <stdexcept>

namespace sayfa {

namespace {

Format format_of(TensorType type, int floats) {
  if (!is_float(type)) return facts(type).format;
  if (floats >= 0) return static_cast<Format>(floats);
  return facts(type).format;
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

void append_rows(const Piece& piece, int64_t k, int64_t first, int64_t end, std::vector<Column>* columns) {
  const int64_t bytes = row_bytes(piece.type, k);
  for (int64_t r = first; r < end; ++r) columns->push_back({piece.data + r * bytes, piece.type});
}

}  // namespace

uint32_t row_formats(uint32_t formats, bool bf16_rows) {
  const uint32_t bf16 = 1u << static_cast<int>(Format::bf16), f32 = 1u << static_cast<int>(Format::f32);
  return !bf16_rows && (formats & bf16) ? (formats & ~bf16) | f32 : formats;
}

RowLayout row_layout(int64_t k, uint32_t formats) {
  RowLayout l;
  l.k = k;
  auto take = [&l](int64_t bytes) {
    const int64_t at = l.bytes;
    l.bytes += round_up(bytes, 64);
    return at;
  };
  bool wide = false, narrow = false;
  for (int f = 0; f < kNumFormats; ++f) {
    if (!(formats >> f & 1) || is_float(static_cast<Format>(f))) continue;
    (kFormatFacts[f].group == 32 ? wide : narrow) = true;
  }
  if (wide || narrow) {
    l.q = take(k);
    l.facts32 = take(k / 32 * static_cast<int64_t>(sizeof(GroupFacts)));
  }
  if (narrow) l.facts16 = take(k / 16 * static_cast<int64_t>(sizeof(GroupFacts)));
  if (formats >> static_cast<int>(Format::bf16) & 1) l.bf16 = take(round_up(k, 2) * 2);
  if (formats >> static_cast<int>(Format::f32) & 1) l.f32 = take(k * 4);
  return l;
}

bool Weight::can_pair(const Piece& gate, const Piece& up, int floats) {
  return gate.rows == up.rows && format_of(gate.type, floats) == format_of(up.type, floats);
}

Weight::Weight(const std::vector<Piece>& pieces, int64_t k, int floats, bool paired) : k_(k) {
  for (const Piece& piece : pieces)
    if (k <= 0 || k % facts(piece.type).block_elements) throw std::invalid_argument("K does not fit the type's blocks");
  if (paired) {
    if (pieces.size() != 2 || !can_pair(pieces[0], pieces[1], floats)) throw std::invalid_argument("these cannot be paired");
    const Format format = format_of(pieces[0].type, floats);
    const int64_t half = facts(format).columns / 2, rows = pieces[0].rows;
    std::vector<Column> columns;
    for (int64_t first = 0; first < rows; first += half)
      for (const Piece& piece : pieces) {
        append_rows(piece, k, first, std::min(first + half, rows), &columns);
        columns.resize(static_cast<size_t>(round_up(static_cast<int64_t>(columns.size()), half)), Column{nullptr, piece.type});
      }
    add_segment(format, true, std::move(columns), rows);
    return;
  }
  for (size_t i = 0; i < pieces.size();) {
    const Format format = format_of(pieces[i].type, floats);
    std::vector<Column> columns;
    int64_t rows = 0;
    for (; i < pieces.size() && format_of(pieces[i].type, floats) == format; rows += pieces[i++].rows)
      append_rows(pieces[i], k, 0, pieces[i].rows, &columns);
    add_segment(format, false, std::move(columns), rows);
  }
}

void Weight::add_segment(Format format, bool paired, std::vector<Column> columns, int64_t results) {
  const int64_t in_panel = facts(format).columns;
  const int64_t panels = round_up(static_cast<int64_t>(columns.size()), in_panel) / in_panel;
  columns.resize(static_cast<size_t>(panels * in_panel), Column{nullptr, TensorType::f32});
  const int64_t bytes = round_up(panel_bytes(format, k_), 64);
  segments_.push_back({format, paired, num_columns_, results, panels, bytes, nullptr});
  columns_.push_back(std::move(columns));
  num_columns_ += results;
  bytes_ += panels * bytes;
}

uint32_t Weight::formats() const {
  uint32_t bits = 0;
  for (const Segment& segment : segments_) bits |= 1u << static_cast<int>(segment.format);
  return bits;
}

void Weight::pack(Pool& pool, const Kernels& kernels, std::shared_ptr<Block> block, int64_t offset) {
  if (offset < 0 || offset % 64 || offset + bytes_ > static_cast<int64_t>(block->bytes()))
    throw std::invalid_argument("the packed weight does not fit its block");
  struct Call {
    PackArgs args;
    decltype(LinearTable::pack) kernel;
    static void run(const void* self, const Batch&, const Worker& worker) {
      const auto& call = *static_cast<const Call*>(self);
      call.kernel(call.args, worker);
    }
  };
  std::vector<Call> calls;
  std::vector<Job> jobs;
  for (size_t i = 0; i < segments_.size(); ++i) {
    segments_[i].data = block->data() + offset;
    offset += segments_[i].panels * segments_[i].bytes;
    calls.push_back({{segments_[i], columns_[i].data(), k_}, kernels.linear.pack});
  }
  for (const Call& call : calls) jobs.push_back({&Call::run, &call});
  pool.run(jobs.data(), static_cast<int>(jobs.size()), Batch{}, nullptr);
  columns_.clear();
  block_ = std::move(block);
}

int64_t Weight::num_panels() const {
  int64_t panels = 0;
  for (const Segment& segment : segments_) panels += segment.panels;
  return panels;
}

}  // namespace sayfa
