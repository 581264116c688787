// x86_wide_forms.h - the forms of class 256 with 512-bit vectors and byte permutations (AVX512-VBMI): sums of a block's
// integers times its scales, for the products of x86_wide256.h.
#ifndef FT_X86_WIDE_FORMS_H
#define FT_X86_WIDE_FORMS_H
#ifdef __AVX512VBMI__
#include "x86_products.h"
#include "x86_vectors512.h"

namespace ft {
namespace {

FT_INLINE I16 twice(const void *p) { return _mm512_broadcast_i64x4(load(p)); }
FT_INLINE I16 and64(I16 v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi8(char(mask))); }
// Constants of two halves and of four quarters; the same word or byte in each 64 bits of them.
FT_INLINE I16 halves(int64_t a, int64_t b) { return _mm512_setr_epi64(a, a, a, a, b, b, b, b); }
FT_INLINE I16 quarters(int64_t a, int64_t b, int64_t c, int64_t d) { return _mm512_setr_epi64(a, a, b, b, c, c, d, d); }
constexpr int64_t words_of(uint64_t word) { return int64_t(word * 0x0001000100010001); }
constexpr int64_t bytes_of(uint64_t byte) { return int64_t(byte * 0x0101010101010101); }

// Words of the lower and of the upper half moved by a and b bits.
FT_INLINE I16 down(I16 v, int a, int b) { return _mm512_srlv_epi16(v, halves(words_of(a), words_of(b))); }
FT_INLINE I16 up(I16 v, int a, int b) { return _mm512_sllv_epi16(v, halves(words_of(a), words_of(b))); }
// (a & mask) | b
FT_INLINE I16 merge(I16 a, int mask, I16 b) { return _mm512_ternarylogic_epi64(a, _mm512_set1_epi8(char(mask)), b, 0xea); }

// The matrix of an affine map of bytes whose bit i is bit i + shift of its argument, for the bits i of mask.
constexpr int64_t bit_matrix(int shift, int mask) {
  uint64_t m = 0;
  for (int i = 0; i < 8; ++i) {
    if (((mask >> i) & 1) && i + shift >= 0 && i + shift < 8) m |= uint64_t(1) << (8 * (7 - i) + i + shift);
  }
  return int64_t(m);
}
// Bits of each byte moved down by a (in the upper half b) places and masked.
template <int a, int b, int mask>
FT_INLINE I16 bits(I16 v) {
  constexpr int64_t x = bit_matrix(a, mask), y = bit_matrix(b, mask);
  return _mm512_gf2p8affine_epi64_epi8(v, halves(x, y), 0);
}

// a's sums in the lower half, b's in the upper one.
FT_INLINE I16 fold_halves(I16 a, I16 b) {
  return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
}
// Lane i of each half is the sum of the lanes of that half of v[i].
FT_INLINE I16 fold8(const I16 *v) {
  const I16 a = fold4(fold2(v[0], v[1]), fold2(v[2], v[3])), b = fold4(fold2(v[4], v[5]), fold2(v[6], v[7]));
  const I16 sum = _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 4, 5, 2, 3, 6, 7), sum);
}

// Sums of the two planes of NT tokens.
template <int NT>
struct Planes {
  I16 hi[NT], lo[NT];
  FT_INLINE Planes() {
    for (int t = 0; t < NT; ++t) hi[t] = lo[t] = _mm512_setzero_si512();
  }
  // 64 unsigned integers from column 64 * s on, times the scales of each pair.
  template <int kPlanes>
  FT_INLINE void add(I16 n, I16 sc, const Act256 *const *a, int s) {
    for (int t = 0; t < NT; ++t) {
      hi[t] = _mm512_dpwssd_epi32(hi[t], _mm512_maddubs_epi16(n, load64(a[t]->hi + 64 * s)), sc);
      if (kPlanes == 2) lo[t] = _mm512_dpwssd_epi32(lo[t], _mm512_maddubs_epi16(n, load64(a[t]->lo + 64 * s)), sc);
    }
  }
  FT_INLINE void store(I16 (*sums)[8], int row) const {
    for (int t = 0; t < NT; ++t) sums[t][row] = fold_halves(hi[t], lo[t]);
  }
  // Less 1 << shift times the scales sc and the sums of the activations.
  FT_INLINE void store_less(I16 (*sums)[8], int row, I16 sc, const Act256 *const *a, int shift) const {
    for (int t = 0; t < NT; ++t) {
      const I16 extra = _mm512_slli_epi32(_mm512_madd_epi16(sc, load64(a[t]->sum16)), shift);
      sums[t][row] = _mm512_sub_epi32(fold_halves(hi[t], lo[t]), extra);
    }
  }
};

