// Ragged causal attention over paged K/V: rows of one token and of a whole prompt in one call.
//
// A worker takes pieces from the plan. For each block of a piece: scores of all rows against the pages' keys, softmax,
// weighted values, fold. While a page is read, the page two further on in reading order (K pages of the block, its V
// pages, then the next block's, even of the next piece) is fetched. A tile that is cut by blocks leaves each block's
// result in the shared partials, and so does a tile that several sequences share, for each of them; whoever finishes the last
// piece of a sequence folds them, in ascending order.
#include "attention_plan.h"
#include "ops.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

// The pages of one block that a piece reads.
struct BlockPages {
  const uint8_t* head[kMaxPages];
  int32_t first = 0;  // page of the block
  int32_t count = 0;
};

template <KvType Type>
class Attention {
  using Pairs = typename PairsOf<Type>::Pairs;
  using A = typename Pairs::A;
  static constexpr bool kScaled = Type == KvType::int8;

 public:
  static size_t workspace_bytes(int64_t dim) {
    return sizeof(A) * kRows * kStride * 2 + sizeof(float) * kRows * kScoreStride + sizeof(float) * kRows * dim * 2 +
           (kScaled ? sizeof(uint16_t) * (kBlock + 256) * dim + sizeof(float) * 2 * kBlock : 0) + 64 * 8;
  }

  Attention(const AttentionArgs& args, const Batch& batch, Plan& plan, uint8_t* memory)
      : args_(args), batch_(batch), plan_(plan), shape_(plan.shape()), at_(kv_layout(args.layer)) {
    queries_ = carve<A>(memory, kRows * kStride);
    weights_ = carve<A>(memory, kRows * kStride);
    scores_ = carve<float>(memory, kRows * kScoreStride);
    block_acc_ = carve<float>(memory, kRows * shape_.dim);
    total_acc_ = carve<float>(memory, kRows * shape_.dim);
    if (kScaled) {
      unpacked_values_ = carve<uint16_t>(memory, kBlock * shape_.dim);
      unpacked_keys_ = carve<uint16_t>(memory, 256 * shape_.dim);
      key_scales_ = carve<float>(memory, kBlock);
      value_scales_ = carve<float>(memory, kBlock);
    }
    // Fetch about 8 KiB ahead, at least two pages' parts.
    distance_ = static_cast<int32_t>(8192 / at_.part_bytes);
    if (distance_ < 2) distance_ = 2;
  }

  void run(const Worker& worker) {
    Visit visit(worker);
    plan_.enter(visit.lane());
    auto take = [&](Piece& piece) {
      for (;;) {
        const int64_t item = visit.take(plan_.num_items());
        if (item >= 0) {
          piece = plan_.piece(item);
          return true;
        }
        if (!visit.next()) return false;
        plan_.enter(visit.lane());
      }
    };
    Piece piece, following;
    if (!take(piece)) return;
    BlockPages pages, next;
    int32_t block = piece.block_begin;
    find_pages(piece, block, pages);
    for (bool more = true; more;) {
      const bool last = block + 1 == piece.block_end;
      following = piece;
      if (last) more = take(following);
      const int32_t next_block = last ? following.block_begin : block + 1;
      next.count = 0;
      if (more) find_pages(following, next_block, next);
      if (block == piece.block_begin) begin(piece);
      compute(piece, block, pages, next);
      if (last) finish(piece);
      piece = following;
      block = next_block;
      pages = next;
    }
  }

 private:
  template <class T>
  static T* carve(uint8_t*& memory, int64_t count) {
    T* start = reinterpret_cast<T*>(memory);
    memory += (sizeof(T) * static_cast<size_t>(count) + 63) / 64 * 64;
    return start;
  }

  // Keys of the tile within a block.
  static void span(const QueryTile& tile, int32_t block, int32_t& lo, int32_t& hi) {
    lo = tile.lo - block * kBlock;
    hi = tile.hi - block * kBlock;
    lo = lo < 0 ? 0 : lo;
    hi = hi > kBlock ? kBlock : hi;
  }

  // Those of its token `t`: none where hi <= lo.
  void row_span(const QueryTile& tile, int32_t t, int32_t block, int32_t& lo, int32_t& hi) const {
    hi = batch_.positions[token_of(tile, t)] + 1 - block * kBlock;
    lo = args_.window > 0 && hi > args_.window ? hi - args_.window : 0;
    hi = hi > kBlock ? kBlock : hi;
  }

  // Whether all of its tokens see the keys [lo, hi) of a block: then the first one and the last one do.
  bool every_row_spans(const QueryTile& tile, int32_t block, int32_t lo, int32_t hi) const {
    int32_t first_lo, first_hi, last_lo, last_hi;
    row_span(tile, 0, block, first_lo, first_hi);
    row_span(tile, tile.tokens - 1, block, last_lo, last_hi);
    return first_hi >= hi && last_lo <= lo;
  }

