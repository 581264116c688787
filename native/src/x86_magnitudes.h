// x86_magnitudes.h - the IQ2 and IQ3 types with arranged activations (x86_arranged.h) and AVX2: magnitudes are the
// unsigned factors of the products, signs go to the activations. Half h of a vector has the groups 4h to 4h + 3 of 32
// values.
#ifndef FT_X86_MAGNITUDES_H
#define FT_X86_MAGNITUDES_H
#include "x86_arranged.h"

namespace ft {
namespace {

FT_INLINE I8 in_both_halves(const void *p) { return _mm256_broadcastsi128_si256(load16(p)); }

// What gives activations of vector k the signs of their weights (by _mm256_sign_epi8): a sign byte's bits in the bytes
// of a quadword, plus 127: negative for a set bit, never 0. `signs` are four bytes a group, of four groups, twice.
FT_INLINE I8 signs_of_vector(I8 signs, int k) {
  const I8 first = _mm256_setr_epi64x(0, 0x0404040404040404, 0x0808080808080808, 0x0c0c0c0c0c0c0c0c);
  const I8 spread = _mm256_shuffle_epi8(signs, _mm256_add_epi8(first, _mm256_set1_epi8(char(k))));
  const I8 bits = _mm256_and_si256(spread, _mm256_set1_epi64x(int64_t(0x8040201008040201)));
  return _mm256_add_epi8(bits, _mm256_set1_epi8(127));
}

// Scales of half h, of the vectors 0, 1 (pair 0) or 2, 3 (pair 1): a group's in the four places of its quadword.
FT_INLINE I8 lane_scales(I8 sc, int h, int pair) {
  const I8 all = _mm256_permute4x64_epi64(sc, 0x44 + 0xaa * pair);
  const I8 first = _mm256_setr_epi64x(0x0100010001000100, 0x0302030203020302, 0x0504050405040504, 0x0706070607060706);
  return _mm256_shuffle_epi8(all, _mm256_add_epi8(first, _mm256_set1_epi8(char(8 * h))));
}

FT_INLINE I8 four_words(const uint64_t *a, const uint64_t *b, const uint64_t *c, const uint64_t *d) {
  return _mm256_setr_m128i(two_words(a, b), two_words(c, d));
}

// The products of kSum vectors fit int16 together: twice 127 times a magnitude of at most 62 each.
template <class Base, bool kOf16, int kSum>
struct Magnitudes : Base {
  using Vec = Base;
  static constexpr int kTokens = 1, kAdded = kSum;
  static constexpr bool kScaleOf16 = kOf16;
  template <int kPlanes>
  FT_INLINE static void arrange(const Act256 &from, GridAct &to) {
    for (int p = 0; p < kPlanes; ++p) {
      const int8_t *plane = p == 0 ? from.hi : from.lo;
      for (int h = 0; h < 2; ++h) {
        const Quarters v = quarters_of(plane + 128 * h);
        for (int k = 0; k < 4; ++k) store(to.plane[p][k] + 32 * h, v.of[k]);
      }
    }
  }
};

// A code word is a quadword.
template <class Base, bool kOf16>
struct MagnitudesIQ2 : Magnitudes<Base, kOf16, 2> {
  template <class Ready>
  FT_INLINE static I8 magnitudes(const Ready &r, int k, int h) {
    constexpr int kStep = sizeof(*r.codes) == 1 ? 8 : 4;
    const auto *at = r.codes + 4 * kStep * h + k;
    const uint64_t *t = Base::table();
    return four_words(t + at[0], t + at[kStep], t + at[2 * kStep], t + at[3 * kStep]);
  }
};

// Two code words are a quadword.
template <class Base, int kSum>
struct MagnitudesIQ3 : Magnitudes<Base, false, kSum> {
  template <class Ready>
  FT_INLINE static I8 magnitudes(const Ready &r, int k, int h) {
    const auto *c = r.codes + 32 * h + 2 * k;
    const auto word = [c](int at) { return int(Base::table()[c[at]]); };
    return _mm256_setr_epi32(word(0), word(1), word(8), word(9), word(16), word(17), word(24), word(25));
  }
};

using MagIQ2_XXS = MagnitudesIQ2<VecIQ2_XXS, false>;
using MagIQ2_XS = MagnitudesIQ2<VecIQ2_XS, true>;
using MagIQ2_S = MagnitudesIQ2<VecIQ2_S, true>;
using MagIQ3_XXS = MagnitudesIQ3<VecIQ3_XXS, 2>;
using MagIQ3_S = MagnitudesIQ3<VecIQ3_S, 4>;  // magnitudes are at most 15

// sum + sc * n, sums of pairs.
FT_INLINE I8 add_pairs(I8 sum, I8 n, I8 sc) {
#ifdef __AVX512VNNI__
  return _mm256_dpwssd_epi32(sum, n, sc);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(n, sc));
#endif
}

template <class Mag, int kPlanes, class Ready>
FT_INLINE void block_sums(const Ready &r, I8 scales, const GridAct &a, I8 *sums) {
  for (int p = 0; p < kPlanes; ++p) sums[p] = _mm256_setzero_si256();
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const I8 signs = in_both_halves(r.signs + 4 * h);
    I8 added[2];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const I8 n = Mag::magnitudes(r, k, h), sign = signs_of_vector(signs, k);
      for (int p = 0; p < kPlanes; ++p) {
        const I8 products = _mm256_maddubs_epi16(n, _mm256_sign_epi8(load(a.plane[p][k] + 32 * h), sign));
        added[p] = k % Mag::kAdded == 0 ? products : _mm256_add_epi16(added[p], products);
        if ((k + 1) % Mag::kAdded == 0) {
          sums[p] = add_pairs(sums[p], added[p], lane_scales(scales, h, Mag::kScaleOf16 ? k / 2 : 0));
        }
      }
    }
  }
}

template <class Mag, int NT, int kPlanes, Shape kShape>
FT_INLINE void terms_of(const Group<GridAct, NT> &g, F8 *terms) {
  static_assert(NT == 1, "one token at a time");
  using Block = typename Mag::Block;
  const int count = kShape == kPartial ? g.count : 8;
  const auto *blocks = reinterpret_cast<const Block *>(g.w);
  PreparedBlocks<Mag> ready(blocks, count);
  Sums sums;
  int64_t place = g.first;
  for (int i = 0; i < count; ++i) {
    prefetch<sizeof(Block)>(blocks + i);
    I8 both[2];
    block_sums<Mag, kPlanes>(ready.at(i), Mag::scales(blocks[i]).sc, g.act[0][place], both);
    sums.hi[i] = both[0];
    if (kPlanes == 2) sums.lo[i] = both[1];
    ++place;
    if (kShape != kStraight && place == g.nb) place = 0;
  }
  for (int i = count; i < 8; ++i) sums.hi[i] = sums.lo[i] = _mm256_setzero_si256();
  terms[0] = term_256<Mag, kPlanes>(sums, Mag::factors(g.w, count), _mm256_loadu_ps(g.dx[0]));
}

}  // namespace
}  // namespace ft
#endif
