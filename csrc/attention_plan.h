// The work list of one attention call: tiles of query rows, longest first, each cut by KV head and, when there is too
// little to share out, by runs of key blocks. Every worker makes the same list from the same batch; none is shared.
#pragma once

#include "attention_tile.h"
#include "shares.h"
#include "sayfa.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

// Query rows of tokens [token, token + tokens) of a sequence; keys [lo, hi) cover all of them.
struct QueryTile {
  int32_t sequence, token, tokens;
  int32_t lo, hi;
  int32_t pieces;           // runs of blocks per head
  int32_t blocks_in_piece;
  int64_t first_item;
  int64_t partial;          // first float of its partial results when pieces > 1
  int32_t counter;          // its first finish counter
  int32_t first_block() const { return lo / kBlock; }
  int32_t num_blocks() const { return (hi + kBlock - 1) / kBlock - lo / kBlock; }
  int64_t cost() const { return static_cast<int64_t>(hi - lo) * tokens; }
};

// One item: some query heads of one KV head, over some blocks of one tile.
struct Piece {
  const QueryTile* tile;
  int32_t kv_head, head, heads;     // query heads [head, head + heads)
  int32_t unit;                     // which (KV head, part of its group)
  int32_t block_begin, block_end;
};

// How heads and tokens share a tile's rows.
struct Shape {
  int32_t group, parts, heads_in_part, tokens_in_tile, units;
  int64_t dim, partial_stride;  // floats: head_dim padded; one row's partial result
};

inline Shape attention_shape(const AttentionArgs& args) {
  Shape shape;
  shape.group = args.num_heads / args.layer.num_kv_heads;
  shape.parts = (shape.group + kRows - 1) / kRows;
  shape.heads_in_part = (shape.group + shape.parts - 1) / shape.parts;
  shape.tokens_in_tile = kRows / shape.heads_in_part;
  shape.units = args.layer.num_kv_heads * shape.parts;
  shape.dim = kv_layout(args.layer).dim;
  shape.partial_stride = shape.dim + 16;
  return shape;
}

constexpr int32_t kCounters = 256;        // finish counters at the start of the partials, one cache line each
constexpr int32_t kCounterBytes = 64;
constexpr int64_t kCounterArea = static_cast<int64_t>(kCounters) * kCounterBytes;
constexpr int32_t kItemsPerWorker = 4;    // below this many equal items per worker the largest tiles are cut

class Plan {
 public:
  static size_t bytes(int64_t tiles) { return static_cast<size_t>(tiles) * (2 * sizeof(QueryTile)); }

  Plan(const AttentionArgs& args, const Batch& batch, int workers, void* memory)
      : shape_(attention_shape(args)), tiles_(static_cast<QueryTile*>(memory)), tokens_(batch.T), workers_(workers) {
    list(args, batch);
    cut(args);
    sorted_ = tiles_ + num_tiles_;
  }

  // Makes the items of a lane: of the tiles whose first token is at home there.
  void enter(int lane) {
    const Share share = share_of(tokens_, lane, workers_);
    int32_t begin = 0, end;
    while (begin < num_tiles_ && tiles_[begin].token < share.first) ++begin;
    for (end = begin; end < num_tiles_ && tiles_[end].token < share.end;) ++end;
    sort(begin, end);
    cursor_ = begin;
    num_items_ = 0;
    for (int32_t i = begin; i < end; ++i) {
      sorted_[i].first_item = num_items_;
      num_items_ += num_items_of(sorted_[i]);
    }
  }

  // Of the lane entered last.
  int64_t num_items() const { return num_items_; }
  const Shape& shape() const { return shape_; }

