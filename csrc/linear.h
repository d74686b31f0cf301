// Weight products: packed panels, prepared rows, and the table of kernels that each instruction set fills.
//
// A weight [N, K] is a list of segments; a segment is a run of output columns with one format, packed in panels by all of K
// in reading order (types.h tells the formats, pack.cpp the bytes). Activations are prepared once a row for all the
// formats that its consumers need: int8 in groups of 32 with scale and sums, bfloat16, or float32.
//
// Law: a row's result depends on the row and the weight alone. Integer sums are exact; float sums run along K in one chain
// per row and column, whatever the number of rows in a tile.
#pragma once

#include "sayfa.h"
#include "types.h"

namespace sayfa {

// What a product needs of a group of int8 activations beside the bytes: 32 of them, or each half on its own.
struct GroupFacts {
  float scale;
  int32_t neg8;  // -8 * sum of the bytes
  float sum;     // scale * sum of the bytes
  int32_t unused;
};

// Where the parts of one prepared row lie, in bytes from its start; -1: not made. q [K] int8, facts32 [K / 32] and
// facts16 [K / 16] GroupFacts.
struct RowLayout {
  int64_t k = 0;
  int64_t q = -1, facts32 = -1, facts16 = -1;
  int64_t bf16 = -1;
  int64_t f32 = -1;
  int64_t bytes = 0;  // a multiple of 64
};

struct Segment {
  Format format;
  bool paired;       // each panel holds as many gate columns as up columns, gate first: one result column for each pair
  int64_t column;    // first output column
  int64_t columns;   // output columns
  int64_t panels;
  int64_t bytes;     // of one panel
  uint8_t* data;
};

enum class Epilogue : int32_t { store = 0, add = 1, silu_mul = 2, gelu_mul = 3 };

// Row preparation: x [rows, K], normed first when norm_weight is there, to `out` rows `layout.bytes` apart.
struct PrepareArgs {
  Mat x;
  RowSpace rows;
  const float* norm_weight;
  float eps;
  RowLayout layout;
  uint8_t* out;
};

struct LinearArgs {
  PrepareArgs input;             // input.out is null: the kernels read float32 rows straight from x
  int64_t self_prepare_rows;     // up to so many rows each worker prepares them for itself in its scratch memory
  const Segment* segments;
  int64_t num_panels;            // of all segments
  int64_t row_block;             // rows whose prepared form fits the second-level cache
  Mat out;
  Epilogue epilogue;
  const float* bias;             // [N] or null; not with the paired epilogues
  const LinearArgs* next;        // the product after this one, or null: its first bytes are fetched early
};

// A source row of a weight: one output column of the product.
struct Column {
  const uint8_t* row;  // null: padding
  TensorType type;
};

struct PackArgs {
  Segment segment;
  const Column* columns;  // [panels * columns of a panel]
  int64_t k;
};

struct LinearTable {
  void (*embed)(const EmbedArgs&, const Batch&, const Worker&);
  void (*prepare)(const PrepareArgs&, const Batch&, const Worker&);
  void (*linear)(const LinearArgs&, const Batch&, const Worker&);
  void (*pack)(const PackArgs&, const Worker&);
  bool bf16_rows;  // whether bfloat16 panels take bfloat16 rows; else float32 ones
};

// The parts of a row that consumers of these formats need (a bit per Format), on an instruction set with or without bf16_rows.
uint32_t row_formats(uint32_t formats, bool bf16_rows);

// Lays out prepared rows of width k for consumers of these formats (a bit per Format).
RowLayout row_layout(int64_t k, uint32_t formats);

#ifdef SAYFA_ISA
namespace SAYFA_ISA {
LinearTable linear_table();
void embed(const EmbedArgs&, const Batch&, const Worker&);
void prepare(const PrepareArgs&, const Batch&, const Worker&);
void linear(const LinearArgs&, const Batch&, const Worker&);
void pack(const PackArgs&, const Worker&);

// Prepares one row; `scratch` holds k floats and is used with norm_weight only.
void prepare_row(const PrepareArgs&, const float* x, uint8_t* out, float* scratch);

// What to fetch early at each step along K of a tile: `lines` lines at start + step * stride; from `end` on at `next` instead.
// The next tile of the panel starts `advance` further on.
struct Ahead {
  const uint8_t* start;
  const uint8_t* end;
  const uint8_t* next;  // null: nothing from `end` on
  int64_t stride, lines, advance;
};

// Where the sums of a tile go [rows][columns of the panel]: as they are to `sums`; or, where `out` is not null, straight from the
// registers through the epilogue to the result, rows `stride` apart. Only a tile that passes once over its panel can do that.
struct TileOut {
  float* sums;
  float* out;
  int64_t stride;
  Epilogue epilogue;
};

// Multiplies `rows` (at most kIntTileRows or kFloatTileRows) prepared rows by one panel.
struct TileArgs {
  const uint8_t* panel;
  const uint8_t* rows;
  int64_t row_stride;
  const RowLayout* layout;
  TileOut to;
  Ahead ahead;
};
using TileKernel = void (*)(const TileArgs&);
TileKernel int_tile(Format format, int rows);
TileKernel float_tile(Format format, int rows);

// Rows of a tile of integer and of float panels, and how many times a tile of so many rows passes over its panel: its registers
// hold the sums of all columns, or of a part of them.
#if defined(__AVX512F__)
constexpr int kIntTileRows = 6;
constexpr int kFloatTileRows = 6;
constexpr int passes_int(int) { return 1; }
constexpr int passes_f32(int) { return 1; }
#else
constexpr int kIntTileRows = 4;
constexpr int kFloatTileRows = 5;
constexpr int passes_int(int rows) { return rows == 1 ? 1 : 2; }
constexpr int passes_f32(int rows) { return rows == 1 ? 1 : 2; }
#endif
#if defined(__AVX512BF16__)
constexpr int passes_bf16(int) { return 1; }
#elif defined(__AVX512F__)
constexpr int passes_bf16(int rows) { return rows == 1 ? 1 : 2; }
#else
constexpr int passes_bf16(int rows) { return rows == 1 ? 1 : 4; }
#endif

// Whether bfloat16 panels take bfloat16 rows; else they take float32 ones.
#if defined(__AVX512BF16__)
constexpr bool kBf16Rows = true;
#else
constexpr bool kBf16Rows = false;
#endif
}  // namespace SAYFA_ISA
#endif

}  // namespace sayfa
