// x86_forms.h - the integer forms of blocks.h as vectors: factors of eight blocks, integers and scales of one.
#ifndef FT_X86_FORMS_H
#define FT_X86_FORMS_H
#include "blocks.h"
#include "x86_vectors.h"

namespace ft {
namespace {

// --- factors of eight blocks, `step` bytes apart; blocks from `count` on give zeros --------------------------------

struct Factors {
  F8 d, m;
};

// Two neighbouring fp16 each.
FT_INLINE Factors factors2(const uint8_t *p, int step, int count) {
  alignas(32) uint32_t w[8] = {};
  __m128i low, high;
  if (count == 8) {
    low = _mm_setr_epi32(word32(p), word32(p + step), word32(p + 2 * step), word32(p + 3 * step));
    p += 4 * step;
    high = _mm_setr_epi32(word32(p), word32(p + step), word32(p + 2 * step), word32(p + 3 * step));
  } else {
    for (int i = 0; i < count; ++i) w[i] = word32(p + i * step);
    low = load16(w);
    high = load16(w + 4);
  }
  const __m128i mask = _mm_set1_epi32(0xffff);
  const __m128i d = _mm_packus_epi32(_mm_and_si128(low, mask), _mm_and_si128(high, mask));
  const __m128i m = _mm_packus_epi32(_mm_srli_epi32(low, 16), _mm_srli_epi32(high, 16));
  return {_mm256_cvtph_ps(d), _mm256_cvtph_ps(m)};
}

FT_INLINE Factors factors1(const uint8_t *p, int step, int count) {
  alignas(16) uint16_t w[8] = {};
  __m128i d;
  if (count == 8) {
    d = _mm_setr_epi16(word16(p), word16(p + step), word16(p + 2 * step), word16(p + 3 * step), word16(p + 4 * step),
                       word16(p + 5 * step), word16(p + 6 * step), word16(p + 7 * step));
  } else {
    for (int i = 0; i < count; ++i) w[i] = uint16_t(word16(p + i * step));
    d = load16(w);
  }
  return {_mm256_cvtph_ps(d), _mm256_setzero_ps()};
}

// --- class 32: integers of one block as bytes ---------------------------------------------------------------------

FT_INLINE I8 nibbles16(const uint8_t *qs) {
  const I8 both = _mm256_broadcastsi128_si256(load16(qs));
  return _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
}

// Bit i of the word as 0x10 in byte i.
FT_INLINE I8 fifth_bits(const uint8_t *qh) {
  const I8 spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(int(word32(qh))),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const I8 bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), _mm256_set1_epi8(16));
}

FT_INLINE I8 lookup(const int8_t *table, I8 n) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(table)), n);
}

struct VecQ4_0 : FormQ4_0 {
  FT_INLINE static I8 bytes(const Block &b) { return _mm256_sub_epi8(nibbles16(b.qs), _mm256_set1_epi8(8)); }
};
struct VecQ4_1 : FormQ4_1 {
  FT_INLINE static I8 bytes(const Block &b) { return nibbles16(b.qs); }
};
struct VecQ5_0 : FormQ5_0 {
  FT_INLINE static I8 bytes(const Block &b) {
    return _mm256_sub_epi8(_mm256_or_si256(nibbles16(b.qs), fifth_bits(b.qh)), _mm256_set1_epi8(16));
  }
};
struct VecQ5_1 : FormQ5_1 {
  FT_INLINE static I8 bytes(const Block &b) { return _mm256_or_si256(nibbles16(b.qs), fifth_bits(b.qh)); }
};
struct VecQ8_0 : FormQ8_0 {
  FT_INLINE static I8 bytes(const Block &b) { return load(b.qs); }
};
struct VecIQ4_NL : FormIQ4_NL {
  FT_INLINE static I8 bytes(const Block &b) { return lookup(kTableIQ4, nibbles16(b.qs)); }
};
struct VecMXFP4 : FormMXFP4 {
  FT_INLINE static I8 bytes(const Block &b) { return lookup(kTableMXFP4, nibbles16(b.qs)); }
};

// --- class 256 ------------------------------------------------------------------------------------------------

// Scales of a block: sc holds even groups of 16 in its lower half and odd ones in its upper half (group_place).
struct VecScales {
  I8 sc, mn;
};

