// x86_floats.h - float products, keys and values, decoded rows and the functions of docs/numerics.md, sections 4 to 6.
#ifndef FT_X86_FLOATS_H
#define FT_X86_FLOATS_H
#include "kernels_common.h"
#include "x86_forms.h"

namespace ft {
namespace {

// --- floats ---------------------------------------------------------------------------------------------------

struct VecF32 : WidenF32 {
  static F8 get8(const float *p) { return _mm256_loadu_ps(p); }
};
struct VecF16 : WidenF16 {
  static F8 get8(const uint16_t *p) { return _mm256_cvtph_ps(load16(p)); }
};
struct VecBF16 : WidenBF16 {
  static F8 get8(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
  }
};

// lanes32 as four vectors of lanes; the first fold of lanes32 leaves v.
template <class Vec, int NT>
FT_INLINE void dot_lanes(const typename Vec::Word *w, const float *const *x, int64_t n, F8 *v) {
  F8 l[NT][4];
  for (int t = 0; t < NT; ++t) {
    for (int j = 0; j < 4; ++j) l[t][j] = _mm256_setzero_ps();
  }
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    prefetch<32 * sizeof(typename Vec::Word)>(w + i);
    for (int j = 0; j < 4; ++j) {
      const F8 a = Vec::get8(w + i + 8 * j);
      for (int t = 0; t < NT; ++t) {
        l[t][j] = _mm256_add_ps(l[t][j], _mm256_mul_ps(a, _mm256_loadu_ps(x[t] + i + 8 * j)));
      }
    }
  }
  if (i < n) {
    typename Vec::Word wt[32] = {};
    std::memcpy(wt, w + i, size_t(n - i) * sizeof(typename Vec::Word));
    for (int t = 0; t < NT; ++t) {
      float xt[32] = {};
      std::memcpy(xt, x[t] + i, size_t(n - i) * 4);
      for (int j = 0; j < 4; ++j) {
        l[t][j] = _mm256_add_ps(l[t][j], _mm256_mul_ps(Vec::get8(wt + 8 * j), _mm256_loadu_ps(xt + 8 * j)));
      }
    }
  }
  for (int t = 0; t < NT; ++t) {
    v[t] = _mm256_add_ps(_mm256_add_ps(l[t][0], l[t][2]), _mm256_add_ps(l[t][1], l[t][3]));
  }
}

template <class Vec, int NT>
inline void float_tokens(const uint8_t *row, int64_t n_cols, const void *const *act, float *const *out, int64_t r) {
  const float *x[NT];
  F8 v[NT];
  for (int t = 0; t < NT; ++t) x[t] = static_cast<const float *>(act[t]);
  dot_lanes<Vec, NT>(reinterpret_cast<const typename Vec::Word *>(row), x, n_cols, v);
  for (int t = 0; t < NT; ++t) out[t][r] = tree8(v[t]);
}

template <class Vec>
inline void matvec_float_vec(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                             const void *const *act, int n, int, float *const *out) {
  for (int64_t r = row0; r < row1; ++r) {
    const uint8_t *row = w + r * row_bytes;
    int t = 0;
    for (; t + 2 <= n; t += 2) float_tokens<Vec, 2>(row, n_cols, act + t, out + t, r);
    if (t < n) float_tokens<Vec, 1>(row, n_cols, act + t, out + t, r);
  }
}

inline float dot_f32_vec(const float *a, const float *b, int64_t n) {
  F8 v;
  dot_lanes<VecF32, 1>(a, &b, n, &v);
  return tree8(v);
}

inline float sumsq_vec(const float *x, int64_t n) { return dot_f32_vec(x, x, n); }

inline F8 halves(F8 a, F8 b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline F8 quarters(F8 ab, F8 cd) {
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

// tree8 of eight vectors at once.
FT_INLINE F8 tree8_of8(const F8 *v) {
  const F8 a = quarters(halves(v[0], v[1]), halves(v[2], v[3]));  // v0 v2 | v1 v3, even and odd halves of each
  const F8 b = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
  const F8 s = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));  // 0 2 4 6 | 1 3 5 7
  return _mm256_permutevar8x32_ps(s, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <class Vec>
inline void dots_vec(const float *q, const typename Vec::Word *k, int64_t dim, int64_t n, float *s) {
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    F8 v[8];
    for (int i = 0; i < 8; ++i) dot_lanes<Vec, 1>(k + (j + i) * dim, &q, dim, v + i);
    _mm256_storeu_ps(s + j, tree8_of8(v));
  }
  for (; j < n; ++j) {
    F8 v;
    dot_lanes<Vec, 1>(k + j * dim, &q, dim, &v);
    s[j] = tree8(v);
  }
}

// kVectors * 8 columns from v on, kept in registers over all rows.
template <class Vec, int kVectors>
inline void wsum_columns(const float *p, const typename Vec::Word *v, int64_t dim, int64_t n, float *o) {
  F8 sum[kVectors];
  for (int i = 0; i < kVectors; ++i) sum[i] = _mm256_setzero_ps();
  for (int64_t j = 0; j < n; ++j) {
    const F8 f = _mm256_broadcast_ss(p + j);
    for (int i = 0; i < kVectors; ++i) {
      sum[i] = _mm256_add_ps(sum[i], _mm256_mul_ps(f, Vec::get8(v + j * dim + 8 * i)));
    }
  }
  for (int i = 0; i < kVectors; ++i) _mm256_storeu_ps(o + 8 * i, sum[i]);
}

template <class Vec>
inline void wsum_vec(const float *p, const typename Vec::Word *v, int64_t dim, int64_t n, float *o) {
  int64_t c = 0;
  for (; c + 64 <= dim; c += 64) wsum_columns<Vec, 8>(p, v + c, dim, n, o + c);
  for (; c + 8 <= dim; c += 8) wsum_columns<Vec, 1>(p, v + c, dim, n, o + c);
  for (; c < dim; ++c) {
    float sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += p[j] * Vec::get(v[j * dim + c]);
    o[c] = sum;
  }
}

inline void to_f16_vec(const float *x, uint16_t *y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(y + i), h);
  }
  for (; i < n; ++i) y[i] = float_half(x[i]);
}

