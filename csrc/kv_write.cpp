// Scatters the new K and V rows of a step into their page slots, converting to the pages' type.
#include "half.h"
#include "kv_layout.h"
#include "ops.h"
#include "shares.h"
#include "simd_math.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

constexpr int64_t kTokensPerChunk = 16;  // one cache line of a bf16 K row

// Element (row pair i/2, output o) of a matrix of pairs with `width` outputs.
template <class T>
struct PairMatrix {
  T* data;
  int64_t width;
  T& at(int64_t i, int64_t output) const {
    if (sizeof(T) == 4) return data[i * width + output];
    return data[((i >> 1) * width + output) * 2 + (i & 1)];
  }
};

template <class T>
void scatter(const T* key, const T* value, uint8_t* head, const KvLayout& at, int64_t offset) {
  const PairMatrix<T> k{reinterpret_cast<T*>(head), at.tokens};
  const PairMatrix<T> v{reinterpret_cast<T*>(head + at.part_bytes), at.dim};
  for (int64_t d = 0; d < at.dim; ++d) k.at(d, offset) = key[d];
  for (int64_t d = 0; d < at.dim; ++d) v.at(offset, d) = value[d];
}

void convert(const float* x, int64_t dim, int64_t padded, uint16_t* out) {
  for (int64_t d = 0; d < dim; ++d) out[d] = float_to_bfloat(x[d]);
  for (int64_t d = dim; d < padded; ++d) out[d] = 0;
}

void convert(const float* x, int64_t dim, int64_t padded, float* out) {
  for (int64_t d = 0; d < dim; ++d) out[d] = x[d];
  for (int64_t d = dim; d < padded; ++d) out[d] = 0;
}

// Returns the scale. A row with NaN or infinity gets the scale NaN, so that whoever reads it knows.
float quantize(const float* x, int64_t dim, int64_t padded, int8_t* out) {
  float largest = 0, sum = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const float size = x[d] < 0 ? -x[d] : x[d];
    largest = size > largest ? size : largest;
    sum += size;
  }
  const bool finite = sum <= 3.0e38f && largest <= 3.0e38f;
  const float scale = largest / 127.0f, inverse = finite && scale > 1e-38f ? 1.0f / scale : 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float scaled = finite ? x[d] * inverse : 0.0f;
    out[d] = static_cast<int8_t>(static_cast<int32_t>(scaled + (scaled < 0 ? -0.5f : 0.5f)));
  }
  for (int64_t d = dim; d < padded; ++d) out[d] = 0;
  return finite ? scale : __builtin_nanf("");
}

template <class T>
void write_token(const KvWriteArgs& args, const KvLayout& at, int64_t token, int64_t slot) {
  const KvLayer& layer = args.layer;
  const int64_t page = slot / at.tokens, offset = slot % at.tokens, dim = layer.head_dim;
  alignas(64) T key[kMaxHeadDim], value[kMaxHeadDim];
  for (int32_t h = 0; h < layer.num_kv_heads; ++h) {
    const float* k = args.key.row(token) + h * dim;
    const float* v = args.value.row(token) + h * dim;
    uint8_t* head = head_start(layer, at, page, h);
    if constexpr (sizeof(T) == 1) {
      float* scales = reinterpret_cast<float*>(head + at.scale_offset);
      scales[offset] = quantize(k, dim, at.dim, key);
      scales[at.tokens + offset] = quantize(v, dim, at.dim, value);
    } else {
      convert(k, dim, at.dim, key);
      convert(v, dim, at.dim, value);
    }
    scatter<T>(key, value, head, at, offset);
  }
}

}  // namespace

size_t kv_page_bytes(const KvLayer& layer) {
  return static_cast<size_t>((kv_layout(layer).head_bytes * layer.num_kv_heads + 63) / 64 * 64);
}

void kv_write(const KvWriteArgs& args, const Batch& batch, const Worker& worker) {
  const KvLayout at = kv_layout(args.layer);
  for_shares(worker, batch.T, kTokensPerChunk, [&](int64_t first, int64_t end) {
    for (int64_t t = first; t < end; ++t) {
      switch (args.layer.type) {
        case KvType::f32: write_token<float>(args, at, t, batch.slots[t]); break;
        case KvType::bf16: write_token<uint16_t>(args, at, t, batch.slots[t]); break;
        case KvType::int8: write_token<int8_t>(args, at, t, batch.slots[t]); break;
      }
    }
  });
}

}  // namespace SAYFA_ISA
}  // namespace sayfa
