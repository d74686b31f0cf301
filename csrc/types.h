// Weight types as files hold them, and the panel formats they are packed to. The numbers of TensorType are known to
// nn/program/native_weights.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sayfa {

enum class TensorType : int32_t {
  f32 = 0,
  f16 = 1,
  bf16 = 2,
  q4_0 = 3,
  q4_1 = 4,
  q5_0 = 5,
  q5_1 = 6,
  q8_0 = 7,
  q2_k = 8,
  q3_k = 9,
  q4_k = 10,
  q5_k = 11,
  q6_k = 12,
};
constexpr int kNumTensorTypes = 13;

// Panel formats: integers of 4 or 8 bits in groups of 16 or 32 along K, each group with a scale and, with `m`, a minimum.
//   value = scale * (q - zero) + minimum;  zero = 8 (4 bits), 128 (8 bits), 0 (with minimum)
enum class Format : int32_t { i4g32 = 0, i4g32m = 1, i8g32 = 2, i8g32m = 3, i4g16 = 4, i4g16m = 5, i8g16 = 6, bf16 = 7, f32 = 8 };
constexpr int kNumFormats = 9;

struct TypeFacts {
  int32_t block_elements;
  int32_t block_bytes;
  Format format;  // for f32, f16 and bf16 a dtype chooses between Format::f32 and Format::bf16
};

static constexpr TypeFacts kTypeFacts[kNumTensorTypes] = {
    {1, 4, Format::f32},      {1, 2, Format::bf16},    {1, 2, Format::bf16},    {32, 18, Format::i4g32},
    {32, 20, Format::i4g32m}, {32, 22, Format::i8g32}, {32, 24, Format::i8g32m}, {32, 34, Format::i8g32},
    {256, 84, Format::i4g16m}, {256, 110, Format::i4g16}, {256, 144, Format::i4g32m}, {256, 176, Format::i8g32m},
    {256, 210, Format::i8g16},
};

struct FormatFacts {
  int32_t columns;  // output columns of a panel
  int32_t group;    // K elements that share a scale; for floats the K elements that stand together
  int32_t bits;
  bool minimum;
  int32_t zero;
};

static constexpr FormatFacts kFormatFacts[kNumFormats] = {
    {32, 32, 4, false, 8}, {32, 32, 4, true, 0}, {32, 32, 8, false, 128}, {32, 32, 8, true, 0}, {32, 16, 4, false, 8},
    {32, 16, 4, true, 0},  {32, 16, 8, false, 128}, {64, 2, 16, false, 0}, {32, 1, 32, false, 0},
};

static constexpr const TypeFacts& facts(TensorType type) { return kTypeFacts[static_cast<int>(type)]; }
static constexpr const FormatFacts& facts(Format format) { return kFormatFacts[static_cast<int>(format)]; }

static constexpr bool is_float(TensorType type) { return static_cast<int>(type) <= 2; }
static constexpr bool is_float(Format format) { return format == Format::bf16 || format == Format::f32; }

// Bytes of one group of K elements in a panel: scales, minima, weights.
static constexpr int64_t group_bytes(Format format) {
  const FormatFacts& f = facts(format);
  const int64_t scales = is_float(format) ? 0 : f.columns * 2 * (f.minimum ? 2 : 1);
  return scales + int64_t{f.columns} * f.group * f.bits / 8;
}

static constexpr int64_t num_groups(Format format, int64_t k) { return (k + facts(format).group - 1) / facts(format).group; }
static constexpr int64_t panel_bytes(Format format, int64_t k) { return num_groups(format, k) * group_bytes(format); }
static constexpr int64_t row_bytes(TensorType type, int64_t k) {
  return k / facts(type).block_elements * facts(type).block_bytes;
}

}  // namespace sayfa
