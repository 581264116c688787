// scalar.h - conversions and functions of one number (docs/numerics.md, sections 1 and 5). Everything is static: a
// translation unit compiled for a wider instruction set must not lend its copy to another.
#ifndef FT_SCALAR_H
#define FT_SCALAR_H
#include <cstdint>
#include <cstring>

namespace ft {

static inline float bits_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

static inline uint32_t float_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

// fp16 widened exactly: the exponent is moved by a product with 2^112, which also normalises subnormals.
static inline float half_float(uint16_t h) {
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
  const uint32_t finite = float_bits(bits_float(magnitude) * bits_float(0x77800000));
  const uint32_t u = magnitude >= 0x0f800000 ? (magnitude | 0x7f800000) : finite;
  return bits_float(u | (uint32_t(h & 0x8000) << 16));
}

// Rounded to the nearest fp16, ties to even. In the subnormal range adding 0.5 leaves the result in the low bits.
static inline uint16_t float_half(float f) {
  const uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  const uint32_t normal = (a + 0xc8000fffu + ((a >> 13) & 1)) >> 13;
  const uint32_t subnormal = float_bits(bits_float(a) + 0.5f) - 0x3f000000;
  const uint32_t special = a > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t h = a >= 0x47800000 ? special : (a < 0x38800000 ? subnormal : normal);
  return uint16_t(sign | h);
}

static inline float bf16_float(uint16_t h) { return bits_float(uint32_t(h) << 16); }

// 2^(e - 128), the block factor of MXFP4 whose table holds twice the values.
static inline float e8m0_half_float(uint8_t e) {
  return bits_float(e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23);
}

static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, ties to even
static constexpr uint32_t kRoundBits = 0x4b400000;

static inline float exp_one(float x) {
  x = x > 88.0f ? 88.0f : x;
  const float shifted = (x * 1.44269504088896341f) + kRound;
  const float k = shifted - kRound;
  const float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = ((p * (r * r)) + r) + 1.0f;
  const float power = bits_float((float_bits(shifted) - kRoundBits + 127u) << 23);
  return x < -87.0f ? 0.0f : y * power;
}

static inline float sigmoid_one(float x) { return 1.0f / (1.0f + exp_one(-x)); }
static inline float silu_one(float x) { return x / (1.0f + exp_one(-x)); }

static inline float gelu_one(float x) {
  const float u = x * (1.5957691216057308f + 0.07135481627159992f * (x * x));
  return x / (1.0f + exp_one(-u));
}

static inline float tanh_one(float x) { return 1.0f - (2.0f / (exp_one(2.0f * x) + 1.0f)); }

// The fold of lanes8.
static inline float tree8(const float *l) {
  return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

}  // namespace ft
#endif
