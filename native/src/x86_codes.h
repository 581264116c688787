// x86_codes.h - the IQ3 types where the processor permutes bytes of whole registers (AVX512-VBMI): code words are looked
// up 64 at a time from tables that pass through registers, and unpacked to bytes by shifts of each byte's own. For the
// IQ2 types this was slower than look_up(): 4.2, 4.7 and 4.5 GB/s against 4.8, 5.6 and 6.2 on one Zen 4 core.
#ifndef FT_X86_CODES_H
#define FT_X86_CODES_H
#include "x86_grids.h"
#include "x86_vectors512.h"

#ifdef __AVX512VBMI__

namespace ft {
namespace {

// Bytes of a table of 256 at 64 places.
FT_INLINE I16 byte_of_256(const uint8_t *table, I16 at, __mmask64 upper) {
  const I16 low = _mm512_permutex2var_epi8(load64(table), at, load64(table + 64));
  const I16 high = _mm512_permutex2var_epi8(load64(table + 128), at, load64(table + 192));
  return _mm512_mask_blend_epi8(upper, low, high);
}

// The same of tables of kCount, 256 or 512; bits 7 and 8 of a place are in masks.
template <int kCount>
FT_INLINE I16 byte_of(const uint8_t *table, I16 at, __mmask64 bit7, __mmask64 bit8) {
  const I16 first = byte_of_256(table, at, bit7);
  if (kCount == 256) return first;
  return _mm512_mask_blend_epi8(bit8, first, byte_of_256(table + 256 % kCount, at, bit7));
}

FT_INLINE I16 words_of(I8 low, I8 high) {
  return _mm512_or_si512(_mm512_cvtepu8_epi16(low), _mm512_slli_epi16(_mm512_cvtepu8_epi16(high), 8));
}

// What a block's prepare() leaves: the packed levels of its code words, and signs.
struct WordsReady {
  alignas(64) uint16_t words[64];
  alignas(32) uint64_t signs[4];
};

// Code words at 64 places.
template <int kCount>
FT_INLINE void look_up_words(WordsReady &r, const CodeBytes<kCount> &t, I16 at, __mmask64 bit8) {
  const __mmask64 bit7 = _mm512_movepi8_mask(at);
  const I16 low = byte_of<kCount>(t.low, at, bit7, bit8), high = byte_of<kCount>(t.high, at, bit7, bit8);
  _mm512_store_si512(r.words, words_of(_mm512_castsi512_si256(low), _mm512_castsi512_si256(high)));
  const I8 low2 = _mm512_extracti64x4_epi64(low, 1), high2 = _mm512_extracti64x4_epi64(high, 1);
  _mm512_store_si512(r.words + 32, words_of(low2, high2));
}

// Levels of 64 values in bytes, by table of 64 that repeats the levels; then their signs.
FT_INLINE void signed_levels(I16 packed, I16 shifts, const uint8_t *levels, uint64_t signs, I8 *n) {
  const I16 grid = _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(shifts, packed), load64(levels));
  const I16 all = _mm512_mask_sub_epi8(grid, signs, _mm512_set1_epi8(char(2 * kGridBias)), grid);
  n[0] = _mm512_castsi512_si256(all);
  n[1] = _mm512_extracti64x4_epi64(all, 1);
}

FT_INLINE void parts_iq3(const WordsReady &r, int s, const uint8_t *levels, I8 *n) {
  const I16 packed = _mm512_cvtepu16_epi32(load(r.words + 16 * s));
  signed_levels(packed, _mm512_set1_epi64(0x2926232009060300), levels, r.signs[s], n);
}

struct WideIQ3_XXS : VecIQ3_XXS {
  FT_INLINE static WordsReady prepare(const Block &b) {
    WordsReady r;
    look_up_words(r, kGrids.words_iq3_xxs, load64(b.qs), 0);
    store(r.signs, SignWords{load(b.words)}.signs());
    return r;
  }
  FT_INLINE static void parts(const WordsReady &r, int s, I8 *n) { parts_iq3(r, s, kGrids.levels_iq3_xxs, n); }
};

struct WideIQ3_S : VecIQ3_S {
  FT_INLINE static WordsReady prepare(const Block &b) {
    WordsReady r;
    look_up_words(r, kGrids.words_iq3_s, load64(b.qs), word_at<uint64_t>(b.qh));
    store(r.signs, load(b.signs));
    return r;
  }
  FT_INLINE static void parts(const WordsReady &r, int s, I8 *n) { parts_iq3(r, s, kGrids.levels_iq3_s, n); }
};

}  // namespace
}  // namespace ft
#endif
#endif
