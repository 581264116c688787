// x86_grids.h - the IQ2 and IQ3 types of blocks_grid.h as vectors. Code words are looked up one by one from tables that
// stay in the nearest cache; their places and the signs of a whole block are prepared as vectors first.
#ifndef FT_X86_GRIDS_H
#define FT_X86_GRIDS_H
#include "kernels_common.h"  // before the vectors: their tree8 hides the scalar one
#include "blocks_grid.h"
#include "x86_forms.h"

namespace ft {
namespace {

// n of 32 values: `grid` holds |n|, a set bit of `signs` is a minus.
FT_INLINE I8 with_signs(I8 grid, uint32_t signs) {
#ifdef __AVX512VNNI__
  return _mm256_mask_sub_epi8(grid, signs, _mm256_setzero_si256(), grid);
#else
  const I8 spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(int(signs)),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const I8 bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const I8 minus = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
  return _mm256_sub_epi8(_mm256_xor_si256(grid, minus), minus);
#endif
}

// Code words at some places of a table, side by side. Loads of one half each are the cheapest.
FT_INLINE __m128i two_words(const uint64_t *a, const uint64_t *b) {
  const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(a)));
  return _mm_castps_si128(_mm_loadh_pi(low, reinterpret_cast<const __m64 *>(b)));
}

template <class Index>
FT_INLINE I8 look_up(const uint64_t *table, const Index *at) {
  return _mm256_setr_m128i(two_words(table + at[0], table + at[1]), two_words(table + at[2], table + at[3]));
}

template <class Index>
FT_INLINE I8 look_up(const uint32_t *table, const Index *at) {
  return _mm256_setr_epi32(int(table[at[0]]), int(table[at[1]]), int(table[at[2]]), int(table[at[3]]),
                           int(table[at[4]]), int(table[at[5]]), int(table[at[6]]), int(table[at[7]]));
}

// 2s + 1 of 16 bytes s, widened.
FT_INLINE I8 odd_scales(__m128i s) {
  const I8 wide = _mm256_cvtepu8_epi16(s);
  return _mm256_add_epi16(_mm256_add_epi16(wide, wide), _mm256_set1_epi16(1));
}

// Eight bytes of two scales each: even groups, then odd ones.
FT_INLINE I8 nibble_scales(const uint8_t *p) {
  const __m128i s = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)), mask = _mm_set1_epi8(15);
  return odd_scales(_mm_unpacklo_epi64(_mm_and_si128(s, mask), _mm_and_si128(_mm_srli_epi16(s, 4), mask)));
}

// Eight words of four times seven signs and a scale of four bits.
struct SignWords {
  I8 words;
  FT_INLINE I8 scales() const {
    const I8 s = _mm256_srli_epi32(words, 28), packed = _mm256_packs_epi32(s, s);
    const I8 both = _mm256_permute4x64_epi64(packed, 0x88);
    return _mm256_add_epi16(_mm256_add_epi16(both, both), _mm256_set1_epi16(1));
  }
  FT_INLINE I8 signs() const;
};

// Bytes of seven signs -> eight.
FT_INLINE I8 even_signs8(I8 s) {
  const I8 a = _mm256_xor_si256(s, and_bits(_mm256_srli_epi16(s, 4), 15));
  const I8 odd = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
  return _mm256_or_si256(s, _mm256_shuffle_epi8(odd, and_bits(a, 15)));
}

FT_INLINE I8 SignWords::signs() const {
  const auto field = [this](int shift, int mask) {
    return _mm256_and_si256(_mm256_slli_epi32(words, shift), _mm256_set1_epi32(mask));
  };
  const I8 low = _mm256_or_si256(field(0, 0x7f), field(1, 0x7f00));
  return even_signs8(_mm256_or_si256(low, _mm256_or_si256(field(2, 0x7f0000), field(3, 0x7f000000))));
}

FT_INLINE void store(void *p, I8 v) { _mm256_store_si256(static_cast<__m256i *>(p), v); }

// What a block's prepare() leaves for its parts().
struct SignsReady {
  alignas(32) uint32_t signs[8];
};
template <int kCodes>
struct CodesReady {
  alignas(32) uint32_t signs[8];
  alignas(32) uint16_t codes[kCodes];
};

struct VecGrid {
  static constexpr bool kCommon = false;
  static constexpr bool kSigned = true;
  static constexpr int kBias = 0, kPart = 2;
};

template <class Vec>
FT_INLINE Factors factors_grid(const uint8_t *p, int count) {
  const Factors f = factors1(p, sizeof(typename Vec::Block), count);
  return {_mm256_mul_ps(f.d, _mm256_set1_ps(Vec::kUnit)), f.m};
}

struct VecIQ2_XXS : FormIQ2_XXS, VecGrid {
  struct Ready : SignsReady {
    const uint8_t *codes;
  };
  FT_INLINE static SignWords words(const Block &b) {
    const __m256 low = _mm256_castsi256_ps(load(b.qs)), high = _mm256_castsi256_ps(load(b.qs + 32));
    return {_mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), 0xd8)};
  }
  FT_INLINE static Ready prepare(const Block &b) {
    Ready r;
    store(r.signs, words(b).signs());
    r.codes = b.qs;
    return r;
  }
  FT_INLINE static void parts(const Ready &r, int s, I8 *n) {
    for (int i = 0; i < 2; ++i) n[i] = with_signs(look_up(table(), r.codes + 16 * s + 8 * i), r.signs[2 * s + i]);
  }
  FT_INLINE static VecScales scales(const Block &b) { return {words(b).scales(), _mm256_setzero_si256()}; }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors_grid<VecIQ2_XXS>(p, count); }
};