  void find_pages(const Piece& piece, int32_t block, BlockPages& pages) const {
    int32_t lo, hi;
    span(*piece.tile, block, lo, hi);
    const int32_t size = args_.layer.page_size, base = block * (kBlock / size);
    const int32_t* table = batch_.page_table + static_cast<int64_t>(piece.tile->sequence) * batch_.P;
    pages.first = lo / size;
    pages.count = (hi + size - 1) / size - pages.first;
    for (int32_t i = 0; i < pages.count; ++i)
      pages.head[i] = head_start(args_.layer, at_, table[base + pages.first + i], piece.kv_head);
  }

  // What to fetch while part `i` of the reading order (K pages, V pages, next block's K pages) is read.
  const uint8_t* ahead(int32_t i, const BlockPages& pages, const BlockPages& next) const {
    i += distance_;
    if (i < pages.count) return pages.head[i];
    i -= pages.count;
    if (i < pages.count) return pages.head[i] + at_.part_bytes;
    i -= pages.count;
    return i < next.count ? next.head[i] : pages.head[0];
  }

  // The token whose query heads are a tile's `t`-th.
  int32_t token_of(const QueryTile& tile, int32_t t) const {
    return tile.members ? batch_.query_start[tile.members[t]] : tile.token + t;
  }

  void clear(int32_t rows) {
    for (int32_t r = 0; r < rows; ++r) totals_[r] = {-HUGE_VALF, 0};
    std::memset(total_acc_, 0, static_cast<size_t>(rows * shape_.dim) * sizeof(float));
  }

  // Loads the piece's queries, scaled to log2 units, and clears its totals.
  void begin(const Piece& piece) {
    const int64_t head_dim = args_.layer.head_dim, dim = shape_.dim;
    const Vf scale = vset(args_.scale * kLog2E);
    alignas(64) float row[kMaxHeadDim] = {};
    for (int32_t t = 0; t < piece.tile->tokens; ++t)
      for (int32_t h = 0; h < piece.heads; ++h) {
        const int64_t r = t * piece.heads + h;
        const float* query = args_.query.row(token_of(*piece.tile, t)) + (piece.head + h) * head_dim;
        std::memcpy(row, query, static_cast<size_t>(head_dim) * sizeof(float));
        for (int64_t d = 0; d < dim; d += W) Pairs::store(queries_ + r * kStride + d, vload(row + d) * scale);
      }
    clear(piece.tile->tokens * piece.heads);
  }

  void compute(const Piece& piece, int32_t block, const BlockPages& pages, const BlockPages& next) {
    int32_t lo, hi;
    span(*piece.tile, block, lo, hi);
    const int32_t rows = piece.tile->tokens * piece.heads;
    score(rows, lo, hi, pages, next);
    weigh(piece, block, lo, hi);
    sum_values(0, rows, lo, hi, pages, next);
    if (!kScaled && !every_row_spans(*piece.tile, block, lo, hi) && !all_finite(block_acc_, rows * shape_.dim))
      sum_own_values(piece, block, pages, next);
    const QueryTile& tile = *piece.tile;
    const int64_t dim = shape_.dim;
    for (int32_t r = 0; r < rows; ++r) {
      const float* acc = block_acc_ + r * dim;
      if (!tile.members && tile.partial < 0) {
        fold(totals_[r], total_acc_ + r * dim, blocks_[r], acc, dim);
      } else {
        float* partial = tile.members ? partial_row(plan_.tile_of(tile.members[r / piece.heads]), piece.unit, block, r % piece.heads)
                                      : partial_row(tile, piece.unit, block, r);
        std::memcpy(partial, acc, static_cast<size_t>(dim) * sizeof(float));
        partial[dim] = blocks_[r].largest;
        partial[dim + 1] = blocks_[r].sum;
      }
    }
  }

  // Scores of all rows against the keys of a block.
  void score(int32_t rows, int32_t lo, int32_t hi, const BlockPages& pages, const BlockPages& next) {
    const int32_t size = args_.layer.page_size;
    const int32_t pairs = static_cast<int32_t>(at_.dim / 2);
    for (int32_t i = 0; i < pages.count; ++i) {
      const int32_t start = (pages.first + i) * size;
      const int32_t from = lo > start ? (lo - start) / W : 0;
      const int32_t to = ((hi - start < size ? hi - start : size) + W - 1) / W;
      Run run = {pages.head[i], ahead(i, pages, next), 0, pairs};
      int64_t element = element_bytes(Type);
      if constexpr (kScaled) {
        unpack(reinterpret_cast<const int8_t*>(run.data), run.ahead, at_.part_bytes, unpacked_keys_);
        const float* scales = reinterpret_cast<const float*>(pages.head[i] + at_.scale_offset);
        std::memcpy(key_scales_ + start, scales, static_cast<size_t>(size) * sizeof(float));
        std::memcpy(value_scales_ + start, scales + size, static_cast<size_t>(size) * sizeof(float));
        run.data = run.ahead = reinterpret_cast<const uint8_t*>(unpacked_keys_);
        element = 2;
      }
      const Right right = {&run, 1, false, 2 * element * size};
      product_all<Pairs>(rows, from, to - from, queries_, right, scores_ + start + from * W, kScoreStride);
    }
  }

