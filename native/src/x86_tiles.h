// x86_tiles.h - products of many tokens (docs/numerics.md, section 8): a tile of weight rows is unpacked to int16, some
// hundred columns at a time so that it stays in the first cache, and multiplied with int16 activations.
//
// A lane is a weight row; two neighbouring int16 of a lane are two columns. Order of the sums: columns of a group
// (integers), groups, blocks; neither the tile nor the other tokens change it.
#ifndef FT_X86_TILES_H
#define FT_X86_TILES_H
#include "kernels.h"
#include "x86_forms.h"

namespace ft {
namespace {

#ifdef __AVX512BW__
struct Lanes {
  using I = __m512i;
  using F = __m512;
  static constexpr int kLanes = 16, kTokens = 6;
  FT_INLINE static I zero() { return _mm512_setzero_si512(); }
  FT_INLINE static F zero_f() { return _mm512_setzero_ps(); }
  FT_INLINE static I get(const int16_t *p) { return _mm512_load_si512(p); }
  FT_INLINE static I pair(const int16_t *p) { return _mm512_set1_epi32(int(word32(p))); }
#ifdef __AVX512VNNI__
  FT_INLINE static I dot(I sum, I w, I x) { return _mm512_dpwssd_epi32(sum, w, x); }
#else
  FT_INLINE static I dot(I sum, I w, I x) { return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x)); }
#endif
  FT_INLINE static F floats(I v) { return _mm512_maskz_cvtepi32_ps(0xffff, v); }  // GCC warns of the plain one
  FT_INLINE static F get_f(const float *p) { return _mm512_load_ps(p); }
  FT_INLINE static F all(float f) { return _mm512_set1_ps(f); }
  FT_INLINE static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  FT_INLINE static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  FT_INLINE static void put(float *p, F v) { _mm512_store_ps(p, v); }
};
#else
struct Lanes {
  using I = __m256i;
  using F = __m256;
  static constexpr int kLanes = 8, kTokens = 3;  // four spill a sum
  FT_INLINE static I zero() { return _mm256_setzero_si256(); }
  FT_INLINE static F zero_f() { return _mm256_setzero_ps(); }
  FT_INLINE static I get(const int16_t *p) { return load(p); }
  FT_INLINE static I pair(const int16_t *p) { return _mm256_set1_epi32(int(word32(p))); }
  FT_INLINE static I dot(I sum, I w, I x) { return add_pairs(sum, w, x); }
  FT_INLINE static F floats(I v) { return _mm256_cvtepi32_ps(v); }
  FT_INLINE static F get_f(const float *p) { return _mm256_load_ps(p); }
  FT_INLINE static F all(float f) { return _mm256_set1_ps(f); }
  FT_INLINE static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  FT_INLINE static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  FT_INLINE static void put(float *p, F v) { _mm256_store_ps(p, v); }
};
#endif

constexpr int kVectors = 2;  // of rows in a tile
constexpr int kTileRows = kVectors * Lanes::kLanes;
static_assert(kTileRows <= kMaxTileRows, "callers' buffers");
constexpr int kPiece = 256;  // columns that are unpacked at once
constexpr int kMaxGroups = kPiece / 16;

struct Tile {
  alignas(64) int16_t w[kPiece / 2][kTileRows][2];
  alignas(64) float f[kMaxGroups][kTileRows], c[kMaxGroups][kTileRows];  // weight = f * integer + c
  alignas(64) int8_t rows[8][kPiece];
};

// --- how a type is unpacked -----------------------------------------------------------------------------------
// kBlock columns share an activation's scale, kGroup columns a weight's. unpack() takes n_cols <= kPiece columns of
// one row: integers, and column r of f and c.

template <class Vec>
struct Tile32 {
  static constexpr int kBlock = 32, kGroup = 32;
  static constexpr bool kHasMin = Vec::kHasMin;
  static constexpr int kBlockBytes = sizeof(typename Vec::Block);
  FT_INLINE static void unpack(const uint8_t *src, int n_cols, int8_t *n, Tile &tile, int r) {
    const auto *w = reinterpret_cast<const typename Vec::Block *>(src);
    for (int b = 0; b < n_cols / 32; ++b) {
      _mm256_store_si256(reinterpret_cast<I8 *>(n + 32 * b), Vec::bytes(w[b]));
      tile.f[b][r] = Vec::d(w[b]);
      if (kHasMin) tile.c[b][r] = Vec::m(w[b]);
    }
  }
};

