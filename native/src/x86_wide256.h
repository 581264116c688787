// x86_wide256.h - products of class 256 rows with the forms of x86_wide_forms.h: docs/numerics.md, section 3.
//
// The sums of eight blocks are folded to one a lane. Of long rows these are eight blocks side by side, so that a lane is a
// lane of lanes8. Of short ones they are the same block of eight rows: a lane is a row, and the terms go to one of eight
// vectors of sums, the block's number. Neither needs more than the nearest cache holds beside the stream of weights.
#ifndef FT_X86_WIDE256_H
#define FT_X86_WIDE256_H
#ifdef __AVX512VBMI__
#include <algorithm>

#include "x86_wide_forms.h"

namespace ft {
namespace {

// The terms of a column, one a lane.
template <class W, int NT, int kPlanes, class Met>
FT_INLINE F8 column_terms(const Column<NT> &c, int t, const Met &met) {
  const I8 words = load(c.factors);
  I16 whole = fold8(c.sums[t]);
  if constexpr (W::kBias != 0) {
    const I16 totals = _mm512_inserti64x4(_mm512_castsi256_si512(met.total(0)), met.total(1), 1);
    whole = _mm512_sub_epi32(whole, _mm512_mullo_epi32(totals, _mm512_set1_epi32(W::kBias)));
  }
  const __m512 sums = _mm512_cvtepi32_ps(whole);
  F8 sum = _mm512_castps512_ps256(sums);
  if (kPlanes == 2) sum = _mm256_add_ps(_mm256_mul_ps(sum, _mm256_set1_ps(256.0f)), _mm512_extractf32x8_ps(sums, 1));
  F8 d = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(words));
  if constexpr (W::kFactor != 1) d = _mm256_mul_ps(d, _mm256_set1_ps(W::kFactor));
  const F8 term = _mm256_mul_ps(_mm256_mul_ps(d, met.dx()), sum);
  if constexpr (!W::kHasMin) {
    return term;
  } else {
    const F8 dmin = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(_mm256_srli_epi32(words, 16)));
    return _mm256_sub_ps(term, _mm256_mul_ps(_mm256_mul_ps(dmin, met.dx()), W::minimums(c, met)));
  }
}

// A row of activations, made ready.
constexpr int64_t kMaxReady = 128;  // blocks; longer rows are for the narrower kernels
template <class Ready, int NT>
struct WideActs {
  Ready ready[NT][kMaxReady];
  FT_INLINE WideActs(const void *const *act, int64_t nb) {
    for (int t = 0; t < NT; ++t) {
      for (int64_t b = 0; b < nb; ++b) ready[t][b].set(static_cast<const Act256 *>(act[t])[b]);
    }
  }
  FT_INLINE const Ready *at(int t, int64_t b) const { return &ready[t][b]; }
};
template <int NT>
struct WideActs<Act256, NT> {
  const void *const *act;
  FT_INLINE WideActs(const void *const *acts, int64_t) : act(acts) {}
  FT_INLINE const Act256 *at(int t, int64_t b) const { return static_cast<const Act256 *>(act[t]) + b; }
};

template <class W, int R, int NT, int kPlanes, class Block>
FT_INLINE void sums_of_rows(const Block *const *b, const typename W::Ready *const *a, Column<NT> &c, int row) {
  if constexpr (W::kRows == 1) {
    W::template sums<NT, kPlanes>(**b, a, c, row);
  } else {
    W::template rows<R, NT, kPlanes>(b, a, c, row);
  }
}

