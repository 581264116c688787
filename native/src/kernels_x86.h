// kernels_x86.h - kernels written with AVX2 vectors, compiled by kernels_avx2.cpp and, with VNNI's dot products in
// three places, by kernels_avx512.cpp. They give the bits of kernels_common.h.
//
// The blocks of a row are taken eight at a time. Each leaves vectors of partial int32 sums; fold8 turns the eight
// into one vector of eight block sums, so that lane = block index mod 8, as lanes8 wants it. NT activations share
// one reading of the row.
#ifndef FT_KERNELS_X86_H
#define FT_KERNELS_X86_H
#include <immintrin.h>

#include "kernels_common.h"

namespace ft {
namespace {

using I8 = __m256i;
using F8 = __m256;

// Calls inside a row would spill its registers; the compiler's own limits stop it from inlining everything.
#define FT_INLINE inline __attribute__((always_inline))

constexpr int kAhead = 1536;  // bytes of weights asked for ahead of their use

FT_INLINE I8 load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
FT_INLINE __m128i load16(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }

template <int kBytes>
FT_INLINE void prefetch(const void *p) {
  for (int i = 0; i < kBytes; i += 64) _mm_prefetch(static_cast<const char *>(p) + kAhead + i, _MM_HINT_T0);
}

FT_INLINE uint32_t word32(const void *p) {
  uint32_t u;
  std::memcpy(&u, p, 4);
  return u;
}

FT_INLINE int word16(const void *p) {
  uint16_t u;
  std::memcpy(&u, p, 2);
  return u;
}

// --- the three places where VNNI helps ------------------------------------------------------------------------

// Sums over quadruples of (256 * u*hi) + u*lo; u unsigned, planes signed.
FT_INLINE I8 dot_planes(I8 u, I8 hi, I8 lo) {
#ifdef __AVX512VNNI__
  const I8 h = _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, hi);
  return _mm256_dpbusd_epi32(_mm256_slli_epi32(h, 8), u, lo);
#else
  const I8 h = _mm256_madd_epi16(_mm256_maddubs_epi16(u, hi), _mm256_set1_epi16(256));
  return _mm256_add_epi32(h, _mm256_madd_epi16(_mm256_maddubs_epi16(u, lo), _mm256_set1_epi16(1)));
#endif
}

FT_INLINE I8 dot_plane(I8 u, I8 a) {
#ifdef __AVX512VNNI__
  return _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, a);
#else
  return _mm256_madd_epi16(_mm256_maddubs_epi16(u, a), _mm256_set1_epi16(1));
#endif
}

// sum + sc * (u*a), sc int16 for each pair of products; a pair is at most 128 * 127 * 2 < 2^15.
FT_INLINE I8 add_scaled(I8 sum, I8 u, I8 a, I8 sc) {
#ifdef __AVX512VNNI__
  return _mm256_dpwssd_epi32(sum, _mm256_maddubs_epi16(u, a), sc);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, a), sc));
#endif
}

// --- folds ----------------------------------------------------------------------------------------------------

FT_INLINE I8 fold2(I8 a, I8 b) { return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); }
FT_INLINE I8 fold4(I8 ab, I8 cd) {
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// Lane i of the result is the sum of the lanes of v[i].
FT_INLINE I8 fold8(const I8 *v) {
  const I8 low = fold4(fold2(v[0], v[1]), fold2(v[2], v[3]));
  const I8 high = fold4(fold2(v[4], v[5]), fold2(v[6], v[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

FT_INLINE float tree8(F8 v) {
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));  // l0+l4, l1+l5, l2+l6, l3+l7
  const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

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

FT_INLINE Factors factors_e8m0(const uint8_t *p, int step, int count) {
  alignas(32) float d[8] = {};
  for (int i = 0; i < count; ++i) d[i] = e8m0_half_float(p[i * step]);
  return {_mm256_load_ps(d), _mm256_setzero_ps()};
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

// kCommon types are also compiled for several tokens at a time.
struct VecQ4_0 : FormQ4_0 {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = true;
  FT_INLINE static I8 bytes(const Block &b) { return _mm256_sub_epi8(nibbles16(b.qs), _mm256_set1_epi8(8)); }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors1(p, sizeof(Block), count); }
};
struct VecQ4_1 : FormQ4_1 {
  static constexpr bool kCommon = true;
  static constexpr bool kSigned = false;
  FT_INLINE static I8 bytes(const Block &b) { return nibbles16(b.qs); }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors2(p, sizeof(Block), count); }
};
struct VecQ5_0 : FormQ5_0 {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = true;
  FT_INLINE static I8 bytes(const Block &b) {
    return _mm256_sub_epi8(_mm256_or_si256(nibbles16(b.qs), fifth_bits(b.qh)), _mm256_set1_epi8(16));
  }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors1(p, sizeof(Block), count); }
};
struct VecQ5_1 : FormQ5_1 {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = false;
  FT_INLINE static I8 bytes(const Block &b) { return _mm256_or_si256(nibbles16(b.qs), fifth_bits(b.qh)); }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors2(p, sizeof(Block), count); }
};
struct VecQ8_0 : FormQ8_0 {
  static constexpr bool kCommon = true;
  static constexpr bool kSigned = true;
  FT_INLINE static I8 bytes(const Block &b) { return load(b.qs); }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors1(p, sizeof(Block), count); }
};
struct VecIQ4_NL : FormIQ4_NL {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = true;
  FT_INLINE static I8 bytes(const Block &b) { return lookup(kTableIQ4, nibbles16(b.qs)); }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors1(p, sizeof(Block), count); }
};
struct VecMXFP4 : FormMXFP4 {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = true;
  FT_INLINE static I8 bytes(const Block &b) { return lookup(kTableMXFP4, nibbles16(b.qs)); }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors_e8m0(p, sizeof(Block), count); }
};