struct VecIQ3_XXS : FormIQ3_XXS, VecGrid {
  struct Ready : SignsReady {
    const uint8_t *codes;
  };
  FT_INLINE static Ready prepare(const Block &b) {
    Ready r;
    store(r.signs, SignWords{load(b.words)}.signs());
    r.codes = b.qs;
    return r;
  }
  FT_INLINE static void parts(const Ready &r, int s, I8 *n) {
    for (int i = 0; i < 2; ++i) n[i] = with_signs(look_up(table(), r.codes + 16 * s + 8 * i), r.signs[2 * s + i]);
  }
  FT_INLINE static VecScales scales(const Block &b) {
    return {SignWords{load(b.words)}.scales(), _mm256_setzero_si256()};
  }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors_grid<VecIQ3_XXS>(p, count); }
};

struct VecIQ2_XS : FormIQ2_XS, VecGrid {
  using Ready = CodesReady<32>;
  FT_INLINE static Ready prepare(const Block &b) {
    Ready r;
    const I8 low = load(b.qs), high = load(b.qs + 32), mask = _mm256_set1_epi16(511);
    const I8 packed = _mm256_packus_epi16(_mm256_srli_epi16(low, 9), _mm256_srli_epi16(high, 9));
    store(r.signs, even_signs8(_mm256_permute4x64_epi64(packed, 0xd8)));
    store(r.codes, _mm256_and_si256(low, mask));
    store(r.codes + 16, _mm256_and_si256(high, mask));
    return r;
  }
  FT_INLINE static void parts(const Ready &r, int s, I8 *n) {
    for (int i = 0; i < 2; ++i) n[i] = with_signs(look_up(table(), r.codes + 8 * s + 4 * i), r.signs[2 * s + i]);
  }
  FT_INLINE static VecScales scales(const Block &b) { return {nibble_scales(b.scales), _mm256_setzero_si256()}; }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors_grid<VecIQ2_XS>(p, count); }
};

struct VecIQ2_S : FormIQ2_S, VecGrid {
  using Ready = CodesReady<32>;
  FT_INLINE static Ready prepare(const Block &b) {
    Ready r;
    store(r.signs, load(b.signs));
    const I8 qh = _mm256_broadcastsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(b.qh)));
    for (int i = 0; i < 2; ++i) {
      const I8 place = _mm256_setr_epi64x(int64_t(0x8000800080008000), int64_t(0x8001800180018001),
                                          int64_t(0x8002800280028002), int64_t(0x8003800380038003));
      const I8 high = _mm256_shuffle_epi8(qh, _mm256_add_epi8(place, _mm256_set1_epi16(int16_t(4 * i))));
      const I8 moved = _mm256_mullo_epi16(high, _mm256_set1_epi64x(0x0004001000400100));
      const I8 low = _mm256_cvtepu8_epi16(load16(b.qs + 16 * i));
      store(r.codes + 16 * i, _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi16(0x300))));
    }
    return r;
  }
  FT_INLINE static void parts(const Ready &r, int s, I8 *n) {
    for (int i = 0; i < 2; ++i) n[i] = with_signs(look_up(table(), r.codes + 8 * s + 4 * i), r.signs[2 * s + i]);
  }
  FT_INLINE static VecScales scales(const Block &b) { return {nibble_scales(b.scales), _mm256_setzero_si256()}; }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors_grid<VecIQ2_S>(p, count); }
};

struct VecIQ3_S : FormIQ3_S, VecGrid {
  using Ready = CodesReady<64>;
  FT_INLINE static Ready prepare(const Block &b) {
    Ready r;
    store(r.signs, load(b.signs));
    const I8 qh = _mm256_broadcastsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(b.qh)));
    const I8 powers = _mm256_broadcastsi128_si256(_mm_setr_epi16(256, 128, 64, 32, 16, 8, 4, 2));
    for (int i = 0; i < 4; ++i) {
      const int16_t first = int16_t(0x8000 | (2 * i)), second = int16_t(0x8001 | (2 * i));
      const I8 place = _mm256_set_m128i(_mm_set1_epi16(second), _mm_set1_epi16(first));
      const I8 moved = _mm256_mullo_epi16(_mm256_shuffle_epi8(qh, place), powers);
      const I8 low = _mm256_cvtepu8_epi16(load16(b.qs + 16 * i));
      store(r.codes + 16 * i, _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi16(256))));
    }
    return r;
  }
  FT_INLINE static void parts(const Ready &r, int s, I8 *n) {
    for (int i = 0; i < 2; ++i) n[i] = with_signs(look_up(table(), r.codes + 16 * s + 8 * i), r.signs[2 * s + i]);
  }
  FT_INLINE static VecScales scales(const Block &b) {
    const uint32_t s = word32(b.scales);
    const __m128i low = _mm_cvtsi32_si128(int(s & 0x0f0f0f0f)), high = _mm_cvtsi32_si128(int((s >> 4) & 0x0f0f0f0f));
    const __m128i eight = _mm_unpacklo_epi8(low, high);
    return {odd_scales(_mm_unpacklo_epi64(eight, eight)), _mm256_setzero_si256()};
  }
  FT_INLINE static Factors factors(const uint8_t *p, int count) { return factors_grid<VecIQ3_S>(p, count); }
};

}  // namespace
}  // namespace ft
#endif
