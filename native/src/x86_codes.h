// x86_codes.h - the IQ2 and IQ3 types where the processor permutes bytes of whole registers (AVX512-VBMI) and
// multiplies matrices of bits (GFNI), with arranged activations (x86_arranged.h).
//
// Code words are looked up 64 at a time as packed levels, from tables that pass through registers. An 8x8 transposition
// of bits (the product of a matrix of bytes with single bits) brings signs and, of the IQ2 types, levels of a value
// together in one byte; one permutation turns that byte into 64 + the value.
#ifndef FT_X86_CODES_H
#define FT_X86_CODES_H
#include "x86_arranged.h"
#include "x86_vectors512.h"

#ifdef __AVX512VBMI__

namespace ft {
namespace {

FT_INLINE I16 all64(uint64_t v) { return _mm512_set1_epi64(int64_t(v)); }

// --- code words ---------------------------------------------------------------------------------------------------

// Packed words, low byte first, of the first and the second 8 places of each 16.
struct Words {
  I16 first, second;
};

// Places in a table: 64 lower bytes, and what is above them as masks.
struct Places {
  I16 low;
  __mmask64 bit8, bit9;
};

// Bytes of a table of 256 at 64 places.
FT_INLINE I16 bytes_at(const uint8_t *t, I16 at, __mmask64 bit7) {
  at = _mm512_mask2_permutex2var_epi8(load64(t), at, _knot_mask64(bit7), load64(t + 64));
  return _mm512_mask2_permutex2var_epi8(load64(t + 128), at, bit7, load64(t + 192));
}

template <int kCount>
FT_INLINE I16 bytes_at(const uint8_t *t, const Places &at, __mmask64 bit7) {
  constexpr int kHalf = kCount / 2;
  if constexpr (kCount == 256) {
    return bytes_at(t, at.low, bit7);
  } else {
    const __mmask64 upper = kCount == 512 ? at.bit8 : at.bit9;
    return _mm512_mask_blend_epi8(upper, bytes_at<kHalf>(t, at, bit7), bytes_at<kHalf>(t + kHalf, at, bit7));
  }
}

template <int kCount>
FT_INLINE Words words_at(const CodeBytes<kCount> &t, const Places &at) {
  const __mmask64 bit7 = _mm512_movepi8_mask(at.low);
  const I16 low = bytes_at<kCount>(t.low, at, bit7), high = bytes_at<kCount>(t.high, at, bit7);
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}

// --- signs and scales ---------------------------------------------------------------------------------------------

constexpr uint64_t kSingleBits = 0x8040201008040201;

// Bytes of seven signs -> eight.
FT_INLINE I16 even_signs64(I16 s) { return _mm512_gf2p8affine_epi64_epi8(s, all64(0x010204081020407f), 0); }

// 2s + 1 in each 32 bits, s at some bits of the quadword; `shifts` begin one bit lower.
FT_INLINE I16 odd_scales64(I16 words, I16 shifts) {
  const I16 moved = _mm512_multishift_epi64_epi8(shifts, words);
  return _mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(0x1e), _mm512_set1_epi32(1), 0xea);  // (a & b) | c
}

// Scales of the vectors 0, 1 and of the vectors 2, 3; the same where a scale is of 32 values.
struct LaneScales {
  I16 sc[2];
};

FT_INLINE LaneScales nibble_scales64(const uint8_t *p) {
  const I16 all = all64(word_at<uint64_t>(p));
  const I16 even = _mm512_setr_epi32(63, 63, 7, 7, 15, 15, 23, 23, 31, 31, 39, 39, 47, 47, 55, 55);
  const I16 odd = _mm512_setr_epi32(3, 3, 11, 11, 19, 19, 27, 27, 35, 35, 43, 43, 51, 51, 59, 59);
  return {{odd_scales64(all, even), odd_scales64(all, odd)}};
}

// --- values: 64 + n of four vectors ---------------------------------------------------------------------------------

// `words` holds four code words a lane, each a byte of lower and a byte of upper bits; `signs` has the signs of words
// 2, 3, 0, 1 in the bytes 2 to 5 of a lane. Byte b of a lane gives bit 7 - b of its values; the permutation reads the
// lower six, so that two words share a transposition.
FT_INLINE void values_iq2(I16 words, I16 signs, const LevelBytes &levels, I16 *n) {
  const I16 spread = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 1, 0, 0, 2, 3, 0, 0, 8, 9, 0, 0, 10, 11));
  const I16 first = _mm512_mask_shuffle_epi8(signs, 0xcccccccccccccccc, words, spread);
  const I16 second = _mm512_mask_blend_epi32(0xaaaa, signs, words);
  const I16 a = _mm512_gf2p8affine_epi64_epi8(all64(kSingleBits), first, 0);
  const I16 b = _mm512_gf2p8affine_epi64_epi8(all64(kSingleBits), second, 0);
  n[0] = _mm512_permutexvar_epi8(a, load64(levels.at[0]));
  n[1] = _mm512_permutexvar_epi8(a, load64(levels.at[1]));
  n[2] = _mm512_permutexvar_epi8(b, load64(levels.at[2]));
  n[3] = _mm512_permutexvar_epi8(b, load64(levels.at[3]));
}

