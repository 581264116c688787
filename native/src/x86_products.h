// x86_products.h - products of rows of class 256 (docs/numerics.md, section 3) with the vectors of x86_forms.h.
//
// The blocks of a row are taken eight at a time. Each leaves vectors of partial int32 sums; fold8 turns the eight into
// one vector of eight block sums, so that lane = block index mod 8, as lanes8 wants it. NT activations share one
// reading of the row.
#ifndef FT_X86_PRODUCTS_H
#define FT_X86_PRODUCTS_H
#include <utility>

#include "kernels_common.h"
#include "x86_forms.h"

namespace ft {
namespace {

// Where a group of eight blocks stands: its weights, how many blocks there are, and the activations that they meet.
template <class Act, int NT>
struct Group {
  const uint8_t *w;
  int count;
  int64_t first, nb;      // the first block's place in the row; places wrap at nb
  const Act *act[NT];
  const float *dx[NT];    // of the eight places from `first` on
};

// What is known of a group when it is compiled: eight blocks of one row, eight across the end of a row, or fewer.
enum Shape { kStraight, kWrapping, kPartial };

// --- a group's terms ----------------------------------------------------------------------------------------------

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
  return _mm256_sub_epi32(sum, _mm256_slli_epi32(extra, Vec::kBias == 64 ? 6 : Vec::kBias == 32 ? 5 : 2));
}

template <class Vec>
FT_INLINE I8 add_plane(I8 sum, I8 n, const int8_t *plane, I8 sc) {
  if (Vec::kSigned) return add_scaled(sum, _mm256_abs_epi8(n), _mm256_sign_epi8(load(plane), n), sc);
  return add_scaled(sum, n, load(plane), sc);
}

template <class Vec, int NT, int kPlanes, class Ready>
FT_INLINE void block_256(const typename Vec::Block &w, const Ready &ready, const Act256 *const *a, Sums *sums, int i) {
  const VecScales s = Vec::scales(w);
  I8 hi[NT], lo[NT];
  for (int t = 0; t < NT; ++t) hi[t] = lo[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int step = 0; step < 8 / Vec::kPart; ++step) {
    I8 n[Vec::kPart];
    Vec::parts(ready, step, n);
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

// What the blocks of a group are prepared to before the first product, so that what was stored is not waited for.
template <class Vec, class Ready = decltype(Vec::prepare(std::declval<const typename Vec::Block &>()))>
struct PreparedBlocks {
  Ready blocks[8];
  FT_INLINE PreparedBlocks(const typename Vec::Block *w, int count) {
    for (int i = 0; i < count; ++i) blocks[i] = Vec::prepare(w[i]);
  }
  FT_INLINE const Ready &at(int i) const { return blocks[i]; }
};
template <class Vec, class Block>
struct PreparedBlocks<Vec, const Block &> {
  const Block *blocks;
  FT_INLINE PreparedBlocks(const Block *w, int) : blocks(w) {}
  FT_INLINE const Block &at(int i) const { return blocks[i]; }
};

template <class Vec, int NT, int kPlanes, Shape kShape>
FT_INLINE void terms_256(const Group<Act256, NT> &g, F8 *terms) {
  using Block = typename Vec::Block;
  const int count = kShape == kPartial ? g.count : 8;
  Sums sums[NT];
  int64_t place = g.first;
  const auto *blocks = reinterpret_cast<const Block *>(g.w);
  PreparedBlocks<Vec> ready(blocks, count);
  for (int i = 0; i < count; ++i) {
    const Block &w = blocks[i];
    prefetch<sizeof(Block)>(&w);
    const Act256 *a[NT];
    for (int t = 0; t < NT; ++t) a[t] = g.act[t] + place;
    block_256<Vec, NT, kPlanes>(w, ready.at(i), a, sums, i);
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
FT_INLINE void terms_of(const Group<Act256, NT> &g, F8 *terms) {
  terms_256<Vec, NT, kPlanes, kShape>(g, terms);
}

template <class Act>
inline const float *scales_behind(const void *act, int64_t nb) {
  return reinterpret_cast<const float *>(static_cast<const Act *>(act) + nb);
}

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
      g.dx[t] = scales_behind<Act>(act[t], m.nb);
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
inline void wrapped_scales(const void *act, int64_t nb, float *dx) {
  const float *from = scales_behind<Act>(act, nb);
  std::memcpy(dx, from, size_t(nb) * 4);
  for (int64_t i = nb; i < nb + 8; ++i) dx[i] = dx[i - nb];
}

// Rows whose blocks do not fill groups of eight lie one behind the other, so groups run on across their ends; each
// row's part of a group is moved to the lanes where it belongs.
template <class Vec, class Act, int NT, int kPlanes>
inline void rows_together(const Matrix &m, const void *const *act, float *const *out) {
  float dx[NT][kMaxStrip + 8];
  F8 sum[NT], terms[NT];
  Group<Act, NT> g;
  for (int t = 0; t < NT; ++t) {
    wrapped_scales<Act>(act[t], m.nb, dx[t]);
    sum[t] = _mm256_setzero_ps();
    g.act[t] = static_cast<const Act *>(act[t]);
  }
  g.w = m.w + m.row0 * m.row_bytes;
  g.nb = m.nb;
  int64_t place = 0, row = m.row0;
  for (int64_t left = (m.row1 - m.row0) * m.nb; left > 0; left -= 8) {
    g.count = left < 8 ? int(left) : 8;
    g.first = place;
    for (int t = 0; t < NT; ++t) g.dx[t] = dx[t] + place;
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
  const Matrix m = {w, row_bytes, n_cols / 256, row0, row1};
  if (planes == 2) {
    matvec_planes<Vec, Act, 2>(m, act, n, out);
  } else {
    matvec_planes<Vec, Act, 1>(m, act, n, out);
  }
}

}  // namespace
}  // namespace ft
#endif