  void weigh(const Piece& piece, int32_t block, int32_t lo, int32_t hi) {
    const int32_t first = lo / W / 4 * 4, last = (hi + 4 * W - 1) / (4 * W) * 4;
    for (int32_t t = 0; t < piece.tile->tokens; ++t) {
      int32_t row_lo, row_hi;
      row_span(*piece.tile, t, block, row_lo, row_hi);
      for (int32_t h = 0; h < piece.heads; ++h) {
        const int32_t r = t * piece.heads + h;
        softmax_row<Pairs, kScaled>(scores_ + r * kScoreStride, weights_ + r * kStride, first, last, row_lo, row_hi,
                                    key_scales_, value_scales_, &blocks_[r].largest, &blocks_[r].sum);
      }
    }
  }

  // Weighted values of a block for some rows. Pairs of tokens start at lo rounded down (a written token: it is before the
  // tile's window, by one) and stop at hi, which is never passed: what lies behind it may be unwritten.
  void sum_values(int32_t first_row, int32_t rows, int32_t lo, int32_t hi, const BlockPages& pages, const BlockPages& next) {
    const int32_t size = args_.layer.page_size, pairs_in_page = size / 2, end = hi / 2;
    const int32_t begin = lo / 2;
    Run runs[kMaxPages];
    int64_t element = element_bytes(Type);
    for (int32_t i = 0; i < pages.count; ++i) {
      const int32_t start = (pages.first + i) * pairs_in_page;
      const uint8_t* data = pages.head[i] + at_.part_bytes;
      const uint8_t* fetch = ahead(pages.count + i, pages, next);
      if constexpr (kScaled) {
        uint16_t* unpacked = unpacked_values_ + static_cast<int64_t>(i) * at_.part_bytes;
        unpack(reinterpret_cast<const int8_t*>(data), fetch, at_.part_bytes, unpacked);
        data = fetch = reinterpret_cast<const uint8_t*>(unpacked);
        element = 2;
      }
      runs[i] = {data, fetch, begin > start ? begin - start : 0,
                 end - start < pairs_in_page ? end - start : pairs_in_page};
    }
    const Right right = {runs, pages.count, hi % 2 == 1, 2 * element * at_.dim};
    product_all<Pairs>(rows, 0, static_cast<int>(at_.dim / W), weights_ + first_row * kStride + begin * 2, right,
                       block_acc_ + first_row * shape_.dim, shape_.dim);
  }

  // A weight of 0 does not silence a value that is NaN or infinite. Where one may have reached rows to whose range it does
  // not belong, all are summed again, each over its own keys alone. (int8 pages hold no such values, only such scales,
  // which are masked.)
  void sum_own_values(const Piece& piece, int32_t block, const BlockPages& pages, const BlockPages& next) {
    for (int32_t t = 0; t < piece.tile->tokens; ++t) {
      int32_t row_lo, row_hi;
      row_span(*piece.tile, t, block, row_lo, row_hi);
      if (row_lo >= row_hi) continue;
      BlockPages own;
      own.first = row_lo / args_.layer.page_size;
      own.count = (row_hi + args_.layer.page_size - 1) / args_.layer.page_size - own.first;
      std::copy_n(pages.head + own.first - pages.first, own.count, own.head);
      for (int32_t h = 0; h < piece.heads; ++h) sum_values(t * piece.heads + h, 1, row_lo, row_hi, own, next);
    }
  }

  // ---------------------------------------------------------------------------------------------- results

  // Where a tile's row keeps what it got from a block.
  float* partial_row(const QueryTile& tile, int32_t unit, int32_t block, int32_t row) const {
    const int64_t rows = static_cast<int64_t>(tile.tokens) * shape_.heads_in_part;
    const int64_t blocks_before = static_cast<int64_t>(unit) * tile.num_blocks() + block - tile.first_block();
    const int64_t index = blocks_before * rows + row;
    return reinterpret_cast<float*>(args_.partials) + tile.partial + index * shape_.partial_stride;
  }