// The partial sums of one block. Signed integers move their sign to the planes, which hold no -128.
template <class Vec, int kPlanes>
FT_INLINE I8 block_sums(I8 n, const Act32 &a) {
  I8 hi = load(a.hi), lo = _mm256_setzero_si256();
  if (kPlanes == 2) lo = load(a.lo);
  I8 u = n;
  if (Vec::kSigned) {
    u = _mm256_abs_epi8(n);
    hi = _mm256_sign_epi8(hi, n);
    if (kPlanes == 2) lo = _mm256_sign_epi8(lo, n);
  }
  return kPlanes == 2 ? dot_planes(u, hi, lo) : dot_plane(u, hi);
}

// Where a group of eight blocks stands: its weights, how many blocks there are, and the activations that they meet.
template <class Act, int NT>
struct Group {
  const uint8_t *w;
  int count;
  int64_t first, nb;      // the first block's place in the row; places wrap at nb
  const Act *act[NT];
  const float *dx[NT], *sx[NT];  // of the eight places from `first` on
};

// What is known of a group when it is compiled: eight blocks of one row, eight across the end of a row, or fewer.
enum Shape { kStraight, kWrapping, kPartial };

// Terms of a group, one a lane; lanes from `count` on give +0.
template <class Vec, int NT, int kPlanes, Shape kShape>
FT_INLINE void terms_32(const Group<Act32, NT> &g, F8 *terms) {
  using Block = typename Vec::Block;
  const int count = kShape == kPartial ? g.count : 8;
  prefetch<8 * sizeof(Block)>(g.w);
  I8 v[NT][8];
  int64_t place = g.first;
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    const I8 n = Vec::bytes(reinterpret_cast<const Block *>(g.w)[i]);
#pragma GCC unroll 4
    for (int t = 0; t < NT; ++t) v[t][i] = block_sums<Vec, kPlanes>(n, g.act[t][place]);
    ++place;
    if (kShape != kStraight && place == g.nb) place = 0;
  }
  const Factors f = Vec::factors(g.w, count);
  for (int t = 0; t < NT; ++t) {
    for (int i = count; i < 8; ++i) v[t][i] = _mm256_setzero_si256();
    const F8 s = _mm256_cvtepi32_ps(fold8(v[t]));
    terms[t] = _mm256_mul_ps(_mm256_mul_ps(f.d, _mm256_loadu_ps(g.dx[t])), s);
    if (Vec::kHasMin) terms[t] = _mm256_add_ps(terms[t], _mm256_mul_ps(f.m, _mm256_loadu_ps(g.sx[t])));
  }
}

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
// values a step: parts(b, s, out) fills kPart vectors of 32 values, s-th of 8 / kPart.
struct VecQ4_K : FormQ4_K {
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

struct VecQ5_K : FormQ5_K {
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

struct VecQ6_K : FormQ6_K {
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

struct VecQ2_K : FormQ2_K {
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

struct VecQ3_K : FormQ3_K {
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
    const uint32_t a = word32(b.scales), c = word32(b.scales + 4), h = word32(b.scales + 8);
    const uint32_t s0 = (a & 0x0f0f0f0f) | ((h << 4) & 0x30303030);
    const uint32_t s1 = (c & 0x0f0f0f0f) | ((h << 2) & 0x30303030);
    const uint32_t s2 = ((a >> 4) & 0x0f0f0f0f) | (h & 0x30303030);
    const uint32_t s3 = ((c >> 4) & 0x0f0f0f0f) | ((h >> 2) & 0x30303030);
    const __m128i s = _mm_setr_epi32(int(s0), int(s1), int(s2), int(s3));
    return {even_odd(_mm_sub_epi8(s, _mm_set1_epi8(32))), _mm256_setzero_si256()};
  }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors1(p + 108, sizeof(Block), count); }
};

struct VecIQ4_XS : FormIQ4_XS {
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

// Partial sums of one block: the two planes, and M of the types with minimums.
struct Sums {
  I8 hi[8], lo[8], m[8];
};

// The minimums' part. Q2_K has 16 of them, the others 8.
template <class Vec, int kPlanes>
FT_INLINE I8 min_sums(I8 mn, const Act256 &a) {
  if constexpr (Vec::kPart == 4) {
    const I8 hi = _mm256_madd_epi16(mn, load(a.sum16[0]));
    return kPlanes == 2 ? _mm256_add_epi32(_mm256_slli_epi32(hi, 8), _mm256_madd_epi16(mn, load(a.sum16[1]))) : hi;
  } else {
    const I8 both = _mm256_madd_epi16(mn, load(a.sum32));
    return kPlanes == 2 ? _mm256_sllv_epi32(both, _mm256_setr_epi32(8, 8, 8, 8, 0, 0, 0, 0)) : both;
  }
}

template <class Vec>
FT_INLINE I8 unbias(I8 sum, I8 sc, const int16_t *sums) {
  if (Vec::kBias == 0) return sum;
  const I8 extra = _mm256_madd_epi16(sc, load(sums));
  return _mm256_sub_epi32(sum, _mm256_slli_epi32(extra, Vec::kBias == 32 ? 5 : 2));
}

template <class Vec>
FT_INLINE I8 add_plane(I8 sum, I8 n, const int8_t *plane, I8 sc) {
  if (Vec::kSigned) return add_scaled(sum, _mm256_abs_epi8(n), _mm256_sign_epi8(load(plane), n), sc);
  return add_scaled(sum, n, load(plane), sc);
}

template <class Vec, int NT, int kPlanes>
FT_INLINE void block_256(const typename Vec::Block &w, const Act256 *const *a, Sums *sums, int i) {
  const VecScales s = Vec::scales(w);
  I8 hi[NT], lo[NT];
  for (int t = 0; t < NT; ++t) hi[t] = lo[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int step = 0; step < 8 / Vec::kPart; ++step) {
    I8 n[Vec::kPart];
    Vec::parts(w, step, n);
#pragma GCC unroll 4
    for (int part = 0; part < Vec::kPart; ++part) {
      const int j = step * Vec::kPart + part;
      const I8 sc = spread_scale(s.sc, j);
      for (int t = 0; t < NT; ++t) {
        hi[t] = add_plane<Vec>(hi[t], n[part], a[t]->hi + 32 * j, sc);
        if (kPlanes == 2) lo[t] = add_plane<Vec>(lo[t], n[part], a[t]->lo + 32 * j, sc);
      }
    }
  }
  for (int t = 0; t < NT; ++t) {
    sums[t].hi[i] = unbias<Vec>(hi[t], s.sc, a[t]->sum16[0]);
    if (kPlanes == 2) sums[t].lo[i] = unbias<Vec>(lo[t], s.sc, a[t]->sum16[1]);
    if (Vec::kHasMin) sums[t].m[i] = min_sums<Vec, kPlanes>(s.mn, *a[t]);
  }
}

template <class Vec, int kPlanes>
FT_INLINE F8 term_256(const Sums &s, const Factors &f, F8 dx) {
  F8 sum = _mm256_cvtepi32_ps(fold8(s.hi));
  if (kPlanes == 2) {
    sum = _mm256_add_ps(_mm256_mul_ps(sum, _mm256_set1_ps(256.0f)), _mm256_cvtepi32_ps(fold8(s.lo)));
  }
  F8 term = _mm256_mul_ps(_mm256_mul_ps(f.d, dx), sum);
  if (Vec::kHasMin) {
    const F8 m = _mm256_cvtepi32_ps(fold8(s.m));
    term = _mm256_sub_ps(term, _mm256_mul_ps(_mm256_mul_ps(f.m, dx), m));
  }
  return term;
}

template <class Vec, int NT, int kPlanes, Shape kShape>
FT_INLINE void terms_256(const Group<Act256, NT> &g, F8 *terms) {
  using Block = typename Vec::Block;
  const int count = kShape == kPartial ? g.count : 8;
  Sums sums[NT];
  int64_t place = g.first;
  for (int i = 0; i < count; ++i) {
    const Block &w = reinterpret_cast<const Block *>(g.w)[i];
    prefetch<sizeof(Block)>(&w);
    const Act256 *a[NT];
    for (int t = 0; t < NT; ++t) a[t] = g.act[t] + place;
    block_256<Vec, NT, kPlanes>(w, a, sums, i);
    ++place;
    if (kShape != kStraight && place == g.nb) place = 0;
  }
  const Factors f = Vec::factors(g.w, count);
  for (int t = 0; t < NT; ++t) {
    for (int i = count; i < 8; ++i) sums[t].hi[i] = sums[t].lo[i] = sums[t].m[i] = _mm256_setzero_si256();
    terms[t] = term_256<Vec, kPlanes>(sums[t], f, _mm256_loadu_ps(g.dx[t]));
  }
}

// --- rows and tokens --------------------------------------------------------------------------------------------

struct Matrix {
  const uint8_t *w;
  int64_t row_bytes, nb, row0, row1;
};

template <class Vec, int NT, int kPlanes, Shape kShape>
FT_INLINE void terms_of(const Group<Act32, NT> &g, F8 *terms) {
  terms_32<Vec, NT, kPlanes, kShape>(g, terms);
}
template <class Vec, int NT, int kPlanes, Shape kShape>
FT_INLINE void terms_of(const Group<Act256, NT> &g, F8 *terms) {
  terms_256<Vec, NT, kPlanes, kShape>(g, terms);
}

template <class Act>
constexpr int kClassOf = sizeof(Act) == sizeof(Act32) ? 32 : 256;

// Row by row: lanes of a group are the lanes of lanes8.
template <class Vec, class Act, int NT, int kPlanes>
inline void rows_apart(const Matrix &m, const void *const *act, float *const *out) {
  Group<Act, NT> g;
  g.nb = m.nb;
  for (int64_t r = m.row0; r < m.row1; ++r) {
    F8 sum[NT], terms[NT];
    g.w = m.w + r * m.row_bytes;
    for (int t = 0; t < NT; ++t) {
      sum[t] = _mm256_setzero_ps();
      g.act[t] = static_cast<const Act *>(act[t]);
      g.dx[t] = act_scales(act[t], kClassOf<Act>, m.nb);
      g.sx[t] = g.dx[t] + pad8(m.nb);
    }
    for (g.first = 0; g.first < m.nb; g.first += 8) {
      g.count = m.nb - g.first < 8 ? int(m.nb - g.first) : 8;
      if (g.count == 8) {
        terms_of<Vec, NT, kPlanes, kStraight>(g, terms);
      } else {
        terms_of<Vec, NT, kPlanes, kPartial>(g, terms);
      }
      g.w += 8 * sizeof(typename Vec::Block);
      for (int t = 0; t < NT; ++t) {
        sum[t] = _mm256_add_ps(sum[t], terms[t]);
        g.dx[t] += 8;
        g.sx[t] += 8;
      }
    }
    for (int t = 0; t < NT; ++t) out[t][r] = tree8(sum[t]);
  }
}

constexpr int kMaxStrip = 248;  // blocks of a row that rows_together takes
alignas(32) static const int32_t kWindow[24] = {0,  0,  0,  0,  0, 0, 0, 0, -1, -1, -1, -1,
                                                -1, -1, -1, -1, 0, 0, 0, 0, 0,  0,  0,  0};
alignas(32) static const int32_t kRotate[16] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};

// Lanes [from, to) of v moved `shift` lanes up, round the end; +0 elsewhere.
FT_INLINE F8 segment(F8 v, int from, int to, int shift) {
  const I8 mask = _mm256_and_si256(load(kWindow + 8 - from), load(kWindow + 16 - to));
  return _mm256_permutevar8x32_ps(_mm256_and_ps(v, _mm256_castsi256_ps(mask)), load(kRotate + ((8 - shift) & 7)));
}

// Scales of a token, and again from the start for another eight places.
template <class Act>
inline void wrapped_scales(const void *act, int64_t nb, float *dx, float *sx) {
  const float *from = act_scales(act, kClassOf<Act>, nb);
  std::memcpy(dx, from, size_t(nb) * 4);
  for (int64_t i = nb; i < nb + 8; ++i) dx[i] = dx[i - nb];
  if (kClassOf<Act> != 32) return;
  std::memcpy(sx, from + pad8(nb), size_t(nb) * 4);
  for (int64_t i = nb; i < nb + 8; ++i) sx[i] = sx[i - nb];
}

// Rows whose blocks do not fill groups of eight lie one behind the other, so groups run on across their ends; each
// row's part of a group is moved to the lanes where it belongs.
template <class Vec, class Act, int NT, int kPlanes>
inline void rows_together(const Matrix &m, const void *const *act, float *const *out) {
  float dx[NT][kMaxStrip + 8], sx[NT][kMaxStrip + 8];
  F8 sum[NT], terms[NT];
  Group<Act, NT> g;
  for (int t = 0; t < NT; ++t) {
    wrapped_scales<Act>(act[t], m.nb, dx[t], sx[t]);
    sum[t] = _mm256_setzero_ps();
    g.act[t] = static_cast<const Act *>(act[t]);
  }
  g.w = m.w + m.row0 * m.row_bytes;
  g.nb = m.nb;
  int64_t place = 0, row = m.row0;
  for (int64_t left = (m.row1 - m.row0) * m.nb; left > 0; left -= 8) {
    g.count = left < 8 ? int(left) : 8;
    g.first = place;
    for (int t = 0; t < NT; ++t) {
      g.dx[t] = dx[t] + place;
      g.sx[t] = sx[t] + place;
    }
    if (g.count == 8 && place + 8 <= m.nb) {
      terms_of<Vec, NT, kPlanes, kStraight>(g, terms);
    } else if (g.count == 8 && NT == 1) {
      terms_of<Vec, NT, kPlanes, NT == 1 ? kWrapping : kPartial>(g, terms);
    } else {
      terms_of<Vec, NT, kPlanes, kPartial>(g, terms);
    }
    g.w += 8 * sizeof(typename Vec::Block);
    for (int at = 0; at < g.count;) {
      const int64_t rest = m.nb - place;
      const int to = rest < g.count - at ? at + int(rest) : g.count;
      for (int t = 0; t < NT; ++t) {
        sum[t] = _mm256_add_ps(sum[t], segment(terms[t], at, to, int(place - at) & 7));
      }
      place += to - at;
      at = to;
      if (place == m.nb) {
        for (int t = 0; t < NT; ++t) {
          out[t][row] = tree8(sum[t]);
          sum[t] = _mm256_setzero_ps();
        }
        place = 0;
        ++row;
      }
    }
  }
}

template <class Vec, class Act, int NT, int kPlanes>
inline void rows_tokens(const Matrix &m, const void *const *act, float *const *out) {
  const bool contiguous = m.row_bytes == m.nb * int64_t(sizeof(typename Vec::Block));
  if (m.nb % 8 != 0 && m.nb <= kMaxStrip && contiguous) {
    rows_together<Vec, Act, NT, kPlanes>(m, act, out);
  } else {
    rows_apart<Vec, Act, NT, kPlanes>(m, act, out);
  }
}

// Rows that stay in the nearest cache while several batches of tokens take them.
constexpr int64_t kStripBytes = 16384;

template <class Vec, class Act, int kPlanes>
inline void matvec_planes(const Matrix &all, const void *const *act, int n, float *const *out) {
  Matrix m = all;
  const int64_t step = n == 1 ? all.row1 - all.row0 : 1 + kStripBytes / all.row_bytes;
  for (m.row0 = all.row0; m.row0 < all.row1; m.row0 = m.row1) {
    m.row1 = m.row0 + step < all.row1 ? m.row0 + step : all.row1;
    int t = 0;
    if constexpr (Vec::kCommon && kPlanes == 2) {
      for (; t + 4 <= n; t += 4) rows_tokens<Vec, Act, 4, kPlanes>(m, act + t, out + t);
      for (; t + 2 <= n; t += 2) rows_tokens<Vec, Act, 2, kPlanes>(m, act + t, out + t);
    }
    for (; t < n; ++t) rows_tokens<Vec, Act, 1, kPlanes>(m, act + t, out + t);
  }
}

template <class Vec, class Act>
inline void matvec_vec(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                       const void *const *act, int n, int planes, float *const *out) {
  const Matrix m = {w, row_bytes, n_cols / kClassOf<Act>, row0, row1};
  if (planes == 2) {
    matvec_planes<Vec, Act, 2>(m, act, n, out);
  } else {
    matvec_planes<Vec, Act, 1>(m, act, n, out);
  }
}

// --- floats ---------------------------------------------------------------------------------------------------

struct VecF32 : WidenF32 {
  static F8 get8(const float *p) { return _mm256_loadu_ps(p); }
};
struct VecF16 : WidenF16 {
  static F8 get8(const uint16_t *p) { return _mm256_cvtph_ps(load16(p)); }
};
struct VecBF16 : WidenBF16 {
  static F8 get8(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
  }
};

// lanes32 as four vectors of lanes; the first fold of lanes32 leaves v.
template <class Vec, int NT>
FT_INLINE void dot_lanes(const typename Vec::Word *w, const float *const *x, int64_t n, F8 *v) {
  F8 l[NT][4];
  for (int t = 0; t < NT; ++t) {
    for (int j = 0; j < 4; ++j) l[t][j] = _mm256_setzero_ps();
  }
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    prefetch<32 * sizeof(typename Vec::Word)>(w + i);
    for (int j = 0; j < 4; ++j) {
      const F8 a = Vec::get8(w + i + 8 * j);
      for (int t = 0; t < NT; ++t) {
        l[t][j] = _mm256_add_ps(l[t][j], _mm256_mul_ps(a, _mm256_loadu_ps(x[t] + i + 8 * j)));
      }
    }
  }
  if (i < n) {
    typename Vec::Word wt[32] = {};
    std::memcpy(wt, w + i, size_t(n - i) * sizeof(typename Vec::Word));
    for (int t = 0; t < NT; ++t) {
      float xt[32] = {};
      std::memcpy(xt, x[t] + i, size_t(n - i) * 4);
      for (int j = 0; j < 4; ++j) {
        l[t][j] = _mm256_add_ps(l[t][j], _mm256_mul_ps(Vec::get8(wt + 8 * j), _mm256_loadu_ps(xt + 8 * j)));
      }
    }
  }
  for (int t = 0; t < NT; ++t) {
    v[t] = _mm256_add_ps(_mm256_add_ps(l[t][0], l[t][2]), _mm256_add_ps(l[t][1], l[t][3]));
  }
}

template <class Vec, int NT>
inline void float_tokens(const uint8_t *row, int64_t n_cols, const void *const *act, float *const *out, int64_t r) {
  const float *x[NT];
  F8 v[NT];
  for (int t = 0; t < NT; ++t) x[t] = static_cast<const float *>(act[t]);
  dot_lanes<Vec, NT>(reinterpret_cast<const typename Vec::Word *>(row), x, n_cols, v);
  for (int t = 0; t < NT; ++t) out[t][r] = tree8(v[t]);
}

template <class Vec>
inline void matvec_float_vec(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                             const void *const *act, int n, int, float *const *out) {
  for (int64_t r = row0; r < row1; ++r) {
    const uint8_t *row = w + r * row_bytes;
    int t = 0;
    for (; t + 2 <= n; t += 2) float_tokens<Vec, 2>(row, n_cols, act + t, out + t, r);
    if (t < n) float_tokens<Vec, 1>(row, n_cols, act + t, out + t, r);
  }
}

inline float dot_f32_vec(const float *a, const float *b, int64_t n) {
  F8 v;
  dot_lanes<VecF32, 1>(a, &b, n, &v);
  return tree8(v);
}

inline float sumsq_vec(const float *x, int64_t n) { return dot_f32_vec(x, x, n); }

inline F8 halves(F8 a, F8 b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline F8 quarters(F8 ab, F8 cd) {
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

// tree8 of eight vectors at once.
FT_INLINE F8 tree8_of8(const F8 *v) {
  const F8 a = quarters(halves(v[0], v[1]), halves(v[2], v[3]));  // v0 v2 | v1 v3, even and odd halves of each
  const F8 b = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
  const F8 s = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));  // 0 2 4 6 | 1 3 5 7
  return _mm256_permutevar8x32_ps(s, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <class Vec>
inline void dots_vec(const float *q, const typename Vec::Word *k, int64_t dim, int64_t n, float *s) {
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    F8 v[8];
    for (int i = 0; i < 8; ++i) dot_lanes<Vec, 1>(k + (j + i) * dim, &q, dim, v + i);
    _mm256_storeu_ps(s + j, tree8_of8(v));
  }
  for (; j < n; ++j) {
    F8 v;
    dot_lanes<Vec, 1>(k + j * dim, &q, dim, &v);
    s[j] = tree8(v);
  }
}

// kVectors * 8 columns from v on, kept in registers over all rows.
template <class Vec, int kVectors>
inline void wsum_columns(const float *p, const typename Vec::Word *v, int64_t dim, int64_t n, float *o) {
  F8 sum[kVectors];
  for (int i = 0; i < kVectors; ++i) sum[i] = _mm256_setzero_ps();
  for (int64_t j = 0; j < n; ++j) {
    const F8 f = _mm256_broadcast_ss(p + j);
    for (int i = 0; i < kVectors; ++i) {
      sum[i] = _mm256_add_ps(sum[i], _mm256_mul_ps(f, Vec::get8(v + j * dim + 8 * i)));
    }
  }
  for (int i = 0; i < kVectors; ++i) _mm256_storeu_ps(o + 8 * i, sum[i]);
}

template <class Vec>
inline void wsum_vec(const float *p, const typename Vec::Word *v, int64_t dim, int64_t n, float *o) {
  int64_t c = 0;
  for (; c + 64 <= dim; c += 64) wsum_columns<Vec, 8>(p, v + c, dim, n, o + c);
  for (; c + 8 <= dim; c += 8) wsum_columns<Vec, 1>(p, v + c, dim, n, o + c);
  for (; c < dim; ++c) {
    float sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += p[j] * Vec::get(v[j * dim + c]);
    o[c] = sum;
  }
}

inline void to_f16_vec(const float *x, uint16_t *y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(y + i), h);
  }
  for (; i < n; ++i) y[i] = float_half(x[i]);
}