FT_INLINE VecScales vec_scales_k4(const uint8_t *s) {
  const uint32_t a = word32(s), b = word32(s + 4), c = word32(s + 8);
  const uint32_t sc1 = (c & 0x0f0f0f0f) | ((a >> 2) & 0x30303030);
  const uint32_t mn1 = ((c >> 4) & 0x0f0f0f0f) | ((b >> 2) & 0x30303030);
  const uint64_t sc = uint64_t(a & 0x3f3f3f3f) | (uint64_t(sc1) << 32);
  const uint64_t mn = uint64_t(b & 0x3f3f3f3f) | (uint64_t(mn1) << 32);
  const I8 both = _mm256_cvtepu8_epi16(_mm_set_epi64x(int64_t(mn), int64_t(sc)));
  return {_mm256_permute2x128_si256(both, both, 0x00), _mm256_permute2x128_si256(both, both, 0x11)};
}

// 16 signed bytes in order -> even ones, then odd ones, widened.
FT_INLINE I8 even_odd(__m128i s) {
  return _mm256_cvtepi8_epi16(
      _mm_shuffle_epi8(s, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
}

// In each half, place j of the scales in all eight places.
FT_INLINE I8 spread_scale(I8 sc, int j) {
  return _mm256_shuffle_epi8(sc, _mm256_set1_epi16(int16_t((2 * j) | ((2 * j + 1) << 8))));
}

FT_INLINE I8 and_bits(I8 v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi8(char(mask))); }

// Each Vec gives the unsigned integers (kBias more than the form's; or signed ones where kSigned) of 64 or 128
// values a step: parts(prepare(b), s, out) fills kPart vectors of 32 values, s-th of 8 / kPart.
template <class Form>
struct AsStored : Form {
  FT_INLINE static const typename Form::Block &prepare(const typename Form::Block &b) { return b; }
};

struct VecQ4_K : AsStored<FormQ4_K> {
  static constexpr bool kCommon = true;
  static constexpr bool kSigned = false;
  static constexpr int kBias = 0, kPart = 2;
  FT_INLINE static void parts(const Block &b, int s, I8 *n) {
    const I8 q = load(b.qs + 32 * s);
    n[0] = and_bits(q, 15);
    n[1] = and_bits(_mm256_srli_epi16(q, 4), 15);
  }
  FT_INLINE static VecScales scales(const Block &b) { return vec_scales_k4(b.scales); }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors2(p, sizeof(Block), count); }
};

struct VecQ5_K : AsStored<FormQ5_K> {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = false;
  static constexpr int kBias = 0, kPart = 2;
  FT_INLINE static void parts(const Block &b, int s, I8 *n) {
    const I8 q = load(b.qs + 32 * s), h = _mm256_srl_epi16(load(b.qh), _mm_cvtsi32_si128(2 * s));
    n[0] = _mm256_or_si256(and_bits(q, 15), and_bits(_mm256_slli_epi16(h, 4), 16));
    n[1] = _mm256_or_si256(and_bits(_mm256_srli_epi16(q, 4), 15), and_bits(_mm256_slli_epi16(h, 3), 16));
  }
  FT_INLINE static VecScales scales(const Block &b) { return vec_scales_k4(b.scales); }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors2(p, sizeof(Block), count); }
};

struct VecQ6_K : AsStored<FormQ6_K> {
  static constexpr bool kCommon = true;
  static constexpr bool kSigned = false;
  static constexpr int kBias = 32, kPart = 4;
  FT_INLINE static void parts(const Block &b, int s, I8 *n) {
    const I8 q0 = load(b.ql + 64 * s), q1 = load(b.ql + 64 * s + 32), h = load(b.qh + 32 * s);
    n[0] = _mm256_or_si256(and_bits(q0, 15), and_bits(_mm256_slli_epi16(h, 4), 48));
    n[1] = _mm256_or_si256(and_bits(q1, 15), and_bits(_mm256_slli_epi16(h, 2), 48));
    n[2] = _mm256_or_si256(and_bits(_mm256_srli_epi16(q0, 4), 15), and_bits(h, 48));
    n[3] = _mm256_or_si256(and_bits(_mm256_srli_epi16(q1, 4), 15), and_bits(_mm256_srli_epi16(h, 2), 48));
  }
  FT_INLINE static VecScales scales(const Block &b) { return {even_odd(load16(b.scales)), _mm256_setzero_si256()}; }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors1(p + 208, sizeof(Block), count); }
};

