// kernels_common.h - docs/numerics.md in plain C++: included by each kernels_*.cpp, which compiles it with its own
// instruction set (the compiler may use wider registers; it may not reassociate or fuse, so the bits stay) and then
// replaces what it does better by hand. Everything is in an unnamed namespace: no copy is shared between variants.
#ifndef FT_KERNELS_COMMON_H
#define FT_KERNELS_COMMON_H
#include <cmath>
#include <cstdint>
#include <cstring>

#include "blocks_grid.h"
#include "kernels.h"
#include "scalar.h"

namespace ft {
namespace {

// --- section 2: activations -----------------------------------------------------------------------------------

// One block of kWidth values in two planes; returns dx.
template <int kWidth>
inline float quantize_block(const float *x, int planes, int8_t *hi, int8_t *lo) {
  uint32_t top = 0;
  for (int i = 0; i < kWidth; ++i) {
    const uint32_t u = float_bits(x[i]) & 0x7fffffff;
    top = u > top ? u : top;
  }
  const bool special = top >= 0x7f800000, tiny = top < 0x0d800000;  // 2^-100
  if (special || tiny) {
    std::memset(hi, 0, kWidth);
    std::memset(lo, 0, kWidth);
    return special ? bits_float(0x7fc00000) : 0.0f;
  }
  const float limit = planes == 2 ? 32512.0f : 127.0f, amax = bits_float(top), inv = limit / amax;
  int32_t q[kWidth];
  for (int i = 0; i < kWidth; ++i) q[i] = int32_t(float_bits(x[i] * inv + kRound) - kRoundBits);
  if (planes == 2) {
    for (int i = 0; i < kWidth; ++i) {
      const int32_t h = (q[i] + 128) >> 8, l = q[i] - 256 * h;
      hi[i] = int8_t(h);
      lo[i] = int8_t(l == -128 ? -127 : l);
    }
  } else {
    for (int i = 0; i < kWidth; ++i) hi[i] = int8_t(q[i]);
    std::memset(lo, 0, kWidth);
  }
  return amax / limit;
}

inline int32_t plane_sum(const int8_t *p, int n) {
  int32_t sum = 0;
  for (int i = 0; i < n; ++i) sum += p[i];
  return sum;
}

inline const float *act_scales(const void *act, int cls, int64_t nb) {
  return reinterpret_cast<const float *>(static_cast<const uint8_t *>(act) + act_planes_bytes(cls, nb));
}

inline float *act_scales(void *act, int cls, int64_t nb) {
  return const_cast<float *>(act_scales(static_cast<const void *>(act), cls, nb));
}

// What a token of class 32 has beside its planes.
struct Scales32 {
  const float *dx, *sx;
  const int32_t *negated;
  Scales32(const void *act, int64_t nb)
      : dx(act_scales(act, 32, nb)), sx(dx + pad8(nb)), negated(reinterpret_cast<const int32_t *>(sx + pad8(nb))) {}
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool kActWords = true;
#else
constexpr bool kActWords = false;
#endif

inline void put_block(const int8_t *hi, const int8_t *lo, int planes, Act32 &a, int64_t b) {
  for (int j = 0; j < 8; ++j) {
    std::memcpy(a.hi[j][b], hi + 4 * j, 4);
    std::memcpy(a.lo[j][b], lo + 4 * j, 4);
  }
  if (!kActWords) return;
  const int unit = planes == 2 ? 256 : 1;
  int16_t even[16], odd[16];
  for (int i = 0; i < 16; ++i) even[i] = int16_t(unit * hi[2 * i] + lo[2 * i]);
  for (int i = 0; i < 16; ++i) odd[i] = int16_t(unit * hi[2 * i + 1] + lo[2 * i + 1]);
  for (int j = 0; j < 8; ++j) {
    std::memcpy(a.words[j][0][b], even + 2 * j, 4);
    std::memcpy(a.words[j][1][b], odd + 2 * j, 4);
  }
}

inline void quantize_rows_32(const float *x, int64_t nb, int planes, void *act_token, int64_t block0, int64_t block1) {
  auto *groups = static_cast<Act32 *>(act_token);
  const int64_t padded = pad8(nb);
  float *dx = act_scales(act_token, 32, nb), *sx = dx + padded;
  auto *negated = reinterpret_cast<int32_t *>(sx + padded);
  int8_t hi[32], lo[32];
  for (int64_t b = block0; b < block1; ++b) {
    dx[b] = quantize_block<32>(x + 32 * b, planes, hi, lo);
    put_block(hi, lo, planes, groups[b / 8], b % 8);
    const int32_t sum = planes == 2 ? 256 * plane_sum(hi, 32) + plane_sum(lo, 32) : plane_sum(hi, 32);
    sx[b] = dx[b] * float(sum);
    negated[b] = -sum;
  }
  if (block1 != nb) return;
  std::memset(hi, 0, sizeof(hi));
  for (int64_t b = nb; b < padded; ++b) {
    put_block(hi, hi, planes, groups[b / 8], b % 8);
    dx[b] = sx[b] = 0;
    negated[b] = 0;
  }
}

// The sum of a, from those of its planes, as three signed digits to base 256, `step` bytes apart, the lowest first.
inline void set_digits(int planes, int32_t hi, int32_t lo, int8_t *digits, int step) {
  int32_t sum = planes == 2 ? 256 * hi + lo : hi;
  for (int i = 0; i < 3; ++i) {
    digits[i * step] = int8_t(sum);
    sum = (sum - digits[i * step]) >> 8;
  }
}

inline void quantize_256(const float *x, int planes, Act256 &a, float *dx) {
  *dx = quantize_block<256>(x, planes, a.hi, a.lo);
  for (int j = 0; j < 16; ++j) {
    a.sum16[0][group_place(j)] = int16_t(plane_sum(a.hi + 16 * j, 16));
    a.sum16[1][group_place(j)] = int16_t(plane_sum(a.lo + 16 * j, 16));
  }
  for (int j = 0; j < 8; ++j) {
    a.sum32[0][j] = int16_t(a.sum16[0][j] + a.sum16[0][j + 8]);
    a.sum32[1][j] = int16_t(a.sum16[1][j] + a.sum16[1][j + 8]);
  }
  for (int j = 0; j < 16; ++j) {
    set_digits(planes, a.sum16[0][group_place(j)], a.sum16[1][group_place(j)], a.digits16[0] + j, 16);
  }
  a.total[0] = a.total[1] = 0;
  for (int j = 0; j < 8; ++j) {
    a.total[0] += a.sum32[0][j];
    a.total[1] += a.sum32[1][j];
  }
  for (int j = 0; j < 8; ++j) set_digits(planes, a.sum32[0][j], a.sum32[1][j], a.digits32[0] + j, 8);
  std::memset(a.pad, 0, sizeof(a.pad));
}

inline void quantize(const float *x, int cls, int64_t n_cols, int planes, void *act_token, int64_t block0,
                     int64_t block1) {
  const int64_t nb = n_cols / cls;
  if (cls == 32) return quantize_rows_32(x, nb, planes, act_token, block0, block1);
  float *dx = act_scales(act_token, 256, nb);
  for (int64_t b = block0; b < block1; ++b) {
    quantize_256(x + 256 * b, planes, static_cast<Act256 *>(act_token)[b], dx + b);
  }
  if (block1 == nb) {
    for (int64_t b = nb; b < pad8(nb); ++b) dx[b] = 0;
  }
}

// --- section 3: integer products ------------------------------------------------------------------------------

inline int32_t dot_i8(const int8_t *a, const int8_t *b, int n) {
  int32_t sum = 0;
  for (int i = 0; i < n; ++i) sum += int32_t(a[i]) * b[i];
  return sum;
}

// The product of a block's integers with block `b` of a plane of Act32.
inline int32_t dot_block(const int8_t *n, const int8_t (*plane)[8][4], int b) {
  int32_t sum = 0;
  for (int j = 0; j < 8; ++j) sum += dot_i8(n + 4 * j, plane[j][b], 4);
  return sum;
}

template <class Form>
inline float row_32(const uint8_t *row, const void *act, int64_t nb, int planes) {
  const auto *w = reinterpret_cast<const typename Form::Block *>(row);
  const auto *a = static_cast<const Act32 *>(act);
  const Scales32 s(act, nb);
  float lanes[8] = {};
  for (int64_t b = 0; b < nb; ++b) {
    int8_t n[32];
    Form::integers(w[b], n);
    int32_t sum = dot_block(n, a[b / 8].hi, b & 7);
    if (planes == 2) sum = 256 * sum + dot_block(n, a[b / 8].lo, b & 7);
    float term = (Form::d(w[b]) * s.dx[b]) * float(sum);
    if (Form::kHasMin) term = term + Form::m(w[b]) * s.sx[b];
    lanes[b & 7] += term;
  }
  return tree8(lanes);
}

inline int32_t scaled_dot(const int8_t *n, const int8_t *plane, const int16_t *sc) {
  int32_t sum = 0;
  for (int j = 0; j < 16; ++j) sum += sc[j] * dot_i8(n + 16 * j, plane + 16 * j, 16);
  return sum;
}

template <class Form>
inline float row_256(const uint8_t *row, const void *act, int64_t nb, int planes) {
  const auto *w = reinterpret_cast<const typename Form::Block *>(row);
  const auto *a = static_cast<const Act256 *>(act);
  const float *dx = act_scales(act, 256, nb);
  float lanes[8] = {};
  for (int64_t b = 0; b < nb; ++b) {
    int8_t n[256];
    Scales s;
    Form::integers(w[b], n);
    Form::scales(w[b], s);
    float sum = float(scaled_dot(n, a[b].hi, s.sc));
    if (planes == 2) sum = sum * 256.0f + float(scaled_dot(n, a[b].lo, s.sc));
    float term = (Form::d(w[b]) * dx[b]) * sum;
    if (Form::kHasMin) {
      int32_t m = 0;
      for (int j = 0; j < 16; ++j) {
        const int32_t hi = a[b].sum16[0][group_place(j)], lo = a[b].sum16[1][group_place(j)];
        m += s.mn[j] * (planes == 2 ? 256 * hi + lo : hi);
      }
      term = term - (Form::dmin(w[b]) * dx[b]) * float(m);
    }
    lanes[b & 7] += term;
  }
  return tree8(lanes);
}

template <class Form, int kClass>
inline void matvec_plain(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                         const void *const *act, int n, int planes, float *const *out) {
  for (int64_t r = row0; r < row1; ++r) {
    const uint8_t *row = w + r * row_bytes;
    for (int i = 0; i < n; ++i) {
      if constexpr (kClass == 32) {
        out[i][r] = row_32<Form>(row, act[i], n_cols / 32, planes);
      } else {
        out[i][r] = row_256<Form>(row, act[i], n_cols / 256, planes);
      }
    }
  }
}

// --- section 4: float products --------------------------------------------------------------------------------

struct WidenF32 {
  using Word = float;
  static float get(float w) { return w; }
};
struct WidenF16 {
  using Word = uint16_t;
  static float get(uint16_t w) { return half_float(w); }
};
struct WidenBF16 {
  using Word = uint16_t;
  static float get(uint16_t w) { return bf16_float(w); }
};

inline float fold32(const float *l) {
  float v[8];
  for (int j = 0; j < 8; ++j) v[j] = (l[j] + l[j + 16]) + (l[j + 8] + l[j + 24]);
  return tree8(v);
}

template <class Widen>
inline float dot_plain(const typename Widen::Word *w, const float *x, int64_t n) {
  float lanes[32] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int j = 0; j < 32; ++j) lanes[j] += Widen::get(w[i + j]) * x[i + j];
  }
  for (int j = 0; i + j < n; ++j) lanes[j] += Widen::get(w[i + j]) * x[i + j];
  return fold32(lanes);
}

template <class Widen>
inline void matvec_float(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                         const void *const *act, int n, int, float *const *out) {
  for (int64_t r = row0; r < row1; ++r) {
    const auto *row = reinterpret_cast<const typename Widen::Word *>(w + r * row_bytes);
    for (int i = 0; i < n; ++i) out[i][r] = dot_plain<Widen>(row, static_cast<const float *>(act[i]), n_cols);
  }
}

inline float dot_f32(const float *a, const float *b, int64_t n) { return dot_plain<WidenF32>(a, b, n); }
inline float sumsq(const float *x, int64_t n) { return dot_plain<WidenF32>(x, x, n); }

inline float sum8(const float *x, int64_t n) {
  float lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) lanes[j] += x[i + j];
  }
  for (int j = 0; i + j < n; ++j) lanes[j] += x[i + j];
  return tree8(lanes);
}

