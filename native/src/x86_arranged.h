// x86_arranged.h - products of the IQ2 and IQ3 types with activations that are arranged for them first. A vector k of
// four holds the k-th 8 values of each 32 (a quadword each), so that sums of several vectors have one scale.
#ifndef FT_X86_ARRANGED_H
#define FT_X86_ARRANGED_H
#include "x86_grids.h"
#include "x86_products.h"

namespace ft {
namespace {

// Activations of a block: of each plane the four vectors, and what the bias of 64 adds to sums of the vectors 0, 1 and
// 2, 3 (of all four where a scale is of 32 values), negative; that is left out where kernels know no bias.
struct GridAct {
  alignas(64) int8_t plane[2][4][64];
  int32_t start[2][2][16];
};

// Of four groups of 32 values: the k-th 8 of each, for k of 0 to 3.
struct Quarters {
  I8 of[4];
};

FT_INLINE Quarters quarters_of(const int8_t *p) {
  const I8 a = load(p), b = load(p + 32), c = load(p + 64), d = load(p + 96);
  const I8 ab0 = _mm256_unpacklo_epi64(a, b), ab1 = _mm256_unpackhi_epi64(a, b);
  const I8 cd0 = _mm256_unpacklo_epi64(c, d), cd1 = _mm256_unpackhi_epi64(c, d);
  return {{_mm256_permute2x128_si256(ab0, cd0, 0x20), _mm256_permute2x128_si256(ab1, cd1, 0x20),
           _mm256_permute2x128_si256(ab0, cd0, 0x31), _mm256_permute2x128_si256(ab1, cd1, 0x31)}};
}

constexpr int64_t kMaxArranged = 128;  // blocks of a row; the kernels of longer rows take activations as they are
struct GridRow {
  GridAct blocks[kMaxArranged + 1];  // scales behind the last; those of 128 blocks need less than one
};

template <class Wide, int NT, int kPlanes>
inline void rows_arranged(const Matrix &m, const void *const *act, float *const *out) {
  GridRow rows[NT];
  const void *arranged[NT];
  for (int t = 0; t < NT; ++t) {
    const Act256 *a = static_cast<const Act256 *>(act[t]);
    for (int64_t b = 0; b < m.nb; ++b) Wide::template arrange<kPlanes>(a[b], rows[t].blocks[b]);
    std::memcpy(rows[t].blocks + m.nb, a + m.nb, size_t(pad8(m.nb)) * sizeof(float));
    arranged[t] = rows[t].blocks;
  }
  rows_tokens<Wide, GridAct, NT, kPlanes>(m, arranged, out);
}

// Rows are taken in strips that stay in the second cache while batches of up to Wide::kTokens take them.
template <class Wide, int kPlanes>
inline void matvec_strips(const Matrix &all, const void *const *act, int n, float *const *out) {
  Matrix m = all;
  const int64_t step = n <= Wide::kTokens ? all.row1 - all.row0 : 1 + 131072 / all.row_bytes;
  for (m.row0 = all.row0; m.row0 < all.row1; m.row0 = m.row1) {
    m.row1 = m.row0 + step < all.row1 ? m.row0 + step : all.row1;
    int t = 0;
    if constexpr (Wide::kTokens == 4) {
      for (; t + 4 <= n; t += 4) rows_arranged<Wide, 4, kPlanes>(m, act + t, out + t);
      for (; t + 2 <= n; t += 2) rows_arranged<Wide, 2, kPlanes>(m, act + t, out + t);
    }
    for (; t < n; ++t) rows_arranged<Wide, 1, kPlanes>(m, act + t, out + t);
  }
}

template <class Wide>
inline void matvec_arranged(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                            const void *const *act, int n, int planes, float *const *out) {
  const Matrix m = {w, row_bytes, n_cols / 256, row0, row1};
  if (m.nb > kMaxArranged) {
    matvec_vec<typename Wide::Vec, Act256>(w, row_bytes, n_cols, row0, row1, act, n, planes, out);
  } else if (planes == 2) {
    matvec_strips<Wide, 2>(m, act, n, out);
  } else {
    matvec_strips<Wide, 1>(m, act, n, out);
  }
}

}  // namespace
}  // namespace ft
#endif