// Short rows eight by eight, of these R together: lanes are rows. Returns the first row that is left. Memory is asked for
// in its own order.
constexpr int kShort = 8;
template <class W, int R, int NT, int kPlanes>
inline int64_t short_rows(const Matrix &m, const void *const *act, float *const *out) {
  using Block = typename W::Block;
  Column<NT> columns[kShort];
  const WideActs<typename W::Ready, NT> acts(act, m.nb);
  int64_t r = m.row0;
  for (; r + 8 <= m.row1; r += 8) {
    for (int i = 0; i < 8; i += R) {
      for (int64_t b = 0; b < m.nb; ++b) {
        const typename W::Ready *a[NT];
        for (int t = 0; t < NT; ++t) a[t] = acts.at(t, b);
        const Block *w[R];
        for (int k = 0; k < R; ++k) w[k] = reinterpret_cast<const Block *>(m.w + (r + i + k) * m.row_bytes) + b;
        prefetch<R * sizeof(Block)>(reinterpret_cast<const Block *>(m.w + (r + i) * m.row_bytes) + R * b);
        sums_of_rows<W, R, NT, kPlanes>(w, a, columns[b], i);
      }
    }
    for (int t = 0; t < NT; ++t) {
      F8 l[kShort];
      for (int64_t b = 0; b < kShort; ++b) {
        l[b] = _mm256_setzero_ps();
        if (b >= m.nb) continue;
        const OneBlock met = {static_cast<const Act256 *>(act[t])[b], act_scales(act[t], 256, m.nb)[b]};
        l[b] = _mm256_add_ps(l[b], column_terms<W, NT, kPlanes>(columns[b], t, met));
      }
      const F8 even = _mm256_add_ps(_mm256_add_ps(l[0], l[4]), _mm256_add_ps(l[2], l[6]));
      const F8 odd = _mm256_add_ps(_mm256_add_ps(l[1], l[5]), _mm256_add_ps(l[3], l[7]));
      _mm256_storeu_ps(out[t] + r, _mm256_add_ps(even, odd));
    }
  }
  return r;
}

// What eight blocks side by side need of the activations of a row: the numbers of OneBlock, one behind the other, and
// zeros for eight blocks more.
template <class W>
struct Row {
  alignas(64) uint64_t digits8[3][kMaxReady + 8];
  alignas(64) __m128i digits16[3][kMaxReady + 8];
  alignas(32) int32_t totals[2][kMaxReady + 8];
  const float *dx;

  FT_INLINE void set(const void *act, int64_t nb) {
    dx = act_scales(act, 256, nb);
    static const Act256 none = {};
    for (int64_t b = 0; (W::kHasMin || W::kBias != 0) && b < pad8(nb); ++b) {
      const Act256 &a = b < nb ? static_cast<const Act256 *>(act)[b] : none;
      for (int i = 0; W::kHasMin && i < 3; ++i) {
        if constexpr (W::kMinGroups == 8) std::memcpy(&digits8[i][b], a.digits32[i], 8);
        if constexpr (W::kMinGroups == 16) digits16[i][b] = load16(a.digits16[i]);
      }
      for (int i = 0; W::kBias != 0 && i < 2; ++i) totals[i][b] = a.total[i];
    }
  }
};

template <class W>
struct EightBlocks {
  const Row<W> &row;
  int64_t b;
  FT_INLINE F8 dx() const { return _mm256_loadu_ps(row.dx + b); }
  FT_INLINE I8 total(int plane) const { return load(row.totals[plane] + b); }
  FT_INLINE I16 digits8(int i) const { return load64(row.digits8[i] + b); }
  FT_INLINE I16 digits16(int i, int half) const { return load64(row.digits16[i] + b + 4 * half); }
};

// Sums of up to eight blocks of a row; the others are zero.
template <class W, int NT, int kPlanes>
FT_INLINE void row_sums(const typename W::Block *w, int64_t count, const typename W::Ready *const *acts, Column<NT> &c) {
  if (count < 8) std::memset(c.mins, 0, sizeof(c.mins));
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    if (i < count) {
      const typename W::Ready *a[NT];
      for (int t = 0; t < NT; ++t) a[t] = acts[t] + i;
      const typename W::Block *b = w + i;
      prefetch<sizeof(*b)>(b);
      sums_of_rows<W, 1, NT, kPlanes>(&b, a, c, i);
    } else {
      for (int t = 0; t < NT; ++t) c.sums[t][i] = _mm512_setzero_si512();
      c.factors[i] = 0;
    }
  }
}