  // True for the last piece of a tile's unit that gets here. Sets the counter back to zero for the next call.
  bool last_to_finish(const QueryTile& tile, int32_t unit) const {
    uint8_t* place = args_.partials + static_cast<int64_t>(tile.counter + unit) * kCounterBytes;
    auto* finished = reinterpret_cast<std::atomic<int32_t>*>(place);
    if (finished->fetch_add(1, std::memory_order_acq_rel) + 1 < tile.pieces + tile.shared_pieces) return false;
    finished->store(0, std::memory_order_relaxed);
    return true;
  }

  void finish(const Piece& piece) {
    const QueryTile& tile = *piece.tile;
    if (tile.members)
      for (int32_t m = 0; m < tile.tokens; ++m) hand_in(piece, plan_.tile_of(tile.members[m]));
    else if (tile.partial >= 0)
      hand_in(piece, tile);
    else
      write(piece, tile);
  }

  // A piece of `tile` is done: if none is missing now, folds them all.
  void hand_in(const Piece& piece, const QueryTile& tile) {
    if (!last_to_finish(tile, piece.unit)) return;
    const int32_t rows = tile.tokens * piece.heads;
    clear(rows);
    for (int32_t r = 0; r < rows; ++r)
      for (int32_t b = 0; b < tile.num_blocks(); ++b) {
        const float* partial = partial_row(tile, piece.unit, tile.first_block() + b, r);
        fold(totals_[r], total_acc_ + r * shape_.dim, {partial[shape_.dim], partial[shape_.dim + 1]}, partial, shape_.dim);
      }
    write(piece, tile);
  }

  // The piece's query heads of a tile, from the totals to the output.
  void write(const Piece& piece, const QueryTile& tile) {
    const int64_t dim = shape_.dim, head_dim = args_.layer.head_dim;
    for (int32_t r = 0; r < tile.tokens * piece.heads; ++r) {
      const float inverse = 1.0f / totals_[r].sum;
      float* out = args_.out.row(tile.token + r / piece.heads) + (piece.head + r % piece.heads) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) out[d] = total_acc_[r * dim + d] * inverse;
    }
  }

  const AttentionArgs& args_;
  const Batch& batch_;
  Plan& plan_;
  const Shape& shape_;
  const KvLayout at_;
  int32_t distance_;
  A* queries_;
  A* weights_;
  float* scores_;
  float* block_acc_;
  float* total_acc_;
  uint16_t* unpacked_values_ = nullptr;
  uint16_t* unpacked_keys_ = nullptr;
  float* key_scales_ = nullptr;
  float* value_scales_ = nullptr;
  RowState totals_[kRows], blocks_[kRows];
};

template <KvType Type>
void run(const AttentionArgs& args, const Batch& batch, const Worker& worker) {
  auto* memory = static_cast<uint8_t*>(worker.scratch);
  const size_t workspace = Attention<Type>::workspace_bytes(kv_layout(args.layer).dim);
  const size_t start = (workspace + 63) / 64 * 64;
  Plan plan(args, batch, worker.count, memory + start, worker.scratch_bytes - start);
  Attention<Type>(args, batch, plan, memory).run(worker);
}

template <KvType Type>
size_t scratch_bytes(const AttentionArgs& args, int64_t max_tokens, int64_t max_rows) {
  const Shape shape = attention_shape(args);
  return (Attention<Type>::workspace_bytes(shape.dim) + 63) / 64 * 64 +
         Plan::bytes(max_tokens / shape.tokens_in_tile + max_rows + max_rows / 2 + 1);
}

}  // namespace

void attention(const AttentionArgs& args, const Batch& batch, const Worker& worker) {
  switch (args.layer.type) {
    case KvType::f32: return run<KvType::f32>(args, batch, worker);
    case KvType::bf16: return run<KvType::bf16>(args, batch, worker);
    case KvType::int8: return run<KvType::int8>(args, batch, worker);
  }
}

size_t attention_scratch_bytes(const AttentionArgs& args, int32_t max_tokens, int32_t max_rows) {
  switch (args.layer.type) {
    case KvType::f32: return scratch_bytes<KvType::f32>(args, max_tokens, max_rows);
    case KvType::bf16: return scratch_bytes<KvType::bf16>(args, max_tokens, max_rows);
    case KvType::int8: return scratch_bytes<KvType::int8>(args, max_tokens, max_rows);
  }
  return 0;
}

// Room for the blocks of 256k tokens of context: of a long one that is cut over the workers, or of many that share a prefix. Its
// memory is touched only as it is used.
size_t attention_partials_bytes(const AttentionArgs& args) {
  constexpr int64_t kMaxBlocks = (256 << 10) / kBlock;
  const Shape shape = attention_shape(args);
  const int64_t rows = static_cast<int64_t>(shape.units) * shape.heads_in_part;
  return static_cast<size_t>(kCounterArea + kMaxBlocks * rows * shape.partial_stride * 4);
}

}  // namespace SAYFA_ISA
}  // namespace sayfa
