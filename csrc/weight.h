// A packed weight: which file rows go to which panels, and the packing at load.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace sayfa {

// One matrix of `rows` rows as its file holds it.
struct Piece {
  const uint8_t* data;
  TensorType type;
  int64_t rows;
};

class Weight {
 public:
  // Plans the panels of pieces stacked along N. `floats` is the panel format of float16, bfloat16 and float32 pieces; -1 keeps
  // float32 and packs the two 16-bit types as bfloat16. `paired`: two pieces of equal shape and format whose panels alternate
  // (gate, up).
  // Throws std::invalid_argument when K does not fit the type's blocks.
  Weight(const std::vector<Piece>& pieces, int64_t k, int floats, bool paired);

  int64_t k() const { return k_; }
  int64_t num_columns() const { return num_columns_; }  // of the product
  int64_t num_panels() const;
  int64_t bytes() const { return bytes_; }              // packed, a multiple of 64
  uint32_t formats() const;                             // a bit per Format
  const std::vector<Segment>& segments() const { return segments_; }

  // Whether two pieces may be paired.
  static bool can_pair(const Piece& gate, const Piece& up, int floats);

  // Packs into block at `offset`, with all workers of the pool. Keeps the block alive.
  void pack(Pool& pool, const Kernels& kernels, std::shared_ptr<Block> block, int64_t offset);

 private:
  void add_segment(Format format, bool paired, std::vector<Column> columns, int64_t results);

  int64_t k_;
  int64_t num_columns_ = 0;
  int64_t bytes_ = 0;
  std::vector<Segment> segments_;
  std::vector<std::vector<Column>> columns_;  // by segment, until packed
  std::shared_ptr<Block> block_;
};

}  // namespace sayfa