inline float max_of(const float *x, int64_t n) {
  float lanes[8];
  for (int j = 0; j < 8; ++j) lanes[j] = x[0];
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  }
  for (int j = 0; i + j < n; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  float m = lanes[0];
  for (int j = 1; j < 8; ++j) m = lanes[j] > m ? lanes[j] : m;
  return m;
}

// --- section 6: keys and values -------------------------------------------------------------------------------

template <class Widen>
inline void dots_plain(const float *q, const typename Widen::Word *k, int64_t dim, int64_t n, float *s) {
  for (int64_t j = 0; j < n; ++j) s[j] = dot_plain<Widen>(k + j * dim, q, dim);
}

template <class Widen>
inline void wsum_plain(const float *p, const typename Widen::Word *v, int64_t dim, int64_t n, float *o) {
  for (int64_t c = 0; c < dim; ++c) o[c] = 0;
  for (int64_t j = 0; j < n; ++j) {
    const auto *row = v + j * dim;
#pragma GCC ivdep
    for (int64_t c = 0; c < dim; ++c) o[c] += p[j] * Widen::get(row[c]);
  }
}

// --- rows of weights in fp32 ----------------------------------------------------------------------------------

template <class Widen>
inline void decode_float(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const typename Widen::Word *>(src);
  for (int64_t i = 0; i < n; ++i) dst[i] = Widen::get(w[i]);
}