inline void decode_f16_vec(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const uint16_t *>(src);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, VecF16::get8(w + i));
  for (; i < n; ++i) dst[i] = half_float(w[i]);
}

// --- rows of weights in fp32 ----------------------------------------------------------------------------------

FT_INLINE F8 floats8(const int8_t *n) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(n))));
}

// dst[0..count) = (d * n) + m, or - m, or d * n.
template <int kSign>
FT_INLINE void affine(const int8_t *n, float d, float m, float *dst, int count) {
  const F8 dv = _mm256_set1_ps(d), mv = _mm256_set1_ps(m);
  for (int i = 0; i < count; i += 8) {
    F8 y = _mm256_mul_ps(dv, floats8(n + i));
    if (kSign > 0) y = _mm256_add_ps(y, mv);
    if (kSign < 0) y = _mm256_sub_ps(y, mv);
    _mm256_storeu_ps(dst + i, y);
  }
}

template <class Vec>
inline void decode_32_vec(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const typename Vec::Block *>(src);
  for (int64_t b = 0; b < n / 32; ++b) {
    alignas(32) int8_t q[32];
    _mm256_store_si256(reinterpret_cast<__m256i *>(q), Vec::bytes(w[b]));
    affine<Vec::kHasMin ? 1 : 0>(q, Vec::d(w[b]), Vec::m(w[b]), dst + 32 * b, 32);
  }
}