// What is left of eight blocks: partial sums of the planes in the halves of a vector, minimums (8 or 16 bytes a block) and
// factors.
struct Column8 {
  alignas(64) uint64_t mins[16];
  alignas(32) uint32_t factors[8];
};
template <int NT>
struct Column : Column8 {
  I16 sums[NT][8];
};

// Bytes 2 * s and 2 * s + 1 of eight scales, each over one half as int16.
FT_INLINE I16 spread_eight(uint64_t sc, int s) {
  const I16 at = halves(words_of(0x8000 | (2 * s)), words_of(0x8000 | (2 * s + 1)));
  return _mm512_shuffle_epi8(_mm512_set1_epi64(int64_t(sc)), at);
}

struct ScalesK4 {
  uint64_t sc, mn;
};

FT_INLINE ScalesK4 wide_scales_k4(const uint8_t *s) {
  const uint32_t x = word32(s), y = word32(s + 4), z = word32(s + 8);
  const uint32_t sc = (z & 0x0f0f0f0f) | ((x >> 2) & 0x30303030);
  const uint32_t mn = ((z >> 4) & 0x0f0f0f0f) | ((y >> 2) & 0x30303030);
  return {uint64_t(x & 0x3f3f3f3f) | (uint64_t(sc) << 32), uint64_t(y & 0x3f3f3f3f) | (uint64_t(mn) << 32)};
}

// What the eight lanes of a column meet: one block of activations (lanes are rows) or eight of one row. Digits and totals
// are those of Act256.
struct OneBlock {
  const Act256 &a;
  float scale;
  FT_INLINE F8 dx() const { return _mm256_set1_ps(scale); }
  FT_INLINE I8 total(int plane) const { return _mm256_set1_epi32(a.total[plane]); }
  FT_INLINE I16 digits8(int i) const {
    int64_t d;
    std::memcpy(&d, a.digits32[i], 8);
    return _mm512_set1_epi64(d);
  }
  FT_INLINE I16 digits16(int i, int) const { return _mm512_broadcast_i32x4(load16(a.digits16[i])); }
};

// M of eight minimums each.
template <class Met>
FT_INLINE F8 minimums8(const uint64_t *mins, const Met &met) {
  const I16 mn = load64(mins);
  I16 m = _mm512_setzero_si512();
  for (int digit = 2; digit >= 0; --digit) {
    m = _mm512_dpbusd_epi32(_mm512_slli_epi32(m, 8), mn, met.digits8(digit));
  }
  m = _mm512_add_epi32(m, _mm512_srli_epi64(m, 32));
  return _mm256_cvtepi32_ps(_mm512_cvtepi64_epi32(m));
}

// What forms have unless they say otherwise: rows whose sums are formed together, what is added to products of integers
// and scales, the power of two that d is multiplied with, from how many blocks on a row's own are taken together, and how
// many minimums a block has where it has them.
struct WideForm {
  static constexpr int kRows = 1, kBias = 0, kManyBlocks = 8, kMinGroups = 8;
  static constexpr float kFactor = 1;
};

struct WideQ4_K : FormQ4_K, WideForm {
  using Ready = Act256;
  template <int NT, int kPlanes>
  FT_INLINE static void sums(const Block &b, const Act256 *const *a, Column<NT> &c, int row) {
    const ScalesK4 k = wide_scales_k4(b.scales);
    Planes<NT> p;
    for (int s = 0; s < 4; ++s) {
      p.template add<kPlanes>(and64(down(twice(b.qs + 32 * s), 0, 4), 15), spread_eight(k.sc, s), a, s);
    }
    p.store(c.sums, row);
    c.mins[row] = k.mn;
    c.factors[row] = word32(&b.d);
  }
  template <class Met>
  FT_INLINE static F8 minimums(const Column8 &c, const Met &met) { return minimums8(c.mins, met); }
};