template <class Form>
inline void decode_32(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const typename Form::Block *>(src);
  for (int64_t b = 0; b < n / 32; ++b) {
    int8_t q[32];
    Form::integers(w[b], q);
    const float d = Form::d(w[b]), m = Form::m(w[b]);
    for (int i = 0; i < 32; ++i) {
      const float y = d * float(q[i]);
      dst[32 * b + i] = Form::kHasMin ? y + m : y;
    }
  }
}

template <class Form>
inline void decode_256(const void *src, float *dst, int64_t n) {
  const auto *w = static_cast<const typename Form::Block *>(src);
  for (int64_t b = 0; b < n / 256; ++b) {
    int8_t q[256];
    Scales s;
    Form::integers(w[b], q);
    Form::scales(w[b], s);
    for (int j = 0; j < 16; ++j) {
      const float d = Form::d(w[b]) * float(s.sc[j]);
      const float m = Form::kHasMin ? Form::dmin(w[b]) * float(s.mn[j]) : 0.0f;
      for (int i = 16 * j; i < 16 * j + 16; ++i) {
        const float y = d * float(q[i]);
        dst[256 * b + i] = Form::kHasMin ? y - m : y;
      }
    }
  }
}

// --- section 5: elementwise. Outputs may be inputs, index by index: hence ivdep. ---------------------------------

