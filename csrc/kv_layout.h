// Where K and V of a token stand inside a page. Shared by kv_write.cpp and paged_attention.cpp, and by nobody else.
//
// A page holds `page_size` tokens of all KV heads; a head's part is contiguous:
//
//   f32    K [D/2][2][tokens]   V [tokens/2][2][D]
//   bf16   K [D/2][tokens][2]   V [tokens/2][D][2]
//   int8   K [D/2][tokens][2]   V [tokens/2][D][2]   K scales [tokens] f32   V scales [tokens] f32
//
// D is head_dim rounded up to a multiple of 16; the added dims are written as zeros. So both are matrices of pairs
// with a row of `width` outputs (tokens for K, dims for V): what the dot-product instructions take, tokens or dims
// across lanes. int8: symmetric, one scale per token and head, value = int8 * scale.
#pragma once

#include "sayfa.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

constexpr int kMaxHeadDim = 256;

struct KvLayout {
  int64_t dim;           // D
  int64_t tokens;        // page_size
  int64_t part_bytes;    // K of one head, and V of one head
  int64_t head_bytes;    // K, V and scales of one head
  int64_t scale_offset;  // from the head's start to the K scales; V scales follow
};

inline int64_t element_bytes(KvType type) { return type == KvType::f32 ? 4 : type == KvType::bf16 ? 2 : 1; }

inline KvLayout kv_layout(const KvLayer& layer) {
  KvLayout at;
  at.dim = (layer.head_dim + 15) / 16 * 16;
  at.tokens = layer.page_size;
  at.part_bytes = at.dim * at.tokens * element_bytes(layer.type);
  at.scale_offset = 2 * at.part_bytes;
  at.head_bytes = at.scale_offset + (layer.type == KvType::int8 ? 2 * at.tokens * 4 : 0);
  return at;
}

inline uint8_t* head_start(const KvLayer& layer, const KvLayout& at, int64_t page, int64_t head) {
  return layer.base + page * layer.page_stride + head * at.head_bytes;
}

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