template <class Form, class Vec, int kWidth>
struct Tile256 {
  static constexpr int kBlock = 256, kGroup = kWidth;
  static constexpr bool kHasMin = Vec::kHasMin;
  static constexpr int kBlockBytes = sizeof(typename Vec::Block);
  FT_INLINE static void unpack(const uint8_t *src, int, int8_t *n, Tile &tile, int r) {
    const auto &w = *reinterpret_cast<const typename Vec::Block *>(src);
    for (int step = 0; step < 8 / Vec::kPart; ++step) {
      I8 part[Vec::kPart];
      Vec::parts(w, step, part);
      for (int i = 0; i < Vec::kPart; ++i) {
        _mm256_store_si256(reinterpret_cast<I8 *>(n + 32 * (step * Vec::kPart + i)),
                           _mm256_sub_epi8(part[i], _mm256_set1_epi8(Vec::kBias)));
      }
    }
    Scales s;
    Form::scales(w, s);
    const float d = Vec::d(w), dmin = Vec::dmin(w);
    for (int j = 0; j < 256 / kWidth; ++j) {
      tile.f[j][r] = d * float(s.sc[j * kWidth / 16]);
      if (kHasMin) tile.c[j][r] = -dmin * float(s.mn[j * kWidth / 16]);
    }
  }
};

