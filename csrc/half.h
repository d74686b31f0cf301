// float16 and bfloat16 as integers, one number at a time. Everything static: see sayfa.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace sayfa {

static inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(half & 0x7fff) << 13;
  if ((half & 0x7c00) == 0x7c00) return float_of_bits(sign | 0x7f800000 | rest);           // infinity, NaN
  if ((half & 0x7c00) == 0) return float_of_bits(sign | bits_of_float(static_cast<float>(half & 0x3ff) * 0x1p-24f));
  return float_of_bits(sign | (rest + 0x38000000));
}

// Nearest, ties to even; above 65,504 infinity.
static inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 65,536 or more
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 shifts the mantissa to its place and rounds it
    return static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

static inline float bfloat_to_float(uint16_t value) { return float_of_bits(static_cast<uint32_t>(value) << 16); }

// Nearest, ties to even; NaN stays NaN. Denormals are kept, unlike the conversion instruction.
static inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
}

static inline uint16_t load16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

static inline uint32_t load32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

}  // namespace sayfa