struct WideQ5_K : FormQ5_K, WideForm {
  using Ready = Act256;
  template <int NT, int kPlanes>
  FT_INLINE static void sums(const Block &b, const Act256 *const *a, Column<NT> &c, int row) {
    const ScalesK4 k = wide_scales_k4(b.scales);
    const I16 h = twice(b.qh);
    const I16 fifth[4] = {bits<-4, -3, 16>(h), bits<-2, -1, 16>(h), bits<0, 1, 16>(h), bits<2, 3, 16>(h)};
    Planes<NT> p;
    for (int s = 0; s < 4; ++s) {
      const I16 n = merge(down(twice(b.qs + 32 * s), 0, 4), 15, fifth[s]);
      p.template add<kPlanes>(n, spread_eight(k.sc, s), a, s);
    }
    p.store(c.sums, row);
    c.mins[row] = k.mn;
    c.factors[row] = word32(&b.d);
  }
  template <class Met>
  FT_INLINE static F8 minimums(const Column8 &c, const Met &met) { return minimums8(c.mins, met); }
};

// Sixteen int16 scales, even groups before odd ones (group_place), each over a quarter of a vector.
FT_INLINE I16 spread_sixteen(I16 sc, int s) {
  const auto word = [](int place) { return words_of((2 * place) | ((2 * place + 1) << 8)); };
  const I16 at = quarters(word(2 * s), word(2 * s + 8), word(2 * s + 1), word(2 * s + 9));
  return _mm512_permutexvar_epi8(at, sc);
}

struct WideQ6_K : FormQ6_K, WideForm {
  using Ready = Act256;
  template <int NT, int kPlanes>
  FT_INLINE static void sums(const Block &b, const Act256 *const *a, Column<NT> &c, int row) {
    const I16 sc = _mm512_broadcast_i64x4(even_odd(load16(b.scales)));
    Planes<NT> p;
    for (int half = 0; half < 2; ++half) {
      const I16 q = load64(b.ql + 64 * half), h = twice(b.qh + 32 * half);
      p.template add<kPlanes>(merge(q, 15, bits<-4, -2, 48>(h)), spread_sixteen(sc, 2 * half), a, 2 * half);
      const I16 n = merge(_mm512_srli_epi16(q, 4), 15, bits<0, 2, 48>(h));
      p.template add<kPlanes>(n, spread_sixteen(sc, 2 * half + 1), a, 2 * half + 1);
    }
    p.store_less(c.sums, row, sc, a, 5);
    c.factors[row] = uint32_t(word16(&b.d));
  }
};

// Sums of two planes of products that are bytes: unsigned n with the scales in them.
template <int NT, int kPlanes>
FT_INLINE void add_bytes(I16 n, const Act256 *const *a, int s, I16 *hi, I16 *lo) {
  for (int t = 0; t < NT; ++t) {
    hi[t] = _mm512_dpbusd_epi32(hi[t], n, load64(a[t]->hi + 64 * s));
    if (kPlanes == 2) lo[t] = _mm512_dpbusd_epi32(lo[t], n, load64(a[t]->lo + 64 * s));
  }
}

// `unit` times the number of each byte's group among the sixteen of a block, s-th quarter of them.
FT_INLINE I16 group_numbers(int s, int unit) {
  const auto group = [&](int i) { return bytes_of((4 * s + i) * unit); };
  return quarters(group(0), group(1), group(2), group(3));
}