// Eight rows of 32 bytes -> four columns of eight rows in each of eight vectors.
FT_INLINE void transpose8(const Tile &tile, int at, I8 *out) {
  I8 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = load(tile.rows[i] + at);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(s[i], s[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(s[i], s[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(s[i + 1], s[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(s[i + 1], s[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    out[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
}

// Columns 0 and 2 of each four come before 1 and 3: that takes shifts only. Activations lie alike.
FT_INLINE void put_columns(Tile &tile, int first_row, int at) {
  I8 four[8];
  transpose8(tile, at, four);
  for (int j = 0; j < 8; ++j) {
    const I8 even = _mm256_srai_epi16(_mm256_slli_epi16(four[j], 8), 8), odd = _mm256_srai_epi16(four[j], 8);
    _mm256_store_si256(reinterpret_cast<I8 *>(tile.w[at / 2 + 2 * j][first_row]), even);
    _mm256_store_si256(reinterpret_cast<I8 *>(tile.w[at / 2 + 2 * j + 1][first_row]), odd);
  }
}

template <class T>
inline void unpack_tile(const uint8_t *w, int64_t row_bytes, int n_rows, int n_cols, Tile &tile) {
  constexpr int kNext = kPiece / T::kBlock * T::kBlockBytes;
  for (int first = 0; first < kTileRows; first += 8) {
    for (int i = 0; i < 8; ++i) {
      const int r = first + i;
      const uint8_t *src = w + (r < n_rows ? r : n_rows - 1) * row_bytes;
      for (int at = 0; at < kNext; at += 64) _mm_prefetch(reinterpret_cast<const char *>(src + kNext + at), _MM_HINT_T0);
      T::unpack(src, n_cols, tile.rows[i], tile, r);
    }
    for (int at = 0; at < n_cols; at += 32) put_columns(tile, first, at);
  }
}

// --- the product ----------------------------------------------------------------------------------------------

// y[t][row] of NT tokens += the piece; act[t] is a token's activations (TileAct), `at` the piece's first column.
template <int NT, class T>
inline void tile_tokens(const Tile &tile, const TileAct &layout, const uint8_t *const *act, int64_t at, int n_cols,
                        float *y) {
  typename Lanes::F sum[NT][kVectors];
  const int16_t *x[NT];
  for (int t = 0; t < NT; ++t) {
    x[t] = reinterpret_cast<const int16_t *>(act[t]) + at;
    for (int v = 0; v < kVectors; ++v) {
      const float *own = y + t * kTileRows + v * Lanes::kLanes;
      sum[t][v] = T::kBlock == 32 ? Lanes::get_f(own) : Lanes::zero_f();
    }
  }
  for (int g = 0; g < n_cols / T::kGroup; ++g) {
    typename Lanes::I part[NT][kVectors];
    for (int t = 0; t < NT; ++t) {
      for (int v = 0; v < kVectors; ++v) part[t][v] = Lanes::zero();
    }
    const auto *w = tile.w + g * T::kGroup / 2;
#pragma GCC unroll 8
    for (int k = 0; k < T::kGroup / 2; ++k) {
      typename Lanes::I rows[kVectors];
      for (int v = 0; v < kVectors; ++v) rows[v] = Lanes::get(w[k][v * Lanes::kLanes]);
      for (int t = 0; t < NT; ++t) {
        const auto pair = Lanes::pair(x[t] + g * T::kGroup + 2 * k);
        for (int v = 0; v < kVectors; ++v) part[t][v] = Lanes::dot(part[t][v], rows[v], pair);
      }
    }
    const int64_t group = at / T::kGroup + g;
    for (int v = 0; v < kVectors; ++v) {
      const auto f = Lanes::get_f(tile.f[g] + v * Lanes::kLanes);
      for (int t = 0; t < NT; ++t) {
        auto p = Lanes::floats(part[t][v]);
        if (T::kBlock == 32) p = Lanes::mul(p, Lanes::all(layout.dx(act[t])[group]));
        sum[t][v] = Lanes::fma(p, f, sum[t][v]);
      }
      if (!T::kHasMin) continue;
      const auto c = Lanes::get_f(tile.c[g] + v * Lanes::kLanes);
      for (int t = 0; t < NT; ++t) sum[t][v] = Lanes::fma(c, Lanes::all(layout.sx(act[t])[group]), sum[t][v]);
    }
  }
  for (int t = 0; t < NT; ++t) {
    for (int v = 0; v < kVectors; ++v) {
      float *own = y + t * kTileRows + v * Lanes::kLanes;
      if (T::kBlock == 256) {
        sum[t][v] = Lanes::fma(sum[t][v], Lanes::all(layout.dx(act[t])[at / 256]), Lanes::get_f(own));
      }
      Lanes::put(own, sum[t][v]);
    }
  }
}

template <class T>
inline void tile_some(int n, const Tile &tile, const TileAct &layout, const uint8_t *const *act, int64_t at,
                      int n_cols, float *y) {
  switch (n) {
    case 1: return tile_tokens<1, T>(tile, layout, act, at, n_cols, y);
    case 2: return tile_tokens<2, T>(tile, layout, act, at, n_cols, y);
#ifdef __AVX512BW__
    case 3: return tile_tokens<3, T>(tile, layout, act, at, n_cols, y);
    case 4: return tile_tokens<4, T>(tile, layout, act, at, n_cols, y);
    case 5: return tile_tokens<5, T>(tile, layout, act, at, n_cols, y);
#endif
    default: return tile_tokens<Lanes::kTokens, T>(tile, layout, act, at, n_cols, y);
  }
}

template <class T>
inline void tile_product(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int n_rows, const uint8_t *const *act,
                         int64_t n, float *y) {
  static_assert(T::kBlock == 32 || T::kBlock == 256, "classes of activations");
  Tile tile;
  const TileAct layout(T::kBlock, T::kGroup, n_cols);
  const int64_t turns = (n + Lanes::kTokens - 1) / Lanes::kTokens;
  std::memset(y, 0, size_t(n) * kTileRows * sizeof(float));
  for (int64_t at = 0; at < n_cols; at += kPiece) {
    const int width = int(n_cols - at < kPiece ? n_cols - at : kPiece);
    unpack_tile<T>(w + at / T::kBlock * T::kBlockBytes, row_bytes, n_rows, width, tile);
    for (int64_t turn = 0; turn < turns; ++turn) {  // even shares: few tokens at once are slow
      const int64_t first = turn * n / turns, last = (turn + 1) * n / turns;
      tile_some<T>(int(last - first), tile, layout, act + first, at, width, y + first * kTileRows);
    }
  }
}

// --- activations ----------------------------------------------------------------------------------------------

FT_INLINE int total8(I8 v) {
  const __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i b = _mm_add_epi32(a, _mm_unpackhi_epi64(a, a));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 1)));
}

// The largest |x|, compared as bits: a NaN is the largest.
FT_INLINE uint32_t largest_bits(const float *x, int n) {
  I8 most = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 8) {
    most = _mm256_max_epu32(most, _mm256_and_si256(load(x + i), _mm256_set1_epi32(0x7fffffff)));
  }
  alignas(32) uint32_t each[8];
  _mm256_store_si256(reinterpret_cast<I8 *>(each), most);
  for (int i = 1; i < 8; ++i) each[0] = each[i] > each[0] ? each[i] : each[0];
  return each[0];
}

// 16 values as int16 in the order of put_columns; their sum.
FT_INLINE int round16(const float *x, float inv, int16_t *out) {
  const F8 by = _mm256_set1_ps(inv);
  const I8 a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), by));
  const I8 b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), by));
  const I8 all = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<I8 *>(out), _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(all, 0xd8), 0xd8));
  return total8(_mm256_madd_epi16(all, _mm256_set1_epi16(1)));
}