#define FT_EACH(count) _Pragma("GCC ivdep") for (int64_t i = 0; i < (count); ++i)

inline void add(const float *a, const float *b, float *y, int64_t n) { FT_EACH(n) y[i] = a[i] + b[i]; }
inline void scale(const float *x, float f, float *y, int64_t n) { FT_EACH(n) y[i] = x[i] * f; }
inline void softcap(const float *x, float c, float *y, int64_t n) { FT_EACH(n) y[i] = c * tanh_one(x[i] / c); }
inline void scale_mul(const float *x, float f, const float *w, float *y, int64_t n) {
  FT_EACH(n) y[i] = (x[i] * f) * w[i];
}
inline void axpy(float f, const float *x, float *y, int64_t n) { FT_EACH(n) y[i] = y[i] + f * x[i]; }
inline void exp_minus(const float *x, float m, float *y, int64_t n) { FT_EACH(n) y[i] = exp_one(x[i] - m); }
inline void sigmoid(const float *x, float *y, int64_t n) { FT_EACH(n) y[i] = sigmoid_one(x[i]); }
inline void silu_mul(const float *g, const float *u, float *y, int64_t n) { FT_EACH(n) y[i] = silu_one(g[i]) * u[i]; }
inline void gelu_mul(const float *g, const float *u, float *y, int64_t n) { FT_EACH(n) y[i] = gelu_one(g[i]) * u[i]; }
inline void to_f16(const float *x, uint16_t *y, int64_t n) { FT_EACH(n) y[i] = float_half(x[i]); }

