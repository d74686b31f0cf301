// The work list of one attention call: tiles of query rows, longest first, each cut by KV head and, when there is too
// little to share out, by runs of key blocks. Where sequences read the same pages (Batch::shared_runs) their rows meet these
// in one tile, and the blocks' results wait for the rest of each sequence. Every worker makes the same list from the same
// batch; none is shared.
#pragma once

#include <algorithm>

#include "attention_tile.h"
#include "shares.h"
#include "sayfa.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

// Query rows of tokens [token, token + tokens) of a sequence; keys [lo, hi) cover all of them. Of a shared tile: one token each
// of `tokens` sequences, `members`, and the keys that they share; its results are noted where its members keep theirs.
struct QueryTile {
  int32_t sequence, token, tokens;
  int32_t lo, hi;
  const int32_t* members;   // null: not a shared tile
  int32_t shared_blocks;    // so many of its first blocks are left to shared tiles,
  int32_t shared_pieces;    // which hand in so many pieces per head
  int32_t pieces;           // runs of its other blocks per head
  int32_t blocks_in_piece;
  int64_t first_item;
  int64_t partial;          // first float of its blocks' results; -1: the one piece keeps them
  int32_t counter;          // its first finish counter
  int32_t first_block() const { return lo / kBlock; }
  int32_t num_blocks() const { return (hi + kBlock - 1) / kBlock - lo / kBlock; }
  int32_t own_block() const { return first_block() + shared_blocks; }
  int32_t own_blocks() const { return num_blocks() - shared_blocks; }
  int64_t cost() const { return static_cast<int64_t>(hi - lo - shared_blocks * kBlock) * tokens; }
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

constexpr int32_t kCounters = 1024;       // finish counters at the start of the partials, one cache line each
constexpr int32_t kCounterBytes = 64;
constexpr int64_t kCounterArea = static_cast<int64_t>(kCounters) * kCounterBytes;
constexpr int32_t kItemsPerWorker = 4;    // below this many equal items per worker the largest tiles are cut

class Plan {
 public:
  // Room for `tiles` of them.
  static size_t bytes(int64_t tiles) { return static_cast<size_t>(tiles) * (2 * sizeof(QueryTile)); }

  Plan(const AttentionArgs& args, const Batch& batch, int workers, void* memory, size_t memory_bytes)
      : args_(args), batch_(batch), workers_(workers), shape_(attention_shape(args)),
        most_tiles_(static_cast<int32_t>(memory_bytes / (2 * sizeof(QueryTile)))), tiles_(static_cast<QueryTile*>(memory)) {
    list();
    num_own_ = num_tiles_;
    if (args.window == 0)
      for (int32_t i = 0; i < batch.num_shared_runs; ++i) share(batch.shared_runs[i]);
    cut();
    sorted_ = tiles_ + num_tiles_;
  }

  // Turns to a lane: to the tiles whose first token is at home there. Counts their items; they are sorted when one is asked for,
  // since at the end every worker looks into every lane and finds most of them empty.
  void enter(int lane) {
    home_ = share_of(batch_.T, lane, workers_);
    sorted_begin_ = first_from(home_.first);
    for (int32_t i = num_own_; i < num_tiles_; ++i) sorted_begin_ += tiles_[i].token < home_.first;
    cursor_ = -1;
    num_items_ = 0;
    for_home([&](const QueryTile& tile) { num_items_ += num_items_of(tile); });
  }

  // Of the lane entered last.
  int64_t num_items() const { return num_items_; }
  const Shape& shape() const { return shape_; }

  // Items must be asked for in ascending order.
  Piece piece(int64_t item) {
    if (cursor_ < 0) sort();
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
    piece.block_begin = tile.own_block() + within % tile.pieces * tile.blocks_in_piece;
    const int32_t end = tile.first_block() + tile.num_blocks();
    piece.block_end = piece.block_begin + tile.blocks_in_piece < end ? piece.block_begin + tile.blocks_in_piece : end;
    return piece;
  }

  // The tile of a sequence that has one token in the step.
  QueryTile& tile_of(int32_t sequence) const { return tiles_[first_from(batch_.query_start[sequence])]; }

 private:
  int64_t num_items_of(const QueryTile& tile) const { return static_cast<int64_t>(shape_.units) * tile.pieces; }

  // The first tile of its own sequence, not shared, that starts at this token or later.
  int32_t first_from(int64_t token) const {
    return static_cast<int32_t>(std::lower_bound(tiles_, tiles_ + num_own_, token,
                                                 [](const QueryTile& tile, int64_t t) { return tile.token < t; }) - tiles_);
  }

  template <class Call>
  void for_home(Call call) const {
    for (int32_t i = first_from(home_.first); i < num_own_ && tiles_[i].token < home_.end; ++i) call(tiles_[i]);
    for (int32_t i = num_own_; i < num_tiles_; ++i)
      if (tiles_[i].token >= home_.first && tiles_[i].token < home_.end) call(tiles_[i]);
  }