// Products of integers and scales fit a byte here, so they are looked up: of Q2_K at 4 * group + integer.
struct WideQ2_K : FormQ2_K, WideForm {
  using Ready = Act256;
  static constexpr int kRows = 4, kManyBlocks = 9, kMinGroups = 16;
  template <int R, int NT, int kPlanes>
  FT_INLINE static void rows(const Block *const *b, const Act256 *const *a, Column<NT> &c, int row) {
    __m128i both[R];
    I16 table[R], hi[R][NT], lo[R][NT];
    for (int r = 0; r < R; ++r) {
      both[r] = load16(b[r]->scales);
      const I16 sc = _mm512_cvtepu8_epi32(_mm_and_si128(both[r], _mm_set1_epi8(15)));
      table[r] = _mm512_mullo_epi32(sc, _mm512_set1_epi32(0x03020100));
      for (int t = 0; t < NT; ++t) hi[r][t] = lo[r][t] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      for (int r = 0; r < R; ++r) {
        const I16 q = twice(b[r]->qs + 32 * (s >> 1));
        const I16 at = merge(s & 1 ? down(q, 4, 6) : down(q, 0, 2), 3, group_numbers(s, 4));
        add_bytes<NT, kPlanes>(_mm512_permutexvar_epi8(at, table[r]), a, s, hi[r], lo[r]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < NT; ++t) c.sums[t][row + r] = fold_halves(hi[r][t], lo[r][t]);
      _mm_storeu_si128(reinterpret_cast<__m128i *>(c.mins + 2 * (row + r)), both[r]);
      c.factors[row + r] = word32(&b[r]->d);
    }
  }
  template <class Met>
  FT_INLINE static F8 minimums(const Column8 &c, const Met &met) {
    I16 m[2];
    for (int i = 0; i < 2; ++i) {
      const I16 mn = and64(_mm512_srli_epi16(load64(c.mins + 8 * i), 4), 15);
      m[i] = _mm512_setzero_si512();
      for (int digit = 2; digit >= 0; --digit) {
        m[i] = _mm512_dpbusd_epi32(_mm512_slli_epi32(m[i], 8), mn, met.digits16(digit, i));
      }
      m[i] = _mm512_add_epi32(m[i], _mm512_srli_epi64(m[i], 32));
    }
    const I16 sum = _mm512_add_epi32(_mm512_unpacklo_epi64(m[0], m[1]), _mm512_unpackhi_epi64(m[0], m[1]));
    const I16 order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm256_cvtepi32_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi32(order, sum)));
  }
};

// Of Q3_K at 16 * integer + group: (integer - 4) * (scale - 32), and kBias so that it is unsigned.
// The twelve bytes of scales (the four bytes before them are read too) as sixteen signed bytes.
FT_INLINE __m128i wide_scales_q3(const uint8_t *scales) {
  const __m128i all = load16(scales - 4);
  const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(all, 0x99), _mm_setr_epi32(0, 0, 4, 4));
  const __m128i high = _mm_rolv_epi32(_mm_shuffle_epi32(all, 0xff), _mm_setr_epi32(4, 2, 0, 30));
  const __m128i sc = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)), _mm_and_si128(high, _mm_set1_epi8(48)));
  return _mm_sub_epi8(sc, _mm_set1_epi8(32));
}

struct WideQ3_K : FormQ3_K, WideForm {
  using Ready = Act256;
  static constexpr int kBias = 124, kManyBlocks = 9;
  template <int NT, int kPlanes>
  FT_INLINE static void sums(const Block &b, const Act256 *const *a, Column<NT> &c, int row) {
    const I16 sc = _mm512_broadcast_i32x4(wide_scales_q3(b.scales)), sc2 = _mm512_add_epi8(sc, sc);
    const I16 multiples = _mm512_add_epi8(_mm512_maskz_mov_epi64(0xcc, sc), _mm512_maskz_mov_epi64(0xf0, sc2));
    const I16 upper = _mm512_add_epi8(multiples, _mm512_set1_epi8(kBias));
    const I16 lower = _mm512_sub_epi8(upper, _mm512_add_epi8(sc2, sc2));
    const I16 h = twice(b.hmask);
    const I16 third[4] = {bits<-6, -5, 64>(h), bits<-4, -3, 64>(h), bits<-2, -1, 64>(h), bits<0, 1, 64>(h)};
    I16 hi[NT], lo[NT];
    for (int t = 0; t < NT; ++t) hi[t] = lo[t] = _mm512_setzero_si512();
    for (int s = 0; s < 4; ++s) {
      const I16 q = twice(b.qs + 32 * (s >> 1));
      const I16 at = merge(s & 1 ? down(q, 0, 2) : up(q, 4, 2), 48, _mm512_or_si512(third[s], group_numbers(s, 1)));
      add_bytes<NT, kPlanes>(_mm512_permutex2var_epi8(lower, at, upper), a, s, hi, lo);
    }
    for (int t = 0; t < NT; ++t) c.sums[t][row] = fold_halves(hi[t], lo[t]);
    c.factors[row] = uint32_t(word16(&b.d));
  }
};