inline void rope_neox(float *x, const float *c, const float *s, int64_t half) {
  FT_EACH(half) {
    const float x0 = x[i], x1 = x[i + half];
    x[i] = x0 * c[i] - x1 * s[i];
    x[i + half] = x0 * s[i] + x1 * c[i];
  }
}

inline void rope_pairs(float *x, const float *c, const float *s, int64_t half) {
  FT_EACH(half) {
    const float x0 = x[2 * i], x1 = x[2 * i + 1];
    x[2 * i] = x0 * c[i] - x1 * s[i];
    x[2 * i + 1] = x0 * s[i] + x1 * c[i];
  }
}

#undef FT_EACH

// --- the table ------------------------------------------------------------------------------------------------

template <class Form>
inline void set_32(Kernels &k, int type) {
  k.matvec[type] = matvec_plain<Form, 32>;
  k.decode_row[type] = decode_32<Form>;
}

template <class Form>
inline void set_256(Kernels &k, int type) {
  k.matvec[type] = matvec_plain<Form, 256>;
  k.decode_row[type] = decode_256<Form>;
}

template <class Widen>
inline void set_float(Kernels &k, int type) {
  k.matvec[type] = matvec_float<Widen>;
  k.decode_row[type] = decode_float<Widen>;
}

// A complete table of the functions above.
inline Kernels common_table(const char *name) {
  Kernels k = {};
  k.name = name;
  k.quantize = quantize;
  set_float<WidenF32>(k, F32);
  set_float<WidenF16>(k, F16);
  set_float<WidenBF16>(k, BF16);
  set_32<FormQ4_0>(k, Q4_0);
  set_32<FormQ4_1>(k, Q4_1);
  set_32<FormQ5_0>(k, Q5_0);
  set_32<FormQ5_1>(k, Q5_1);
  set_32<FormQ8_0>(k, Q8_0);
  set_32<FormIQ4_NL>(k, IQ4_NL);
  set_32<FormMXFP4>(k, MXFP4);
  set_256<FormQ2_K>(k, Q2_K);
  set_256<FormQ3_K>(k, Q3_K);
  set_256<FormQ4_K>(k, Q4_K);
  set_256<FormQ5_K>(k, Q5_K);
  set_256<FormQ6_K>(k, Q6_K);
  set_256<FormIQ4_XS>(k, IQ4_XS);
  set_256<FormIQ2_XXS>(k, IQ2_XXS);
  set_256<FormIQ2_XS>(k, IQ2_XS);
  set_256<FormIQ2_S>(k, IQ2_S);
  set_256<FormIQ3_XXS>(k, IQ3_XXS);
  set_256<FormIQ3_S>(k, IQ3_S);
  k.dot_f32 = dot_f32;
  k.sumsq = sumsq;
  k.sum8 = sum8;
  k.max = max_of;
  k.dots_f32 = dots_plain<WidenF32>;
  k.dots_f16 = dots_plain<WidenF16>;
  k.wsum_f32 = wsum_plain<WidenF32>;
  k.wsum_f16 = wsum_plain<WidenF16>;
  k.add = add;
  k.scale = scale;
  k.softcap = softcap;
  k.scale_mul = scale_mul;
  k.axpy = axpy;
  k.exp_minus = exp_minus;
  k.sigmoid = sigmoid;
  k.silu_mul = silu_mul;
  k.gelu_mul = gelu_mul;
  k.rope_neox = rope_neox;
  k.rope_pairs = rope_pairs;
  k.to_f16 = to_f16;
  return k;
}

}  // namespace
}  // namespace ft
#endif