struct VecQ2_K : AsStored<FormQ2_K> {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = false;
  static constexpr int kBias = 0, kPart = 4;
  FT_INLINE static void parts(const Block &b, int s, I8 *n) {
    const I8 q = load(b.qs + 32 * s);
    n[0] = and_bits(q, 3);
    n[1] = and_bits(_mm256_srli_epi16(q, 2), 3);
    n[2] = and_bits(_mm256_srli_epi16(q, 4), 3);
    n[3] = and_bits(_mm256_srli_epi16(q, 6), 3);
  }
  FT_INLINE static VecScales scales(const Block &b) {
    const __m128i s = load16(b.scales), mask = _mm_set1_epi8(15);
    return {even_odd(_mm_and_si128(s, mask)), even_odd(_mm_and_si128(_mm_srli_epi16(s, 4), mask))};
  }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors2(p + 80, sizeof(Block), count); }
};

// The twelve bytes of Q3_K as sixteen signed scales.
FT_INLINE __m128i scales_q3(const uint8_t *scales) {
  const uint32_t a = word32(scales), c = word32(scales + 4), h = word32(scales + 8);
  const uint32_t s0 = (a & 0x0f0f0f0f) | ((h << 4) & 0x30303030);
  const uint32_t s1 = (c & 0x0f0f0f0f) | ((h << 2) & 0x30303030);
  const uint32_t s2 = ((a >> 4) & 0x0f0f0f0f) | (h & 0x30303030);
  const uint32_t s3 = ((c >> 4) & 0x0f0f0f0f) | ((h >> 2) & 0x30303030);
  return _mm_sub_epi8(_mm_setr_epi32(int(s0), int(s1), int(s2), int(s3)), _mm_set1_epi8(32));
}

struct VecQ3_K : AsStored<FormQ3_K> {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = false;
  static constexpr int kBias = 4, kPart = 4;
  FT_INLINE static void parts(const Block &b, int s, I8 *n) {
    const I8 q = load(b.qs + 32 * s), h = _mm256_srl_epi16(load(b.hmask), _mm_cvtsi32_si128(4 * s));
    n[0] = _mm256_or_si256(and_bits(q, 3), and_bits(_mm256_slli_epi16(h, 2), 4));
    n[1] = _mm256_or_si256(and_bits(_mm256_srli_epi16(q, 2), 3), and_bits(_mm256_slli_epi16(h, 1), 4));
    n[2] = _mm256_or_si256(and_bits(_mm256_srli_epi16(q, 4), 3), and_bits(h, 4));
    n[3] = _mm256_or_si256(and_bits(_mm256_srli_epi16(q, 6), 3), and_bits(_mm256_srli_epi16(h, 1), 4));
  }
  FT_INLINE static VecScales scales(const Block &b) {
    return {even_odd(scales_q3(b.scales)), _mm256_setzero_si256()};
  }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors1(p + 108, sizeof(Block), count); }
};

struct VecIQ4_XS : AsStored<FormIQ4_XS> {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = true;
  static constexpr int kBias = 0, kPart = 2;
  FT_INLINE static void parts(const Block &b, int s, I8 *n) {
    n[0] = lookup(kTableIQ4, nibbles16(b.qs + 32 * s));
    n[1] = lookup(kTableIQ4, nibbles16(b.qs + 32 * s + 16));
  }
  FT_INLINE static VecScales scales(const Block &b) {
    alignas(16) int16_t s[8];
    for (int j = 0; j < 8; ++j) {
      s[j] = int16_t((((b.scales_l[j >> 1] >> (4 * (j & 1))) & 15) | (((b.scales_h >> (2 * j)) & 3) << 4)) - 32);
    }
    return {_mm256_broadcastsi128_si256(load16(s)), _mm256_setzero_si256()};
  }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors1(p, sizeof(Block), count); }
};

}  // namespace
}  // namespace ft
#endif