  // Items must be asked for in ascending order.
  Piece piece(int64_t item) {
    while (item >= sorted_[cursor_].first_item + num_items_of(sorted_[cursor_])) ++cursor_;
    const QueryTile& tile = sorted_[cursor_];
    const int32_t within = static_cast<int32_t>(item - tile.first_item);
    Piece piece;
    piece.tile = &tile;
    piece.unit = within / tile.pieces;
    piece.kv_head = piece.unit / shape_.parts;
    const int32_t start = piece.unit % shape_.parts * shape_.heads_in_part, left = shape_.group - start;
    piece.head = piece.kv_head * shape_.group + start;
    piece.heads = left < shape_.heads_in_part ? left : shape_.heads_in_part;
    piece.block_begin = tile.first_block() + within % tile.pieces * tile.blocks_in_piece;
    const int32_t end = tile.first_block() + tile.num_blocks();
    piece.block_end = piece.block_begin + tile.blocks_in_piece < end ? piece.block_begin + tile.blocks_in_piece : end;
    return piece;
  }

 private:
  int64_t num_items_of(const QueryTile& tile) const { return static_cast<int64_t>(shape_.units) * tile.pieces; }

  void list(const AttentionArgs& args, const Batch& batch) {
    for (int32_t s = 0; s < batch.S; ++s) {
      const int32_t end = batch.query_start[s + 1];
      for (int32_t t = batch.query_start[s]; t < end; t += shape_.tokens_in_tile) {
        const int32_t tokens = end - t < shape_.tokens_in_tile ? end - t : shape_.tokens_in_tile;
        // Positions of a sequence's tokens ascend, so the first row starts earliest and the last ends latest.
        const int32_t first = batch.positions[t], last = batch.positions[t + tokens - 1];
        const int32_t lo = args.window > 0 && first + 1 > args.window ? first + 1 - args.window : 0;
        tiles_[num_tiles_++] = {s, t, tokens, lo, last + 1, 1, 0, 0, 0, 0};
      }
    }
  }

  // Longest first, by counting sort over 64 classes of cost; equal classes keep their order.
  void sort(int32_t begin, int32_t end) {
    constexpr int kClasses = 64;
    int64_t most = 1;
    for (int32_t i = begin; i < end; ++i) most = tiles_[i].cost() > most ? tiles_[i].cost() : most;
    int32_t start[kClasses + 1] = {begin};
    auto class_of = [&](const QueryTile& tile) {
      return kClasses - 1 - static_cast<int>(tile.cost() * (kClasses - 1) / most);
    };
    for (int32_t i = begin; i < end; ++i) ++start[class_of(tiles_[i]) + 1];
    for (int c = 0; c < kClasses; ++c) start[c + 1] += start[c];
    for (int32_t i = begin; i < end; ++i) sorted_[start[class_of(tiles_[i])]++] = tiles_[i];
  }

  // Decides which tiles are cut by blocks.
  void cut(const AttentionArgs& args) {
    int64_t total = 0, used = kCounterArea / 4;
    for (int32_t i = 0; i < num_tiles_; ++i) total += tiles_[i].cost() * shape_.units;
    const int64_t room = args.partials && workers_ > 1 ? static_cast<int64_t>(args.partials_bytes) / 4 : 0;
    const int64_t fair = total / (static_cast<int64_t>(kItemsPerWorker) * workers_) + 1;
    int32_t counters = 0;
    for (int32_t i = 0; i < num_tiles_; ++i) {
      QueryTile& tile = tiles_[i];
      const int32_t blocks = tile.num_blocks();
      tile.blocks_in_piece = blocks;
      const int64_t floats = shape_.partial_stride * shape_.heads_in_part * shape_.units * tile.tokens * blocks;
      if (tile.cost() > fair && blocks > 1 && used + floats <= room && counters + shape_.units <= kCounters) {
        const int64_t most = blocks * fair / tile.cost();
        tile.blocks_in_piece = static_cast<int32_t>(most < 1 ? 1 : most);
        tile.pieces = (blocks + tile.blocks_in_piece - 1) / tile.blocks_in_piece;
        if (tile.pieces > 1) {
          tile.partial = used;
          tile.counter = counters;
          used += floats;
          counters += shape_.units;
        }
      }
    }
  }

  Shape shape_;
  QueryTile* tiles_;
  QueryTile* sorted_ = nullptr;
  const int64_t tokens_;
  const int workers_;
  int32_t num_tiles_ = 0;
  int32_t cursor_ = 0;
  int64_t num_items_ = 0;
};

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
