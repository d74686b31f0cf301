// Packs file rows into panels. A panel holds, group by group along K: the columns' scales (float16), for formats with a
// minimum the minima (float16), then the weights in words of four bytes, all columns' first words, all second words, ...
//   8 bits:   word i = k 4i .. 4i+3
//   4 bits:   word i = k 4i .. 4i+3 in the low nibbles, the same plus half a group in the high ones (as Q4_0 has it)
//   bfloat16: word i = k 2i, 2i+1        float32: word i = k i
#include "blocks.h"
#include "linear.h"
#include "shares.h"

namespace sayfa::SAYFA_ISA {
namespace {

struct Place {
  uint8_t* scale;
  uint8_t* minimum;
  uint8_t* words;  // this column's first word; the next one stands 4 * columns bytes on
};

inline Place place(const Segment& s, uint8_t* group, int64_t column) {
  const FormatFacts& f = facts(s.format);
  uint8_t* words = group + f.columns * 2 * (f.minimum ? 2 : 1) + column * 4;
  return {group + column * 2, group + f.columns * 2 + column * 2, words};
}

inline void put_half(uint8_t* at, float value) {
  const uint16_t half = float_to_half(value);
  std::memcpy(at, &half, 2);
}

// One group of taken-apart weights.
inline void put_group(const Segment& s, const Place& to, const uint8_t* q, float scale, float minimum) {
  const FormatFacts& f = facts(s.format);
  put_half(to.scale, scale);
  if (f.minimum) put_half(to.minimum, minimum);
  const int half = f.group / 2, stride = 4 * f.columns;
  if (f.bits == 8) {
    for (int i = 0; i < f.group / 4; ++i) std::memcpy(to.words + i * stride, q + 4 * i, 4);
    return;
  }
  for (int i = 0; i < f.group / 8; ++i) {
    const uint32_t word = load32(q + 4 * i) | (load32(q + half + 4 * i) << 4);
    std::memcpy(to.words + i * stride, &word, 4);
  }
}

// Q4_0, Q4_1 and Q8_0 stand in their files almost as in a panel.
inline bool put_plain_block(const Segment& s, const Place& to, TensorType type, const uint8_t* b) {
  const int stride = 4 * facts(s.format).columns;
  if (type == TensorType::q8_0) {
    std::memcpy(to.scale, b, 2);
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = load32(b + 2 + 4 * i) ^ 0x80808080u;
      std::memcpy(to.words + i * stride, &word, 4);
    }
    return true;
  }
  if (type != TensorType::q4_0 && type != TensorType::q4_1) return false;
  const int header = type == TensorType::q4_1 ? 4 : 2;
  std::memcpy(to.scale, b, 2);
  if (header == 4) std::memcpy(to.minimum, b + 2, 2);
  for (int i = 0; i < 4; ++i) std::memcpy(to.words + i * stride, b + header + 4 * i, 4);
  return true;
}

void pack_int_panel(const PackArgs& a, const Column* columns, uint8_t* panel) {
  const Segment& s = a.segment;
  const FormatFacts& f = facts(s.format);
  const int64_t stride = group_bytes(s.format);
  // Blocks along K outside, columns inside: the panel is written in order while the rows are read side by side.
  constexpr int64_t kSpan = 256;  // a whole number of blocks of every type
  Parts parts;
  for (int64_t k = 0; k < a.k; k += kSpan) {
    const int64_t end = k + kSpan < a.k ? k + kSpan : a.k;
    for (int64_t c = 0; c < f.columns; ++c) {
      if (!columns[c].row) continue;
      const TypeFacts& t = facts(columns[c].type);
      for (int64_t at = k; at < end; at += t.block_elements) {
        const uint8_t* block = columns[c].row + row_bytes(columns[c].type, at);
        uint8_t* group = panel + at / f.group * stride;
        if (put_plain_block(s, place(s, group, c), columns[c].type, block)) continue;
        split_block(columns[c].type, block, &parts);
        for (int g = 0; g < t.block_elements / f.group; ++g, group += stride)
          put_group(s, place(s, group, c), parts.q + g * f.group, parts.scale[g], parts.minimum[g]);
      }
    }
  }
}

inline float element(const Column& column, int64_t k) {
  if (column.type == TensorType::f32) return float_of_bits(load32(column.row + 4 * k));
  const uint16_t bits = load16(column.row + 2 * k);
  return column.type == TensorType::f16 ? half_to_float(bits) : bfloat_to_float(bits);
}

void pack_float_panel(const PackArgs& a, const Column* columns, uint8_t* panel) {
  const FormatFacts& f = facts(a.segment.format);
  for (int64_t k = 0; k < a.k; ++k)
    for (int64_t c = 0; c < f.columns; ++c) {
      if (!columns[c].row) continue;
      if (a.segment.format == Format::f32) {
        const float value = element(columns[c], k);
        std::memcpy(panel + (k * f.columns + c) * 4, &value, 4);
      } else {
        const uint16_t value = columns[c].type == TensorType::bf16 ? load16(columns[c].row + 2 * k)
                                                                   : float_to_bfloat(element(columns[c], k));
        std::memcpy(panel + ((k / 2 * f.columns + c) * 2 + k % 2) * 2, &value, 2);
      }
    }
}

}  // namespace

void pack(const PackArgs& a, const Worker& worker) {
  const int64_t columns = facts(a.segment.format).columns;
  for_shares(worker, a.segment.panels, 1, [&](int64_t panel, int64_t) {
    uint8_t* to = a.segment.data + panel * a.segment.bytes;
    if (is_float(a.segment.format))
      pack_float_panel(a, a.columns + panel * columns, to);
    else
      pack_int_panel(a, a.columns + panel * columns, to);
  });
}

}  // namespace sayfa::SAYFA_ISA
