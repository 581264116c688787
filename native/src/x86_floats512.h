// x86_floats512.h - products of F32, F16 and BF16 rows with 512-bit vectors: lanes32 of docs/numerics.md is two vectors
// a row, of several rows at a time, which share loads and hide the latency of the additions. For several tokens: one token
// is bound by memory, which is faster in order (x86_floats.h).
#ifndef FT_X86_FLOATS512_H
#define FT_X86_FLOATS512_H
#ifdef __AVX512BW__
#include "x86_floats.h"

namespace ft {
namespace {

using F16x = __m512;

// 32 values in two vectors: the first and the second sixteen, or the even and the odd ones.
struct Lanes32 {
  F16x of[2];
};

FT_INLINE Lanes32 even_odd32(const float *x) {
  const F16x a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  return {{_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b)}};
}

FT_INLINE Lanes32 in_order32(const float *x) { return {{_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)}}; }

// Weights and activations of 32 columns, in the same order.
struct WideF32 : VecF32 {
  static constexpr bool kEvenOdd = false;
  FT_INLINE static Lanes32 weights(const float *w) { return in_order32(w); }
  FT_INLINE static Lanes32 floats(const float *x) { return in_order32(x); }
};
struct WideF16 : VecF16 {
  static constexpr bool kEvenOdd = false;
  FT_INLINE static Lanes32 weights(const uint16_t *w) {
    return {{_mm512_cvtph_ps(load(w)), _mm512_cvtph_ps(load(w + 16))}};
  }
  FT_INLINE static Lanes32 floats(const float *x) { return in_order32(x); }
};
// Even and odd values are widened without a shuffle.
struct WideBF16 : VecBF16 {
  static constexpr bool kEvenOdd = true;
  FT_INLINE static Lanes32 weights(const uint16_t *w) {
    const __m512i v = _mm512_loadu_si512(w), odd = _mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000)));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), _mm512_castsi512_ps(odd)}};
  }
  FT_INLINE static Lanes32 floats(const float *x) { return even_odd32(x); }
};
// Sums of R rows and NT tokens.
template <class Wide, int R, int NT>
struct FloatSums {
  using Word = typename Wide::Word;
  Lanes32 sum[R][NT];
  FT_INLINE FloatSums() {
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < NT; ++t) sum[r][t] = {{_mm512_setzero_ps(), _mm512_setzero_ps()}};
    }
  }
  // 32 columns of the rows at w + r * step and of the tokens at x[t] + at.
  FT_INLINE void add(const Word *w, int64_t step, const float *const *x, int64_t at) {
    Lanes32 a[NT];
    for (int t = 0; t < NT; ++t) a[t] = Wide::floats(x[t] + at);
    for (int r = 0; r < R; ++r) {
      const Lanes32 v = Wide::weights(w + r * step);
      for (int t = 0; t < NT; ++t) {
        for (int j = 0; j < 2; ++j) {
          sum[r][t].of[j] = _mm512_add_ps(sum[r][t].of[j], _mm512_mul_ps(v.of[j], a[t].of[j]));
        }
      }
    }
  }
  // The last columns, fewer than 32, with zeros behind them.
  inline void add_rest(const Word *w, int64_t step, const float *const *x, int64_t first, int64_t count) {
    Word rest[R][32] = {};
    float values[NT][32] = {};
    const float *at[NT];
    for (int r = 0; r < R; ++r) std::memcpy(rest[r], w + r * step, size_t(count) * sizeof(Word));
    for (int t = 0; t < NT; ++t) {
      std::memcpy(values[t], x[t] + first, size_t(count) * sizeof(float));
      at[t] = values[t];
    }
    add(rest[0], 32, at, 0);
  }
  FT_INLINE float result(int r, int t) const {
    Lanes32 l = sum[r][t];
    if (Wide::kEvenOdd) {
      const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
      l = {{_mm512_permutex2var_ps(l.of[0], first, l.of[1]), _mm512_permutex2var_ps(l.of[0], second, l.of[1])}};
    }
    const F16x s = _mm512_add_ps(l.of[0], l.of[1]);
    return tree8(_mm256_add_ps(_mm512_extractf32x8_ps(s, 0), _mm512_extractf32x8_ps(s, 1)));
  }
};

template <class Wide, int R, int NT>
inline void float_rows(const typename Wide::Word *w, int64_t step, int64_t n_cols, const float *const *x,
                       float *const *out, int64_t row) {
  FloatSums<Wide, R, NT> sums;
  const int64_t whole = n_cols & ~int64_t(31);
  for (int64_t i = 0; i < whole; i += 32) {
    for (int r = 0; r < R; ++r) prefetch<32 * sizeof(*w)>(w + r * step + i);
    sums.add(w + i, step, x, i);
  }
  if (whole < n_cols) sums.add_rest(w + whole, step, x, whole, n_cols - whole);
  for (int t = 0; t < NT; ++t) {
    for (int r = 0; r < R; ++r) out[t][row + r] = sums.result(r, t);
  }
}

// A matrix of floats; rows of it.
template <class Wide>
struct FloatMatrix {
  using Word = typename Wide::Word;
  const uint8_t *w;
  int64_t row_bytes, n_cols, row0, row1;
  template <int R, int NT>
  FT_INLINE void rows(int64_t row, const float *const *x, float *const *out) const {
    const auto *at = reinterpret_cast<const Word *>(w + row * row_bytes);
    float_rows<Wide, R, NT>(at, row_bytes / int64_t(sizeof(Word)), n_cols, x, out, row);
  }
  // Of two tokens or more.
  template <int R>
  inline void tokens(int64_t row, const float *const *x, int n, float *const *out) const {
    int t = 0;
    for (; t + 2 <= n; t += 2) rows<R, 2>(row, x + t, out + t);
    if (t < n) rows<R, 1>(row, x + t, out + t);
  }
};

template <class Wide, class Vec>
inline void matvec_float512(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                            const void *const *act, int n, int planes, float *const *out) {
  const float *x[8];
  for (int t = 0; t < n; ++t) x[t] = static_cast<const float *>(act[t]);
  if (n >= 2) {
    const FloatMatrix<Wide> m = {w, row_bytes, n_cols, row0, row1};
    int64_t r = row0;
    for (; r + 4 <= row1; r += 4) m.template tokens<4>(r, x, n, out);
    for (; r < row1; ++r) m.template tokens<1>(r, x, n, out);
  } else {
    matvec_float_vec<Vec>(w, row_bytes, n_cols, row0, row1, act, n, planes, out);
  }
}

}  // namespace
}  // namespace ft
#endif
#endif