// Row by row, eight blocks at a time: lanes of a column are the lanes of lanes8.
template <class W, int NT, int kPlanes>
inline void long_rows(const Matrix &m, const void *const *act, float *const *out) {
  using Block = typename W::Block;
  const WideActs<typename W::Ready, NT> acts(act, m.nb);
  Row<W> row[NT];
  for (int t = 0; t < NT; ++t) row[t].set(act[t], m.nb);
  for (int64_t r = m.row0; r < m.row1; ++r) {
    F8 sum[NT];
    for (int t = 0; t < NT; ++t) sum[t] = _mm256_setzero_ps();
    const Block *w = reinterpret_cast<const Block *>(m.w + r * m.row_bytes);
    for (int64_t first = 0; first < m.nb; first += 8) {
      const typename W::Ready *a[NT];
      for (int t = 0; t < NT; ++t) a[t] = acts.at(t, first);
      Column<NT> column;
      if (first + 8 <= m.nb) {
        row_sums<W, NT, kPlanes>(w + first, 8, a, column);
      } else {
        row_sums<W, NT, kPlanes>(w + first, m.nb - first, a, column);
      }
      for (int t = 0; t < NT; ++t) {
        sum[t] = _mm256_add_ps(sum[t], column_terms<W, NT, kPlanes>(column, t, EightBlocks<W>{row[t], first}));
      }
    }
    for (int t = 0; t < NT; ++t) out[t][r] = tree8(sum[t]);
  }
}

template <class W, class Vec, int NT, int kPlanes>
inline void wide_tokens(const Matrix &m, const void *const *act, float *const *out) {
  if (m.nb >= W::kManyBlocks) return long_rows<W, NT, kPlanes>(m, act, out);
  constexpr int R = W::kRows < 4 / NT ? W::kRows : 4 / NT;
  Matrix rest = m;
  rest.row0 = short_rows<W, R, NT, kPlanes>(m, act, out);
  if (rest.row0 == rest.row1) return;
  for (int t = 0; t < NT; ++t) rows_tokens<Vec, Act256, 1, kPlanes>(rest, act + t, out + t);
}

template <class W, class Vec, int kPlanes>
inline void wide_planes(const Matrix &all, const void *const *act, int n, float *const *out) {
  Matrix m = all;
  const int64_t step = n == 1 ? all.row1 - all.row0 : (8 + kStripBytes / all.row_bytes) / 8 * 8;
  for (m.row0 = all.row0; m.row0 < all.row1; m.row0 = m.row1) {
    m.row1 = std::min(m.row0 + step, all.row1);
    int t = 0;
    if constexpr (kPlanes == 2) {
      for (; t + 4 <= n; t += 4) wide_tokens<W, Vec, 4, kPlanes>(m, act + t, out + t);
      for (; t + 2 <= n; t += 2) wide_tokens<W, Vec, 2, kPlanes>(m, act + t, out + t);
    }
    for (; t < n; ++t) wide_tokens<W, Vec, 1, kPlanes>(m, act + t, out + t);
  }
}

template <class W, class Vec>
inline void matvec_wide(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                        const void *const *act, int n, int planes, float *const *out) {
  const Matrix m = {w, row_bytes, n_cols / 256, row0, row1};
  if (m.nb > kMaxReady) {
    matvec_vec<Vec, Act256>(w, row_bytes, n_cols, row0, row1, act, n, planes, out);
  } else if (planes == 2) {
    wide_planes<W, Vec, 2>(m, act, n, out);
  } else {
    wide_planes<W, Vec, 1>(m, act, n, out);
  }
}

}  // namespace
}  // namespace ft
#endif
#endif