// Activations of IQ4_XS as its nibbles lie: of four groups of 32 at a time the first halves, then the second ones; and
// what the sums of a plane's groups begin with, because the table's values are biased.
struct ReadyIQ4_XS {
  I16 planes[2][4], begin[2][2];
  FT_INLINE void set(const Act256 &a) {
    for (int p = 0; p < 2; ++p) {
      const int8_t *plane = p == 0 ? a.hi : a.lo;
      const I8 less = _mm256_slli_epi32(_mm256_cvtepi16_epi32(load16(a.sum32[p])), 7);
      const I16 begins = _mm512_castsi256_si512(_mm256_sub_epi32(_mm256_setzero_si256(), less));
      for (int i = 0; i < 2; ++i) {
        const I16 x = load64(plane + 128 * i), y = load64(plane + 128 * i + 64);
        planes[p][2 * i] = _mm512_shuffle_i64x2(x, y, 0x88);
        planes[p][2 * i + 1] = _mm512_shuffle_i64x2(x, y, 0xdd);
        begin[p][i] = _mm512_maskz_expand_epi32(0x1111, i == 0 ? begins : _mm512_shuffle_i64x2(begins, begins, 1));
      }
    }
  }
};

struct WideIQ4_XS : FormIQ4_XS, WideForm {
  using Ready = ReadyIQ4_XS;
  static constexpr int kRows = 2;
  FT_INLINE static I16 scales(const Block &b) {
    const uint64_t low = _pdep_u64(word32(b.scales_l), 0x0f0f0f0f0f0f0f0f);
    const uint64_t high = _pdep_u64(b.scales_h, 0x3030303030303030);
    const __m128i sc = _mm_sub_epi8(_mm_cvtsi64_si128(int64_t(low | high)), _mm_set1_epi8(32));
    return _mm512_castsi256_si512(_mm256_cvtepi8_epi32(sc));
  }
  // Of R rows, which share loads of the activations.
  template <int R, int NT, int kPlanes>
  FT_INLINE static void rows(const Block *const *b, const Ready *const *a, Column<NT> &c, int row) {
    const I16 table = _mm512_add_epi8(_mm512_broadcast_i32x4(load16(kTableIQ4)), _mm512_set1_epi8(-128));
    I16 sc[R], sum[R][NT][2];
    for (int r = 0; r < R; ++r) sc[r] = scales(*b[r]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const I16 first = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      const I16 at = _mm512_add_epi32(_mm512_set1_epi32(4 * i), first);
      for (int r = 0; r < R; ++r) {
        const I16 q = load64(b[r]->qs + 64 * i), scale = _mm512_permutexvar_epi32(at, sc[r]);
        const I16 low = _mm512_permutexvar_epi8(q, table);
        const I16 high = _mm512_permutexvar_epi8(_mm512_srli_epi16(q, 4), table);
        for (int t = 0; t < NT; ++t) {
          for (int p = 0; p < kPlanes; ++p) {
            I16 dot = _mm512_dpbusd_epi32(a[t]->begin[p][i], low, a[t]->planes[p][2 * i]);
            dot = _mm512_mullo_epi32(_mm512_dpbusd_epi32(dot, high, a[t]->planes[p][2 * i + 1]), scale);
            sum[r][t][p] = i == 0 ? dot : _mm512_add_epi32(sum[r][t][p], dot);
          }
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < NT; ++t) {
        c.sums[t][row + r] = fold_halves(sum[r][t][0], kPlanes == 2 ? sum[r][t][1] : _mm512_setzero_si512());
      }
      c.factors[row + r] = uint32_t(word16(&b[r]->d));
    }
  }
};

}  // namespace
}  // namespace ft
#endif
#endif