inline void decode_f16_vec(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const uint16_t *>(src);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, VecF16::get8(w + i));
  for (; i < n; ++i) dst[i] = half_float(w[i]);
}

// --- rows of weights in fp32 ----------------------------------------------------------------------------------

FT_INLINE F8 floats8(const int8_t *n) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(n))));
}

// dst[0..count) = (d * n) + m, or - m, or d * n.
template <int kSign>
FT_INLINE void affine(const int8_t *n, float d, float m, float *dst, int count) {
  const F8 dv = _mm256_set1_ps(d), mv = _mm256_set1_ps(m);
  for (int i = 0; i < count; i += 8) {
    F8 y = _mm256_mul_ps(dv, floats8(n + i));
    if (kSign > 0) y = _mm256_add_ps(y, mv);
    if (kSign < 0) y = _mm256_sub_ps(y, mv);
    _mm256_storeu_ps(dst + i, y);
  }
}

template <class Vec>
inline void decode_32_vec(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const typename Vec::Block *>(src);
  for (int64_t b = 0; b < n / 32; ++b) {
    alignas(32) int8_t q[32];
    _mm256_store_si256(reinterpret_cast<__m256i *>(q), Vec::bytes(w[b]));
    affine<Vec::kHasMin ? 1 : 0>(q, Vec::d(w[b]), Vec::m(w[b]), dst + 32 * b, 32);
  }
}