// `w` holds code words 0 to 3 and 4 to 7 of each lane; byte k of `signs` has the sign of vector k in bit 3 - k.
FT_INLINE void values_iq3(const Words &w, I16 signs, const LevelBytes &levels, I16 *n) {
  const I16 even = all64(0x1613100d0603003d), odd = all64(0x3633302d2623201d), mask = _mm512_set1_epi8(0x38);
  const auto value = [&](I16 words, I16 shifts, I16 sign, int k) {
    const I16 level = _mm512_multishift_epi64_epi8(shifts, words);
    const I16 at = _mm512_ternarylogic_epi64(level, sign, mask, 0xe4);  // level where the mask is set
    return _mm512_permutexvar_epi8(at, load64(levels.at[k]));
  };
  n[0] = value(w.first, even, _mm512_srli_epi16(signs, 1), 0);
  n[1] = value(w.first, odd, signs, 1);
  n[2] = value(w.second, even, signs, 2);
  n[3] = value(w.second, odd, signs, 3);
}

// --- the types: what of two blocks is looked up together, and values and scales of one -----------------------------

// How many blocks' codes fill a register, the words of one block, and what the types have in common.
struct WideIQ2 {
  static constexpr int kBlocks = 2;
  FT_INLINE static I16 codes(const Words *w, int i) { return i & 1 ? w[i / 2].second : w[i / 2].first; }
};
struct WideIQ3 {
  static constexpr int kBlocks = 1;
  FT_INLINE static const Words &codes(const Words *w, int i) { return w[i]; }
};

template <bool kScaleOf16>
FT_INLINE void arrange_plane(const int8_t *from, int8_t (*to)[64], int32_t (*start)[16]) {
  for (int h = 0; h < 2; ++h) {
    const Quarters v = quarters_of(from + 128 * h);
    I8 minus[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int k = 0; k < 4; ++k) {
      store(to[k] + 32 * h, v.of[k]);
      I8 &sum = minus[kScaleOf16 ? k / 2 : 0];
      sum = _mm256_dpbusd_epi32(sum, _mm256_set1_epi8(kGridBias), v.of[k]);
    }
    store(start[0] + 8 * h, _mm256_sub_epi32(_mm256_setzero_si256(), minus[0]));
    if (kScaleOf16) store(start[1] + 8 * h, _mm256_sub_epi32(_mm256_setzero_si256(), minus[1]));
  }
}

template <class Base, class Codes, bool kOf16>
struct WideType : Base, Codes {
  using Vec = Base;
  static constexpr bool kScaleOf16 = kOf16;
  static constexpr int kTokens = 4;
  template <int kPlanes>
  FT_INLINE static void arrange(const Act256 &from, GridAct &to) {
    arrange_plane<kOf16>(from.hi, to.plane[0], to.start[0]);
    if (kPlanes == 2) arrange_plane<kOf16>(from.lo, to.plane[1], to.start[1]);
  }
};

struct WideIQ2_XXS : WideType<VecIQ2_XXS, WideIQ2, false> {
  static const auto &table() { return kGrids.packed_iq2_xxs; }
  FT_INLINE static Places places(const Block &a, const Block &b) {
    const __m512 qa = _mm512_castsi512_ps(load64(a.qs)), qb = _mm512_castsi512_ps(load64(b.qs));
    return {_mm512_castps_si512(_mm512_shuffle_ps(qa, qb, 0x88)), 0, 0};
  }
  FT_INLINE static void values(const Block &b, I16 words, I16 *n) {
    const I16 signs = _mm512_multishift_epi64_epi8(all64(0x00002720352e0000), load64(b.qs));
    values_iq2(words, even_signs64(signs), kGrids.levels_iq2_xxs, n);
  }
  FT_INLINE static LaneScales lane_scales(const Block &b) {
    const I16 s = odd_scales64(load64(b.qs), all64(0x0000003b0000003b));
    return {{s, s}};
  }
};