template <class Form, class Vec>
inline void decode_256_vec(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const typename Vec::Block *>(src);
  for (int64_t b = 0; b < n / 256; ++b) {
    alignas(32) int8_t q[256];
    const auto &ready = Vec::prepare(w[b]);
    for (int step = 0; step < 8 / Vec::kPart; ++step) {
      I8 part[Vec::kPart];
      Vec::parts(ready, step, part);
      for (int i = 0; i < Vec::kPart; ++i) {
        _mm256_store_si256(reinterpret_cast<__m256i *>(q + 32 * (step * Vec::kPart + i)),
                           _mm256_sub_epi8(part[i], _mm256_set1_epi8(Vec::kBias)));
      }
    }
    Scales s = {};
    Form::scales(w[b], s);
    const float d = Vec::d(w[b]), dmin = Vec::dmin(w[b]);
    for (int j = 0; j < 16; ++j) {
      affine<Vec::kHasMin ? -1 : 0>(q + 16 * j, d * float(s.sc[j]), dmin * float(s.mn[j]), dst + 256 * b + 16 * j, 16);
    }
  }
}

// --- functions ------------------------------------------------------------------------------------------------

FT_INLINE F8 exp8(F8 x) {
  const F8 one = _mm256_set1_ps(1.0f), round = _mm256_set1_ps(kRound);
  const F8 top = _mm256_min_ps(_mm256_set1_ps(88.0f), x);  // a NaN in x stays
  const F8 shifted = _mm256_add_ps(_mm256_mul_ps(top, _mm256_set1_ps(1.44269504088896341f)), round);
  const F8 k = _mm256_sub_ps(shifted, round);
  const F8 r = _mm256_sub_ps(_mm256_sub_ps(top, _mm256_mul_ps(k, _mm256_set1_ps(0.693359375f))),
                             _mm256_mul_ps(k, _mm256_set1_ps(-2.12194440e-4f)));
  F8 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(5.0000001201e-1f));
  const F8 y = _mm256_add_ps(_mm256_add_ps(_mm256_mul_ps(p, _mm256_mul_ps(r, r)), r), one);
  const I8 n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(int(kRoundBits) - 127));
  const F8 power = _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
  const F8 under = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
  return _mm256_andnot_ps(under, _mm256_mul_ps(y, power));
}

inline F8 negate(F8 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

// x / (1 + exp(-u))
FT_INLINE F8 gated(F8 x, F8 u) { return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(negate(u)))); }

struct MapExpMinus {
  F8 m;
  F8 operator()(F8 x, F8) const { return exp8(_mm256_sub_ps(x, m)); }
};
struct MapSigmoid {
  F8 operator()(F8 x, F8) const { return gated(_mm256_set1_ps(1.0f), x); }
};
struct MapSilu {
  F8 operator()(F8 g, F8 u) const { return _mm256_mul_ps(gated(g, g), u); }
};
struct MapGelu {
  F8 operator()(F8 g, F8 u) const {
    const F8 cubic = _mm256_mul_ps(_mm256_set1_ps(0.07135481627159992f), _mm256_mul_ps(g, g));
    const F8 v = _mm256_mul_ps(g, _mm256_add_ps(_mm256_set1_ps(1.5957691216057308f), cubic));
    return _mm256_mul_ps(gated(g, v), u);
  }
};

template <class Map>
inline void map8(const Map &map, const float *a, const float *b, float *y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, map(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
  if (i < n) {
    alignas(32) float at[8] = {}, bt[8] = {};
    std::memcpy(at, a + i, size_t(n - i) * 4);
    std::memcpy(bt, b + i, size_t(n - i) * 4);
    _mm256_store_ps(at, map(_mm256_load_ps(at), _mm256_load_ps(bt)));
    std::memcpy(y + i, at, size_t(n - i) * 4);
  }
}

inline void exp_minus_vec(const float *x, float m, float *y, int64_t n) {
  map8(MapExpMinus{_mm256_set1_ps(m)}, x, x, y, n);
}
inline void sigmoid_vec(const float *x, float *y, int64_t n) { map8(MapSigmoid{}, x, x, y, n); }
inline void silu_mul_vec(const float *g, const float *u, float *y, int64_t n) { map8(MapSilu{}, g, u, y, n); }
inline void gelu_mul_vec(const float *g, const float *u, float *y, int64_t n) { map8(MapGelu{}, g, u, y, n); }

}  // namespace
}  // namespace ft
#endif