inline void tile_quantize(const float *x, const TileAct &layout, uint8_t *act) {
  auto *q = reinterpret_cast<int16_t *>(act);
  float *dx = layout.dx(act), *sx = layout.sx(act);
  for (int64_t at = 0; at < layout.n_cols; at += layout.block) {
    const uint32_t bits = largest_bits(x + at, layout.block);
    float amax;
    std::memcpy(&amax, &bits, 4);
    const bool is_finite = bits < 0x7f800000u, is_zero = amax < 0x1p-100f;
    const float inv = is_finite && !is_zero ? kTileUnits / amax : 0.0f;
    const float d = is_finite ? (is_zero ? 0.0f : amax / kTileUnits) : __builtin_nanf("");
    dx[at / layout.block] = d;
    for (int64_t group = at; group < at + layout.block; group += layout.group) {
      int total = 0;
      for (int i = 0; i < layout.group; i += 16) {
        if (inv != 0) {
          total += round16(x + group + i, inv, q + group + i);
        } else {
          std::memset(q + group + i, 0, 32);
        }
      }
      sx[group / layout.group] = layout.block == 32 ? d * float(total) : float(total);
    }
  }
}

template <class T>
inline void set_tile(Kernels &k, int type) {
  k.tile[type] = {tile_product<T>, T::kBlock, T::kGroup};
}

inline void set_tiles(Kernels &k) {
  k.tile_rows = kTileRows;
  k.tile_quantize = tile_quantize;
  set_tile<Tile32<VecQ4_0>>(k, Q4_0);
  set_tile<Tile32<VecQ4_1>>(k, Q4_1);
  set_tile<Tile32<VecQ5_0>>(k, Q5_0);
  set_tile<Tile32<VecQ5_1>>(k, Q5_1);
  set_tile<Tile32<VecQ8_0>>(k, Q8_0);
  set_tile<Tile32<VecIQ4_NL>>(k, IQ4_NL);
  set_tile<Tile32<VecMXFP4>>(k, MXFP4);
  set_tile<Tile256<FormQ2_K, VecQ2_K, 16>>(k, Q2_K);
  set_tile<Tile256<FormQ3_K, VecQ3_K, 16>>(k, Q3_K);
  set_tile<Tile256<FormQ4_K, VecQ4_K, 32>>(k, Q4_K);
  set_tile<Tile256<FormQ5_K, VecQ5_K, 32>>(k, Q5_K);
  set_tile<Tile256<FormQ6_K, VecQ6_K, 16>>(k, Q6_K);
  set_tile<Tile256<FormIQ4_XS, VecIQ4_XS, 32>>(k, IQ4_XS);
}

}  // namespace
}  // namespace ft
#endif