  void list() {
    for (int32_t s = 0; s < batch_.S; ++s) {
      const int32_t end = batch_.query_start[s + 1];
      for (int32_t t = batch_.query_start[s]; t < end; t += shape_.tokens_in_tile) {
        const int32_t tokens = end - t < shape_.tokens_in_tile ? end - t : shape_.tokens_in_tile;
        // Positions of a sequence's tokens ascend, so the first row starts earliest and the last ends latest.
        const int32_t first = batch_.positions[t], last = batch_.positions[t + tokens - 1];
        const int32_t lo = args_.window > 0 && first + 1 > args_.window ? first + 1 - args_.window : 0;
        tiles_[num_tiles_++] = {s, t, tokens, lo, last + 1, nullptr, 0, 0, 1, 0, 0, -1, 0};
      }
    }
  }

  // Makes the tiles of a run. A member takes part if its runs before have been shared, too, and its results find room.
  void share(const SharedRun& run) {
    const int32_t* members = batch_.shared_members + run.first;
    const int32_t parts = (run.members + shape_.tokens_in_tile - 1) / shape_.tokens_in_tile;
    for (int32_t part = 0; part < parts; ++part) {
      const int32_t first = run.members * part / parts, end = run.members * (part + 1) / parts;
      bool room = end - first > 1 && num_tiles_ < most_tiles_;
      for (int32_t m = first; m < end && room; ++m) {
        QueryTile& tile = tile_of(members[m]);
        room = tile.shared_blocks == run.block_begin && (tile.partial >= 0 || take_room(tile));
      }
      if (!room) continue;
      for (int32_t m = first; m < end; ++m) tile_of(members[m]).shared_blocks = run.block_end;
      const int32_t leader = members[first];
      tiles_[num_tiles_++] = {leader, batch_.query_start[leader], end - first, run.block_begin * kBlock, run.block_end * kBlock,
                              members + first, 0, 0, 1, 0, 0, -1, 0};
    }
  }

  // Gives a tile a place for the results of its blocks.
  bool take_room(QueryTile& tile) {
    const int64_t room = args_.partials ? static_cast<int64_t>(args_.partials_bytes) / 4 : 0;
    const int64_t floats = shape_.partial_stride * shape_.heads_in_part * shape_.units * tile.tokens * tile.num_blocks();
    if (used_ + floats > room || counters_ + shape_.units > kCounters) return false;
    tile.partial = used_;
    tile.counter = counters_;
    used_ += floats;
    counters_ += shape_.units;
    return true;
  }

  // Decides which tiles are cut by blocks.
  void cut() {
    int64_t total = 0;
    for (int32_t i = 0; i < num_tiles_; ++i) total += tiles_[i].cost() * shape_.units;
    const int64_t fair = total / (static_cast<int64_t>(kItemsPerWorker) * workers_) + 1;
    for (int32_t i = 0; i < num_tiles_; ++i) {
      QueryTile& tile = tiles_[i];
      const int32_t blocks = tile.own_blocks();
      tile.blocks_in_piece = blocks;
      if (workers_ > 1 && tile.cost() > fair && blocks > 1 && (tile.members || tile.partial >= 0 || take_room(tile))) {
        const int64_t most = blocks * fair / tile.cost();
        tile.blocks_in_piece = static_cast<int32_t>(most < 1 ? 1 : most);
        tile.pieces = (blocks + tile.blocks_in_piece - 1) / tile.blocks_in_piece;
      }
      if (tile.members)
        for (int32_t m = 0; m < tile.tokens; ++m) tile_of(tile.members[m]).shared_pieces += tile.pieces;
    }
  }

  // The tiles at home, longest first, by counting sort over 64 classes of cost; equal classes keep their order. Numbers the items.
  void sort() {
    constexpr int kClasses = 64;
    int64_t most = 1;
    for_home([&](const QueryTile& tile) { most = tile.cost() > most ? tile.cost() : most; });
    int32_t start[kClasses + 1] = {sorted_begin_};
    const auto class_of = [&](const QueryTile& tile) {
      return kClasses - 1 - static_cast<int>(tile.cost() * (kClasses - 1) / most);
    };
    for_home([&](const QueryTile& tile) { ++start[class_of(tile) + 1]; });
    for (int c = 0; c < kClasses; ++c) start[c + 1] += start[c];
    const int32_t end = start[kClasses];
    for_home([&](const QueryTile& tile) { sorted_[start[class_of(tile)]++] = tile; });
    int64_t item = 0;
    for (int32_t i = sorted_begin_; i < end; ++i) {
      sorted_[i].first_item = item;
      item += num_items_of(sorted_[i]);
    }
    cursor_ = sorted_begin_;
  }

  const AttentionArgs& args_;
  const Batch& batch_;
  const int workers_;
  const Shape shape_;
  const int32_t most_tiles_;
  QueryTile* tiles_;
  QueryTile* sorted_ = nullptr;
  int32_t num_tiles_ = 0, num_own_ = 0;  // the shared ones come after the others
  int64_t used_ = kCounterArea / 4;      // floats of the partials
  int32_t counters_ = 0;
  Share home_{0, 0};
  int32_t sorted_begin_ = 0;  // of the tiles at home
  int32_t cursor_ = -1;       // -1: not sorted yet
  int64_t num_items_ = 0;
};

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