struct WideIQ2_XS : WideType<VecIQ2_XS, WideIQ2, true> {
  static const auto &table() { return kGrids.packed_iq2_xs; }
  FT_INLINE static Places places(const Block &a, const Block &b) {
    const I16 qa = load64(a.qs), qb = load64(b.qs), mask = _mm512_set1_epi16(255);
    const I16 at = _mm512_packus_epi16(_mm512_and_si512(qa, mask), _mm512_and_si512(qb, mask));
    const I16 bit8 = _mm512_packs_epi16(_mm512_slli_epi16(qa, 7), _mm512_slli_epi16(qb, 7));
    return {at, _mm512_movepi8_mask(bit8), 0};
  }
  FT_INLINE static void values(const Block &b, I16 words, I16 *n) {
    const I16 signs = _mm512_multishift_epi64_epi8(all64(0x0000190939290000), load64(b.qs));
    values_iq2(words, even_signs64(signs), kGrids.levels_iq2_xs, n);
  }
  FT_INLINE static LaneScales lane_scales(const Block &b) { return nibble_scales64(b.scales); }
};

struct WideIQ2_S : WideType<VecIQ2_S, WideIQ2, true> {
  static const auto &table() { return kGrids.packed_iq2_s; }
  static constexpr uint64_t kEvenBytes = 0x00ff00ff00ff00ff, kEvenBits = 0x5555555555555555;
  FT_INLINE static __mmask64 high_bits(uint64_t a, uint64_t b, uint64_t which) {
    return _pdep_u64(_pext_u64(a, which), kEvenBytes) | _pdep_u64(_pext_u64(b, which), ~kEvenBytes);
  }
  FT_INLINE static Places places(const Block &a, const Block &b) {
    const I16 at = _mm512_permutex2var_epi64(_mm512_castsi256_si512(load(a.qs)),
                                             _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                                             _mm512_castsi256_si512(load(b.qs)));
    const uint64_t ha = word_at<uint64_t>(a.qh), hb = word_at<uint64_t>(b.qh);
    return {at, high_bits(ha, hb, kEvenBits), high_bits(ha, hb, ~kEvenBits)};
  }
  FT_INLINE static void values(const Block &b, I16 words, I16 *n) {
    alignas(64) static const int16_t kPlace[32] = {0, 9,  8,  0, 0, 11, 10, 0, 0, 13, 12, 0, 0, 15, 14, 0,
                                                   0, 17, 16, 0, 0, 19, 18, 0, 0, 21, 20, 0, 0, 23, 22, 0};
    const I16 signs = _mm512_permutexvar_epi16(load64(kPlace), load64(b.signs - 16));  // to stay within the block
    values_iq2(words, signs, kGrids.levels_iq2_s, n);
  }
  FT_INLINE static LaneScales lane_scales(const Block &b) { return nibble_scales64(b.scales); }
};

// Codes of 64 places so that the first four of each 8 stand in the first 8 places of each 16.
FT_INLINE I16 halves_of_eights(const uint8_t *qs) { return _mm512_shuffle_epi32(load64(qs), _MM_PERM_ENUM(0xd8)); }

struct WideIQ3_XXS : WideType<VecIQ3_XXS, WideIQ3, false> {
  static const auto &table() { return kGrids.packed_iq3_xxs; }
  FT_INLINE static I16 twice_words(const Block &b) {
    const I16 place = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    return _mm512_permutexvar_epi32(place, load64(b.words - 32));
  }
  FT_INLINE static Places places(const Block &b) { return {halves_of_eights(b.qs), 0, 0}; }
  FT_INLINE static void values(const Block &b, const Words &w, I16 *n) {
    const I16 seven = _mm512_multishift_epi64_epi8(all64(0x150e070000000000), twice_words(b));
    const I16 single_bits_and_parity = all64(0x7f40201008040201);
    values_iq3(w, _mm512_gf2p8affine_epi64_epi8(single_bits_and_parity, seven, 0), kGrids.levels_iq3_xxs, n);
  }
  FT_INLINE static LaneScales lane_scales(const Block &b) {
    const I16 s = odd_scales64(twice_words(b), all64(0x0000001b0000001b));
    return {{s, s}};
  }
};

struct WideIQ3_S : WideType<VecIQ3_S, WideIQ3, false> {
  static const auto &table() { return kGrids.packed_iq3_s; }
  FT_INLINE static Places places(const Block &b) {
    const uint64_t h = word_at<uint64_t>(b.qh), moved = (h ^ (h >> 4)) & 0x00f000f000f000f0;
    return {halves_of_eights(b.qs), h ^ moved ^ (moved << 4), 0};
  }
  FT_INLINE static void values(const Block &b, const Words &w, I16 *n) {
    const I16 place = _mm512_setr_epi32(0, 7, 0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14);
    const I16 signs = _mm512_permutexvar_epi32(place, load64(b.signs - 28));
    values_iq3(w, _mm512_gf2p8affine_epi64_epi8(all64(kSingleBits), signs, 0), kGrids.levels_iq3_s, n);
  }
  FT_INLINE static LaneScales lane_scales(const Block &b) {
    const I16 shifts = _mm512_setr_epi32(63, 63, 3, 3, 7, 7, 11, 11, 15, 15, 19, 19, 23, 23, 27, 27);
    const I16 s = odd_scales64(_mm512_set1_epi32(int(word32(b.scales))), shifts);
    return {{s, s}};
  }
};