template <class Form, class Vec>
inline void decode_256_vec(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const typename Vec::Block *>(src);
  for (int64_t b = 0; b < n / 256; ++b) {
    alignas(32) int8_t q[256];
    for (int step = 0; step < 8 / Vec::kPart; ++step) {
      I8 part[Vec::kPart];
      Vec::parts(w[b], step, part);
      for (int i = 0; i < Vec::kPart; ++i) {
        _mm256_store_si256(reinterpret_cast<__m256i *>(q + 32 * (step * Vec::kPart + i)),
                           _mm256_sub_epi8(part[i], _mm256_set1_epi8(Vec::kBias)));
      }
    }
    Scales s = {};
    Form::scales(w[b], s);
    const float d = Vec::d(w[b]), dmin = Vec::dmin(w[b]);
    for (int j = 0; j < 16; ++j) {
      affine<Vec::kHasMin ? -1 : 0>(q + 16 * j, d * float(s.sc[j]), dmin * float(s.mn[j]), dst + 256 * b + 16 * j, 16);
    }
  }
}

// --- functions ------------------------------------------------------------------------------------------------

FT_INLINE F8 exp8(F8 x) {
  const F8 one = _mm256_set1_ps(1.0f), round = _mm256_set1_ps(kRound);
  const F8 top = _mm256_min_ps(_mm256_set1_ps(88.0f), x);  // a NaN in x stays
  const F8 shifted = _mm256_add_ps(_mm256_mul_ps(top, _mm256_set1_ps(1.44269504088896341f)), round);
  const F8 k = _mm256_sub_ps(shifted, round);
  const F8 r = _mm256_sub_ps(_mm256_sub_ps(top, _mm256_mul_ps(k, _mm256_set1_ps(0.693359375f))),
                             _mm256_mul_ps(k, _mm256_set1_ps(-2.12194440e-4f)));
  F8 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(5.0000001201e-1f));
  const F8 y = _mm256_add_ps(_mm256_add_ps(_mm256_mul_ps(p, _mm256_mul_ps(r, r)), r), one);
  const I8 n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(int(kRoundBits) - 127));
  const F8 power = _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
  const F8 under = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
  return _mm256_andnot_ps(under, _mm256_mul_ps(y, power));
}

