// x86_gather.h - IQ2_XS and IQ2_S where a gather of eight quadwords costs little more than its loads (Intel, from
// Sapphire Rapids on): code words come from tables of whole words, in the order of the values, and need no unpacking.
#ifndef FT_X86_GATHER_H
#define FT_X86_GATHER_H
#include "x86_wide256.h"

#ifdef __AVX512VBMI__
#include "x86_codes.h"

namespace ft {
namespace {

// The words of eight codes with their signs (a set bit for a minus), plus kGridBias: unsigned.
FT_INLINE I16 gathered(const uint64_t *table, I16 codes, __mmask64 minus) {
  const I16 bias = _mm512_set1_epi8(kGridBias);
  const I16 words = _mm512_i64gather_epi64(codes, table, 8);
  return _mm512_mask_sub_epi8(_mm512_add_epi8(bias, words), minus, bias, words);
}

// kGridBias times the sums of activations and scales is taken away again.
constexpr int kBiasBits = 6;
static_assert(1 << kBiasBits == kGridBias, "a power of two");

struct Signs64 {
  alignas(32) uint64_t of[4];
};

struct GatherIQ2_XS : FormIQ2_XS, WideForm {
  using Ready = Act256;
  static constexpr float kFactor = kUnit;
  FT_INLINE static void signs(const Block &b, Signs64 &signs) {
    const I8 seven = _mm512_cvtepi16_epi8(_mm512_srli_epi16(load64(b.qs), 9));
    store(signs.of, _mm256_gf2p8affine_epi64_epi8(seven, _mm256_set1_epi64x(0x010204081020407f), 0));
  }
  template <int NT, int kPlanes>
  FT_INLINE static void sums(const Block &b, const Act256 *const *a, Column<NT> &c, int row) {
    const I16 sc = _mm512_broadcast_i64x4(nibble_scales(b.scales));
    Signs64 minus;
    signs(b, minus);
    Planes<NT> p;
    for (int s = 0; s < 4; ++s) {
      const I16 codes = _mm512_and_si512(_mm512_cvtepu16_epi64(load16(b.qs + 16 * s)), _mm512_set1_epi64(511));
      p.template add<kPlanes>(gathered(table(), codes, minus.of[s]), spread_sixteen(sc, s), a, s);
    }
    p.store_less(c.sums, row, sc, a, kBiasBits);
    c.factors[row] = uint32_t(word16(&b.d));
  }
};

struct GatherIQ2_S : FormIQ2_S, WideForm {
  using Ready = Act256;
  static constexpr float kFactor = kUnit;
  template <int NT, int kPlanes>
  FT_INLINE static void sums(const Block &b, const Act256 *const *a, Column<NT> &c, int row) {
    const I16 sc = _mm512_broadcast_i64x4(nibble_scales(b.scales));
    const I16 high = _mm512_set1_epi64(word_at<int64_t>(b.qh));
    Planes<NT> p;
    for (int s = 0; s < 4; ++s) {
      const I16 low = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(b.qs + 8 * s)));
      const I16 by = _mm512_add_epi64(_mm512_setr_epi64(56, 58, 60, 62, 64, 66, 68, 70), _mm512_set1_epi64(16 * s));
      const I16 moved = _mm512_rorv_epi64(high, by);  // the two upper bits of a code are now its bits 8 and 9
      const I16 codes = _mm512_ternarylogic_epi64(moved, _mm512_set1_epi64(0x300), low, 0xea);
      const uint64_t minus = word_at<uint64_t>(b.signs + 8 * s);
      p.template add<kPlanes>(gathered(table(), codes, minus), spread_sixteen(sc, s), a, s);
    }
    p.store_less(c.sums, row, sc, a, kBiasBits);
    c.factors[row] = uint32_t(word16(&b.d));
  }
};

}  // namespace
}  // namespace ft
#endif
#endif