// --- products ---------------------------------------------------------------------------------------------------

// Sum of n * a times scales, of one plane.
template <class Wide>
FT_INLINE I16 scaled_sums(const I16 *n, const LaneScales &s, const GridAct &a, int p) {
  I16 sum[2];
  for (int i = 0; i < 2; ++i) {
    sum[i] = Wide::kScaleOf16 || i == 0 ? load64(a.start[p][i]) : sum[0];
    sum[i] = _mm512_dpbusd_epi32(sum[i], n[2 * i], load64(a.plane[p][2 * i]));
    sum[i] = _mm512_dpbusd_epi32(sum[i], n[2 * i + 1], load64(a.plane[p][2 * i + 1]));
  }
  if (!Wide::kScaleOf16) return _mm512_mullo_epi32(sum[1], s.sc[0]);
  return _mm512_add_epi32(_mm512_mullo_epi32(sum[0], s.sc[0]), _mm512_mullo_epi32(sum[1], s.sc[1]));
}

// Lane i of the result is the sum of the lanes of v[i].
FT_INLINE I8 eight_sums(const I16 *v) {
  const I16 low = fold4(fold2(v[0], v[1]), fold2(v[2], v[3])), high = fold4(fold2(v[4], v[5]), fold2(v[6], v[7]));
  const I16 halves =
      _mm512_add_epi32(_mm512_shuffle_i32x4(low, high, 0x44), _mm512_shuffle_i32x4(low, high, 0xee));
  const I16 sums = _mm512_add_epi32(_mm512_shuffle_i32x4(halves, halves, 0x88),
                                    _mm512_shuffle_i32x4(halves, halves, 0xdd));
  return _mm512_castsi512_si256(sums);
}

// Words of the i-th and, of two blocks to a register, the next block; beyond `count` those of the last.
template <class Wide>
FT_INLINE Words look_up(const typename Wide::Block *b, int i, int count) {
  if constexpr (Wide::kBlocks == 2) {
    return words_at(Wide::table(), Wide::places(b[i], b[i + 1 < count ? i + 1 : i]));
  } else {
    return words_at(Wide::table(), Wide::places(b[i]));
  }
}

template <class Wide, int NT, int kPlanes, Shape kShape>
FT_INLINE void terms_of(const Group<GridAct, NT> &g, F8 *terms) {
  using Block = typename Wide::Block;
  const int count = kShape == kPartial ? g.count : 8;
  const auto *blocks = reinterpret_cast<const Block *>(g.w);
  I16 sums[NT][2][8];
  Words words[8 / Wide::kBlocks];
  for (int i = 0; i < count; i += Wide::kBlocks) words[i / Wide::kBlocks] = look_up<Wide>(blocks, i, count);
  int64_t place = g.first;
  for (int i = 0; i < count; ++i) {
    const Block &b = blocks[i];
    prefetch<sizeof(Block)>(&b);
    I16 n[4];
    Wide::values(b, Wide::codes(words, i), n);
    const LaneScales s = Wide::lane_scales(b);
    for (int t = 0; t < NT; ++t) {
      for (int p = 0; p < kPlanes; ++p) sums[t][p][i] = scaled_sums<Wide>(n, s, g.act[t][place], p);
    }
    ++place;
    if (kShape != kStraight && place == g.nb) place = 0;
  }
  const Factors f = Wide::factors(g.w, count);
  for (int t = 0; t < NT; ++t) {
    for (int p = 0; p < kPlanes; ++p) {
      for (int i = count; i < 8; ++i) sums[t][p][i] = _mm512_setzero_si512();
    }
    F8 sum = _mm256_cvtepi32_ps(eight_sums(sums[t][0]));
    if (kPlanes == 2) {
      sum = _mm256_add_ps(_mm256_mul_ps(sum, _mm256_set1_ps(256.0f)), _mm256_cvtepi32_ps(eight_sums(sums[t][1])));
    }
    terms[t] = _mm256_mul_ps(_mm256_mul_ps(f.d, _mm256_loadu_ps(g.dx[t])), sum);
  }
}

}  // namespace
}  // namespace ft
#endif
#endif