inline F8 negate(F8 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

// x / (1 + exp(-u))
FT_INLINE F8 gated(F8 x, F8 u) { return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(negate(u)))); }

struct MapExpMinus {
  F8 m;
  F8 operator()(F8 x, F8) const { return exp8(_mm256_sub_ps(x, m)); }
};
struct MapSigmoid {
  F8 operator()(F8 x, F8) const { return gated(_mm256_set1_ps(1.0f), x); }
};
struct MapSilu {
  F8 operator()(F8 g, F8 u) const { return _mm256_mul_ps(gated(g, g), u); }
};
struct MapGelu {
  F8 operator()(F8 g, F8 u) const {
    const F8 cubic = _mm256_mul_ps(_mm256_set1_ps(0.07135481627159992f), _mm256_mul_ps(g, g));
    const F8 v = _mm256_mul_ps(g, _mm256_add_ps(_mm256_set1_ps(1.5957691216057308f), cubic));
    return _mm256_mul_ps(gated(g, v), u);
  }
};

template <class Map>
inline void map8(const Map &map, const float *a, const float *b, float *y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, map(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
  if (i < n) {
    alignas(32) float at[8] = {}, bt[8] = {};
    std::memcpy(at, a + i, size_t(n - i) * 4);
    std::memcpy(bt, b + i, size_t(n - i) * 4);
    _mm256_store_ps(at, map(_mm256_load_ps(at), _mm256_load_ps(bt)));
    std::memcpy(y + i, at, size_t(n - i) * 4);
  }
}

inline void exp_minus_vec(const float *x, float m, float *y, int64_t n) {
  map8(MapExpMinus{_mm256_set1_ps(m)}, x, x, y, n);
}
inline void sigmoid_vec(const float *x, float *y, int64_t n) { map8(MapSigmoid{}, x, x, y, n); }
inline void silu_mul_vec(const float *g, const float *u, float *y, int64_t n) { map8(MapSilu{}, g, u, y, n); }
inline void gelu_mul_vec(const float *g, const float *u, float *y, int64_t n) { map8(MapGelu{}, g, u, y, n); }

// --- the table ------------------------------------------------------------------------------------------------

template <class Vec>
inline void set_vec_32(Kernels &k, int type) {
  k.matvec[type] = matvec_vec<Vec, Act32>;
  k.decode_row[type] = decode_32_vec<Vec>;
}

template <class Form, class Vec>
inline void set_vec_256(Kernels &k, int type) {
  k.matvec[type] = matvec_vec<Vec, Act256>;
  k.decode_row[type] = decode_256_vec<Form, Vec>;
}

inline Kernels x86_table(const char *name) {
  Kernels k = common_table(name);
  set_vec_32<VecQ4_0>(k, Q4_0);
  set_vec_32<VecQ4_1>(k, Q4_1);
  set_vec_32<VecQ5_0>(k, Q5_0);
  set_vec_32<VecQ5_1>(k, Q5_1);
  set_vec_32<VecQ8_0>(k, Q8_0);
  set_vec_32<VecIQ4_NL>(k, IQ4_NL);
  set_vec_32<VecMXFP4>(k, MXFP4);
  set_vec_256<FormQ2_K, VecQ2_K>(k, Q2_K);
  set_vec_256<FormQ3_K, VecQ3_K>(k, Q3_K);
  set_vec_256<FormQ4_K, VecQ4_K>(k, Q4_K);
  set_vec_256<FormQ5_K, VecQ5_K>(k, Q5_K);
  set_vec_256<FormQ6_K, VecQ6_K>(k, Q6_K);
  set_vec_256<FormIQ4_XS, VecIQ4_XS>(k, IQ4_XS);
  k.matvec[F32] = matvec_float_vec<VecF32>;
  k.matvec[F16] = matvec_float_vec<VecF16>;
  k.matvec[BF16] = matvec_float_vec<VecBF16>;
  k.decode_row[F16] = decode_f16_vec;
  k.dot_f32 = dot_f32_vec;
  k.sumsq = sumsq_vec;
  k.dots_f32 = dots_vec<VecF32>;
  k.dots_f16 = dots_vec<VecF16>;
  k.wsum_f32 = wsum_vec<VecF32>;
  k.wsum_f16 = wsum_vec<VecF16>;
  k.exp_minus = exp_minus_vec;
  k.sigmoid = sigmoid_vec;
  k.silu_mul = silu_mul_vec;
  k.gelu_mul = gelu_mul_vec;
  k.to_f16 = to_f16_vec;
  return k;
}

}  // namespace
}  // namespace ft
#endif
