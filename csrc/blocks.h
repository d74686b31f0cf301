// Blocks of GGUF's integer types, taken apart into what a panel holds: q, scale and minimum by group, such that
// value = scale * (q - zero) + minimum with the zero of the type's panel format (types.h). The scales and minima are
// exact in float32 for all types here (a float16 times an integer of at most 8 bits).
// Layouts: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml's type descriptions.
#pragma once

#include "half.h"
#include "types.h"

namespace sayfa {

struct Parts {
  uint8_t q[256];
  float scale[16];
  float minimum[16];
};

static inline void split_nibbles(const uint8_t* bytes, int add, uint8_t* q) {
  for (int j = 0; j < 16; ++j) {
    q[j] = static_cast<uint8_t>((bytes[j] & 15) + add);
    q[j + 16] = static_cast<uint8_t>((bytes[j] >> 4) + add);
  }
}

static inline void split_five_bits(const uint8_t* high, const uint8_t* low, int add, uint8_t* q) {
  const uint32_t bits = load32(high);
  for (int j = 0; j < 16; ++j) {
    q[j] = static_cast<uint8_t>(((low[j] & 15) | (((bits >> j) & 1) << 4)) + add);
    q[j + 16] = static_cast<uint8_t>(((low[j] >> 4) | (((bits >> (j + 16)) & 1) << 4)) + add);
  }
}

// Six-bit scale and minimum number `j` of the twelve bytes that Q4_K and Q5_K share.
static inline void scale_and_minimum(const uint8_t* s, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *minimum = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

static inline void split_q2_k(const uint8_t* b, Parts* out) {
  const float d = half_to_float(load16(b + 80)), dmin = half_to_float(load16(b + 82));
  for (int g = 0; g < 16; ++g) {
    out->scale[g] = d * static_cast<float>(b[g] & 15);
    out->minimum[g] = -(dmin * static_cast<float>(b[g] >> 4));
    const uint8_t* bytes = b + 16 + (g / 8) * 32 + (g % 2) * 16;
    const int shift = (g % 8) / 2 * 2;
    for (int l = 0; l < 16; ++l) out->q[g * 16 + l] = static_cast<uint8_t>((bytes[l] >> shift) & 3);
  }
}

static inline void split_q3_k(const uint8_t* b, Parts* out) {
  const uint8_t* scales = b + 96;
  const float d = half_to_float(load16(b + 108));
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
    const int high = (scales[8 + g % 4] >> (2 * (g / 4))) & 3;
    out->scale[g] = d * static_cast<float>((low | (high << 4)) - 32);
    out->minimum[g] = 0.0f;
    const uint8_t* bytes = b + 32 + (g / 8) * 32 + (g % 2) * 16;
    const uint8_t* mask = b + (g % 2) * 16;
    const int shift = (g % 8) / 2 * 2, bit = g / 8 * 4 + (g % 8) / 2;
    for (int l = 0; l < 16; ++l)  // 0..7 minus 4, and the panel's zero is 8
      out->q[g * 16 + l] = static_cast<uint8_t>((((bytes[l] >> shift) & 3) | (((mask[l] >> bit) & 1) << 2)) + 4);
  }
}

static inline void split_q4_k(const uint8_t* b, Parts* out) {
  const float d = half_to_float(load16(b)), dmin = half_to_float(load16(b + 2));
  for (int g = 0; g < 8; ++g) {
    int scale, minimum;
    scale_and_minimum(b + 4, g, &scale, &minimum);
    out->scale[g] = d * static_cast<float>(scale);
    out->minimum[g] = -(dmin * static_cast<float>(minimum));
    const uint8_t* bytes = b + 16 + (g / 2) * 32;
    for (int l = 0; l < 32; ++l) out->q[g * 32 + l] = static_cast<uint8_t>(g % 2 ? bytes[l] >> 4 : bytes[l] & 15);
  }
}

static inline void split_q5_k(const uint8_t* b, Parts* out) {
  const float d = half_to_float(load16(b)), dmin = half_to_float(load16(b + 2));
  for (int g = 0; g < 8; ++g) {
    int scale, minimum;
    scale_and_minimum(b + 4, g, &scale, &minimum);
    out->scale[g] = d * static_cast<float>(scale);
    out->minimum[g] = -(dmin * static_cast<float>(minimum));
    const uint8_t* high = b + 16;
    const uint8_t* low = b + 48 + (g / 2) * 32;
    for (int l = 0; l < 32; ++l)
      out->q[g * 32 + l] = static_cast<uint8_t>((g % 2 ? low[l] >> 4 : low[l] & 15) | (((high[l] >> g) & 1) << 4));
  }
}

static inline void split_q6_k(const uint8_t* b, Parts* out) {
  const float d = half_to_float(load16(b + 208));
  for (int g = 0; g < 16; ++g) {
    out->scale[g] = d * static_cast<float>(static_cast<int8_t>(b[192 + g]));
    out->minimum[g] = 0.0f;
    const int half = g / 8, quarter = (g % 8) / 2, at = (g % 2) * 16;
    const uint8_t* low = b + half * 64 + (quarter % 2) * 32 + at;
    const uint8_t* high = b + 128 + half * 32 + at;
    for (int l = 0; l < 16; ++l) {
      const int four = quarter < 2 ? low[l] & 15 : low[l] >> 4;
      const int two = (high[l] >> (2 * quarter)) & 3;
      out->q[g * 16 + l] = static_cast<uint8_t>((four | (two << 4)) + 96);  // minus 32, and the panel's zero is 128
    }
  }
}

// Takes one block of an integer type apart.
static inline void split_block(TensorType type, const uint8_t* b, Parts* out) {
  out->scale[0] = half_to_float(load16(b));
  out->minimum[0] = 0.0f;
  switch (type) {
    case TensorType::q4_0: split_nibbles(b + 2, 0, out->q); break;
    case TensorType::q4_1:
      out->minimum[0] = half_to_float(load16(b + 2));
      split_nibbles(b + 4, 0, out->q);
      break;
    case TensorType::q5_0: split_five_bits(b + 2, b + 6, 112, out->q); break;  // minus 16, and the panel's zero is 128
    case TensorType::q5_1:
      out->minimum[0] = half_to_float(load16(b + 2));
      split_five_bits(b + 4, b + 8, 0, out->q);
      break;
    case TensorType::q8_0:
      for (int j = 0; j < 32; ++j) out->q[j] = static_cast<uint8_t>(b[2 + j] ^ 0x80);
      break;
    case TensorType::q2_k: split_q2_k(b, out); break;
    case TensorType::q3_k: split_q3_k(b, out); break;
    case TensorType::q4_k: split_q4_k(b, out); break;
    case TensorType::q5_k: split_q5_k(b, out); break;
    case TensorType::q6_k: split_q6_k(b, out); break;
    default: break;
  }
}

// One row of K elements as float32; `row` is as the file holds it.
static inline void dequantize_row(TensorType type, const uint8_t* row, int64_t k, float* out) {
  if (type == TensorType::f32) {
    std::memcpy(out, row, static_cast<size_t>(k) * 4);
  } else if (type == TensorType::f16) {
    for (int64_t i = 0; i < k; ++i) out[i] = half_to_float(load16(row + 2 * i));
  } else if (type == TensorType::bf16) {
    for (int64_t i = 0; i < k; ++i) out[i] = bfloat_to_float(load16(row + 2 * i));
  } else {
    const TypeFacts& t = facts(type);
    const FormatFacts& f = facts(t.format);
    Parts parts;
    for (int64_t i = 0; i < k; i += t.block_elements, row += t.block_bytes) {
      split_block(type, row, &parts);
      for (int j = 0; j < t.block_elements; ++j) {
        const int g = j / f.group;
        out[i + j] = parts.scale[g] * static_cast<float>(parts.q[j] - f.zero) + parts.minimum[g];
      }
    }
  }
}

}  // namespace sayfa
