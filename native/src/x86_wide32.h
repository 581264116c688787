// x86_wide32.h - eight blocks of class 32 at 512 bits (x86_class32.h): vector j has values 8j .. 8j + 3 of the blocks in
// its lower half, 8j + 4 .. 8j + 7 in its upper one.
#ifndef FT_X86_WIDE32_H
#define FT_X86_WIDE32_H
#include "x86_class32.h"

#ifdef __AVX512VNNI__

namespace ft {
namespace {

// 16 bytes of each of four blocks.
template <class From>
FT_INLINE __m512i four_blocks(const From &from, int first, int offset) {
  __m512i v = _mm512_castsi128_si512(load16(from[first] + offset));
  v = _mm512_inserti32x4(v, load16(from[first + 1] + offset), 1);
  v = _mm512_inserti32x4(v, load16(from[first + 2] + offset), 2);
  return _mm512_inserti32x4(v, load16(from[first + 3] + offset), 3);
}

// 32 bytes of each of two blocks.
template <class From>
FT_INLINE __m512i two_blocks(const From &from, int first, int offset) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load(from[first] + offset)), load(from[first + 1] + offset), 1);
}

// Dwords 0 and 1 of the eight blocks, then dwords 2 and 3.
FT_INLINE void transpose8(__m512i low, __m512i high, __m512i *out) {
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i second = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  out[0] = _mm512_permutex2var_epi32(low, first, high);
  out[1] = _mm512_permutex2var_epi32(low, second, high);
}

FT_INLINE __m512i or_bits(__m512i v, __m512i bits, __m512i mask) {  // v | (bits & mask)
  return _mm512_ternarylogic_epi32(v, bits, mask, 0xf8);
}

// Codes in the lower nibbles to bytes; where VBMI permutes, the upper nibbles may hold anything.
#ifdef __AVX512VBMI__
FT_INLINE __m512i clean(__m512i v, bool looked_up) {
  return looked_up ? v : _mm512_and_si512(v, _mm512_set1_epi8(15));
}
FT_INLINE __m512i look_up(const CodeTable &t, __m512i v) { return _mm512_permutexvar_epi8(v, _mm512_load_si512(t.at)); }
#else
FT_INLINE __m512i clean(__m512i v, bool) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
FT_INLINE __m512i look_up(const CodeTable &t, __m512i v) { return _mm512_shuffle_epi8(_mm512_load_si512(t.at), v); }
#endif

// Bit 8j + i of a block's word becomes 16 in byte i of w[j]'s lower half, bit 8j + 4 + i in its upper half.
template <class Type, class From>
FT_INLINE void add_fifth_bits(const From &from, __m512i *w) {
  const __m512i both = _mm512_broadcast_i64x4(eight_words(from, Type::kFifths)), one = _mm512_set1_epi8(16);
#ifdef __AVX512VBMI__
  const int64_t low = 0x1f1e1d1c3f3e3d3c;  // bit i of the word goes to bit 4: eight bits from bit i - 4 on
  const __m512i starts = _mm512_inserti64x4(_mm512_set1_epi64(low), _mm256_set1_epi64x(0x2322212003020100), 1);
  for (int j = 0; j < 4; ++j) {
    const __m512i at_j = _mm512_add_epi8(starts, _mm512_set1_epi8(char(8 * j)));
    w[j] = or_bits(w[j], _mm512_multishift_epi64_epi8(at_j, both), one);
  }
#else
  const __m512i bit = _mm512_inserti64x4(_mm512_set1_epi32(0x08040201), _mm256_set1_epi32(int(0x80402010)), 1);
  const __m512i spread = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
  for (int j = 0; j < 4; ++j) {
    const __m512i byte = _mm512_shuffle_epi8(both, _mm512_add_epi8(spread, _mm512_set1_epi8(char(j))));
    w[j] = _mm512_mask_add_epi8(w[j], _mm512_test_epi8_mask(byte, bit), w[j], one);
  }
#endif
}

struct Wide {
  __m512i w[4];

  template <class Type, class From>
  FT_INLINE void unpack(const From &from) {
    constexpr int at = Type::kQuants;
    if constexpr (Type::kCoding == kBytes) {
      const __m512i a = two_blocks(from, 0, at), b = two_blocks(from, 2, at);
      const __m512i c = two_blocks(from, 4, at), d = two_blocks(from, 6, at);
      transpose8(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(c, d, 0x88), w);
      transpose8(_mm512_shuffle_i64x2(a, b, 0xdd), _mm512_shuffle_i64x2(c, d, 0xdd), w + 2);
      for (int j = 0; j < 4; ++j) w[j] = _mm512_xor_si512(w[j], _mm512_set1_epi8(char(0x80)));
    } else {
      constexpr bool looked_up = Type::kCoding == kLookUp;
      transpose8(four_blocks(from, 0, at), four_blocks(from, 4, at), w);
      for (int j = 0; j < 2; ++j) {
        w[j + 2] = clean(_mm512_srli_epi16(w[j], 4), looked_up);
        w[j] = clean(w[j], looked_up);
      }
    }
    if constexpr (Type::kCoding == kLookUp) {
      for (int j = 0; j < 4; ++j) w[j] = look_up(Type::kCodes, w[j]);
    }
    if constexpr (Type::kCoding == kFiveBits) add_fifth_bits<Type>(from, w);
  }

  FT_INLINE __m512i plane(const int8_t (*p)[8][4], __m512i sum) const {
    for (int j = 0; j < 4; ++j) sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_loadu_si512(p[2 * j]));
    return sum;
  }

  template <class Type, int kPlanes>
  FT_INLINE I8 sums(const Act32 &a, const int32_t *negated) const {
    __m512i sum = _mm512_setzero_si512();
    if (Type::kBias) sum = _mm512_zextsi256_si512(_mm256_slli_epi32(load(negated), log2_of(Type::kBias)));
    if (kPlanes == 1) {
      sum = plane(a.hi, sum);
    } else {
      const __m512i hi = plane(a.hi, _mm512_setzero_si512());
      sum = _mm512_add_epi32(_mm512_slli_epi32(hi, 8), plane(a.lo, sum));
    }
    return _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  }
};

}  // namespace
}  // namespace ft
#endif
#endif
