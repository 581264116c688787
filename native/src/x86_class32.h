// x86_class32.h - products of rows of class 32 (docs/numerics.md, section 3), eight blocks at a time.
//
// A lane of 32 bits is a block from the dot product to the term: unpack() transposes the weights of eight blocks to
// vectors of four values of each, as Act32 has the activations, once for all tokens. So nothing is folded but the eight
// lanes at a row's end, and lane = block index mod 8, as lanes8 wants it. Weights are made unsigned by a bias, which
// comes off as bias * A. The same at 512 bits: x86_wide32.h.
#ifndef FT_X86_CLASS32_H
#define FT_X86_CLASS32_H
#include "blocks.h"
#include "kernels_common.h"
#include "x86_vectors.h"

namespace ft {
namespace {

// --- types ----------------------------------------------------------------------------------------------------

// A byte for each of 16 codes, four times over: for shuffles of 16 bytes and for permutations of 64.
struct CodeTable {
  uint8_t at[64];
  constexpr CodeTable(const int8_t *values, int bias) : at() {
    for (int i = 0; i < 64; ++i) at[i] = uint8_t(values[i & 15] + bias);
  }
};
alignas(64) constexpr CodeTable kBiasedMXFP4(kTableMXFP4, 16);
alignas(64) constexpr CodeTable kBiasedIQ4(kTableIQ4, 128);

enum Coding { kNibbles, kLookUp, kFiveBits, kBytes };

// kBias is a power of two or 0, added to every integer; kHighest the largest integer then. kQuants is where a block's
// nibbles or bytes begin, kFifths where the fifth bits do.
struct BlocksQ4_0 : FormQ4_0 {
  static constexpr Coding kCoding = kNibbles;
  static constexpr int kBias = 8, kHighest = 15, kQuants = 2;
};
struct BlocksQ4_1 : FormQ4_1 {
  static constexpr Coding kCoding = kNibbles;
  static constexpr int kBias = 0, kHighest = 15, kQuants = 4;
};
struct BlocksQ5_0 : FormQ5_0 {
  static constexpr Coding kCoding = kFiveBits;
  static constexpr int kBias = 16, kHighest = 31, kQuants = 6, kFifths = 2;
};
struct BlocksQ5_1 : FormQ5_1 {
  static constexpr Coding kCoding = kFiveBits;
  static constexpr int kBias = 0, kHighest = 31, kQuants = 8, kFifths = 4;
};
struct BlocksQ8_0 : FormQ8_0 {
  static constexpr Coding kCoding = kBytes;
  static constexpr int kBias = 128, kHighest = 255, kQuants = 2;
};
struct BlocksIQ4_NL : FormIQ4_NL {
  static constexpr Coding kCoding = kLookUp;
  static constexpr int kBias = 128, kHighest = 241, kQuants = 2;
  static constexpr const CodeTable &kCodes = kBiasedIQ4;
};
struct BlocksMXFP4 : FormMXFP4 {
  static constexpr Coding kCoding = kLookUp;
  static constexpr int kBias = 16, kHighest = 28, kQuants = 1;
  static constexpr const CodeTable &kCodes = kBiasedMXFP4;
};

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// --- groups of eight blocks -----------------------------------------------------------------------------------

// Eight blocks of a row, or from wherever they are.
template <class Block>
struct InRow {
  const uint8_t *first;
  FT_INLINE const uint8_t *operator[](int i) const { return first + i * int(sizeof(Block)); }
};
struct Scattered {
  const uint8_t *at[8];
  FT_INLINE const uint8_t *operator[](int i) const { return at[i]; }
};

struct Factors32 {
  F8 d, m;
};

// Four bytes of each block. (GCC stores the words one by one for _mm256_setr_epi32, and then waits for them.)
template <class From>
FT_INLINE I8 eight_words(const From &from, int at) {
  const __m128i low = _mm_setr_epi32(int(word32(from[0] + at)), int(word32(from[1] + at)), int(word32(from[2] + at)),
                                     int(word32(from[3] + at)));
  const __m128i high = _mm_setr_epi32(int(word32(from[4] + at)), int(word32(from[5] + at)), int(word32(from[6] + at)),
                                      int(word32(from[7] + at)));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// Four fp16 that begin `i`-th to (i + 3)-th block, as one word: shifts have their own ports.
template <class From>
FT_INLINE int64_t four_halves(const From &from, int i) {
  return int64_t(uint64_t(word16(from[i])) | (uint64_t(word16(from[i + 1])) << 16) |
                 (uint64_t(word16(from[i + 2])) << 32) | (uint64_t(word16(from[i + 3])) << 48));
}

// 2^(e - 128) of eight bytes e in 32 bits: from e = 2 on a normal number, (e - 1) << 23; the other two are subnormal.
FT_INLINE F8 powers_of_two(I8 e) {
  const I8 normal = _mm256_sub_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 23));
  const I8 subnormal = _mm256_add_epi32(_mm256_slli_epi32(e, 21), _mm256_set1_epi32(1 << 21));
  return _mm256_castsi256_ps(_mm256_max_epi32(normal, subnormal));
}

template <class Type, class From>
FT_INLINE Factors32 factors_32(const From &from) {
  if constexpr (sizeof(typename Type::Block) == sizeof(BlockMXFP4)) {
    uint64_t bytes = 0;
    for (int i = 0; i < 8; ++i) bytes |= uint64_t(*from[i]) << (8 * i);
    return {powers_of_two(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(bytes)))), _mm256_setzero_ps()};
  } else if constexpr (Type::kHasMin) {
    const I8 both = eight_words(from, 0);  // low halves d, high ones m
    const I8 d = _mm256_and_si256(both, _mm256_set1_epi32(0xffff)), m = _mm256_srli_epi32(both, 16);
    const I8 packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(d, m), 0xd8);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
  } else {
    return {_mm256_cvtph_ps(_mm_set_epi64x(four_halves(from, 4), four_halves(from, 0))), _mm256_setzero_ps()};
  }
}

// --- 256 bits: vector j has values 4j .. 4j + 3 ------------------------------------------------------------------

// Dword j of 16 bytes of each block.
template <class From>
FT_INLINE void transpose16(const From &from, int offset, I8 *out) {
  I8 v[4];
  for (int i = 0; i < 4; ++i) {
    const I8 low = _mm256_castsi128_si256(load16(from[i] + offset));
    v[i] = _mm256_inserti128_si256(low, load16(from[i + 4] + offset), 1);
  }
  const I8 a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpacklo_epi32(v[2], v[3]);
  const I8 c = _mm256_unpackhi_epi32(v[0], v[1]), d = _mm256_unpackhi_epi32(v[2], v[3]);
  out[0] = _mm256_unpacklo_epi64(a, b);
  out[1] = _mm256_unpackhi_epi64(a, b);
  out[2] = _mm256_unpacklo_epi64(c, d);
  out[3] = _mm256_unpackhi_epi64(c, d);
}

// Adds bit 4j + i of each block's word as 16 to its byte i of w[j]. A bit is spread with the byte or nibble that has
// it, then cut out in the byte's upper half.
template <class Type, class From>
FT_INLINE void add_fifth_bits(const From &from, I8 *w) {
  const I8 odd = eight_words(from, Type::kFifths);
  const I8 even = _mm256_slli_epi32(odd, 4), bit = _mm256_set1_epi32(int(0x80402010)), one = _mm256_set1_epi8(16);
  const I8 spread = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  for (int j = 0; j < 8; ++j) {
    const I8 byte = _mm256_shuffle_epi8(j & 1 ? odd : even, _mm256_add_epi8(spread, _mm256_set1_epi8(char(j / 2))));
    w[j] = _mm256_or_si256(w[j], _mm256_min_epu8(_mm256_and_si256(byte, bit), one));
  }
}

struct Narrow {
  I8 w[8];

  template <class Type, class From>
  FT_INLINE void unpack(const From &from) {
    transpose16(from, Type::kQuants, w);
    if constexpr (Type::kCoding == kBytes) {
      transpose16(from, Type::kQuants + 16, w + 4);
      for (int j = 0; j < 8; ++j) w[j] = _mm256_xor_si256(w[j], _mm256_set1_epi8(char(0x80)));
    } else {
      const I8 mask = _mm256_set1_epi8(15);
      for (int j = 0; j < 4; ++j) {
        w[j + 4] = _mm256_and_si256(_mm256_srli_epi16(w[j], 4), mask);
        w[j] = _mm256_and_si256(w[j], mask);
      }
    }
    if constexpr (Type::kCoding == kLookUp) {
      const I8 codes = load(Type::kCodes.at);
      for (int j = 0; j < 8; ++j) w[j] = _mm256_shuffle_epi8(codes, w[j]);
    }
    if constexpr (Type::kCoding == kFiveBits) add_fifth_bits<Type>(from, w);
  }

#ifdef FT_VNNI
  static constexpr bool kVnni = true;
  // Two chains: a longer one would keep the scheduler's queue full.
  template <class Type>
  FT_INLINE I8 plane(const int8_t (*p)[8][4], I8 even) const {
    I8 odd = _mm256_setzero_si256();
    for (int j = 0; j < 8; j += 2) {
      even = add_dot(even, w[j], load(p[j]));
      odd = add_dot(odd, w[j + 1], load(p[j + 1]));
    }
    return _mm256_add_epi32(even, odd);
  }
#else
  static constexpr bool kVnni = false;
  // Pairs are summed in 16 bits as long as they hold them.
  template <class Type>
  FT_INLINE I8 plane(const int8_t (*p)[8][4], I8 sum) const {
    constexpr int at_once = Type::kHighest * 254 * 8 < 32768 ? 8 : 4;
    static_assert(Type::kHighest * 254 * at_once < 32768, "sums of 16 bits");
    for (int j = 0; j < 8; j += at_once) {
      I8 pairs = _mm256_maddubs_epi16(w[j], load(p[j]));
      for (int i = j + 1; i < j + at_once; ++i) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[i], load(p[i])));
      sum = add_pairs(sum, pairs, _mm256_set1_epi16(1));
    }
    return sum;
  }
#endif

  // For types whose pairs 16 bits do not hold: both planes at once.
  FT_INLINE I8 words(const Act32 &a, I8 sum) const {
    for (int j = 0; j < 8; ++j) {
      const I8 even = _mm256_and_si256(w[j], _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w[j], 8);
      sum = add_pairs(sum, even, load(a.words[j][0]));
      sum = add_pairs(sum, odd, load(a.words[j][1]));
    }
    return sum;
  }

  // Sums of eight blocks; `negated` are their -A.
  template <class Type, int kPlanes>
  FT_INLINE I8 sums(const Act32 &a, const int32_t *negated) const {
    I8 bias = _mm256_setzero_si256();
    if (Type::kBias) bias = _mm256_slli_epi32(load(negated), log2_of(Type::kBias));
    if constexpr (!kVnni && Type::kHighest > 127) {
      return words(a, bias);
    } else if constexpr (kPlanes == 1) {
      return plane<Type>(a.hi, bias);
    } else {
      const I8 hi = plane<Type>(a.hi, _mm256_setzero_si256());
      return _mm256_add_epi32(_mm256_slli_epi32(hi, 8), plane<Type>(a.lo, bias));
    }
  }
};

// --- rows -----------------------------------------------------------------------------------------------------

constexpr int kMaxTokens = 8;

// Activations of eight blocks.
struct Acts {
  const Act32 *planes;
  const float *dx, *sx;
  const int32_t *negated;
  Acts() = default;
  Acts(const void *act, int64_t nb) : planes(static_cast<const Act32 *>(act)) {
    const Scales32 s(act, nb);
    dx = s.dx;
    sx = s.sx;
    negated = s.negated;
  }
  FT_INLINE Acts at(int64_t group) const {
    Acts a;
    a.planes = planes + group;
    a.dx = dx + 8 * group;
    a.sx = sx + 8 * group;
    a.negated = negated + 8 * group;
    return a;
  }
};

template <class Type, class Unit, int kPlanes>
FT_INLINE F8 terms_32(const Unit &weights, const Factors32 &f, const Acts &a) {
  const F8 s = _mm256_cvtepi32_ps(weights.template sums<Type, kPlanes>(*a.planes, a.negated));
  F8 terms = _mm256_mul_ps(_mm256_mul_ps(f.d, _mm256_loadu_ps(a.dx)), s);
  if (Type::kHasMin) terms = _mm256_add_ps(terms, _mm256_mul_ps(f.m, _mm256_loadu_ps(a.sx)));
  return terms;
}

// The activations of a row's last `count` blocks over and over: eight places meet the last blocks of several rows.
struct Repeated {
  alignas(64) Act32 planes;
  float dx[8], sx[8];
  int32_t negated[8];

  void fill(const Acts &from, int count) {
    alignas(32) int32_t places[8];
    for (int i = 0; i < 8; ++i) places[i] = i % count;
    const I8 order = load(places);
    const auto move = [&](const void *src, void *dst) {
      _mm256_storeu_si256(static_cast<I8 *>(dst), _mm256_permutevar8x32_epi32(load(src), order));
    };
    for (int j = 0; j < 8; ++j) {
      move(from.planes->hi[j], planes.hi[j]);
      move(from.planes->lo[j], planes.lo[j]);
      for (int i = 0; kActWords && i < 2; ++i) move(from.planes->words[j][i], planes.words[j][i]);
    }
    move(from.dx, dx);
    move(from.sx, sx);
    move(from.negated, negated);
  }
  Acts acts() const {
    Acts a;
    a.planes = &planes;
    a.dx = dx;
    a.sx = sx;
    a.negated = negated;
    return a;
  }
};

alignas(32) static const int32_t kFirstLanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
alignas(32) static const int32_t kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};

// `count` lanes from lane `from` on, moved to the first ones; +0 behind them.
FT_INLINE F8 first_lanes(F8 v, int from, int count) {
  const F8 moved = _mm256_permutevar8x32_ps(v, load(kLaneNumbers + from));
  return _mm256_and_ps(moved, _mm256_castsi256_ps(load(kFirstLanes + 8 - count)));
}

// One call's rows and tokens. Unit holds the weights of eight blocks: Narrow, or Wide of x86_wide32.h.
template <class Type, class Unit, int kPlanes, bool kOne>
struct Rows32 {
  using Block = typename Type::Block;
  const uint8_t *w;
  int64_t row_bytes, n_groups;  // full groups of a row
  int tail, n;                  // blocks behind them, tokens
  Acts acts[kMaxTokens];
  Repeated repeated[kMaxTokens];

  Rows32(const uint8_t *weights, int64_t bytes, int64_t nb, const void *const *act, int n_tokens)
      : w(weights), row_bytes(bytes), n_groups(nb / 8), tail(int(nb % 8)), n(n_tokens) {
    for (int t = 0; t < n; ++t) {
      acts[t] = Acts(act[t], nb);
      if (tail) repeated[t].fill(acts[t].at(n_groups), tail);
    }
  }

  // Lanes of a row's full groups, of every token.
  FT_INLINE void full_groups(const uint8_t *row, F8 *sums) const {
    const int n_tokens = kOne ? 1 : n;
    F8 sum[kMaxTokens];
    for (int t = 0; t < n_tokens; ++t) sum[t] = _mm256_setzero_ps();
    InRow<Block> from = {row};
    for (int64_t g = 0; g < n_groups; ++g) {
      prefetch<8 * sizeof(Block)>(from.first);
      Unit weights;
      weights.template unpack<Type>(from);
      const Factors32 f = factors_32<Type>(from);
      for (int t = 0; t < n_tokens; ++t) {
        sum[t] = _mm256_add_ps(sum[t], terms_32<Type, Unit, kPlanes>(weights, f, acts[t].at(g)));
      }
      from.first += 8 * sizeof(Block);
    }
    for (int t = 0; t < n_tokens; ++t) sums[t] = sum[t];
  }

  // The last blocks of `rows` rows as one group.
  FT_INLINE void tails(const uint8_t *row, int rows, F8 (*sums)[kMaxTokens]) const {
    Scattered from;
    for (int i = 0; i < 8; ++i) {
      const int r = i / tail < rows ? i / tail : 0;
      from.at[i] = row + r * row_bytes + (n_groups * 8 + i % tail) * int64_t(sizeof(Block));
    }
    Unit weights;
    weights.template unpack<Type>(from);
    const Factors32 f = factors_32<Type>(from);
    for (int t = 0; t < n; ++t) {
      const F8 terms = terms_32<Type, Unit, kPlanes>(weights, f, repeated[t].acts());
      for (int r = 0; r < rows; ++r) sums[r][t] = _mm256_add_ps(sums[r][t], first_lanes(terms, r * tail, tail));
    }
  }

  FT_INLINE void run(int64_t row0, int64_t row1, float *const *out) const {
    for (int64_t r = row0; r < row1; r += 8) {
      const int rows = row1 - r < 8 ? int(row1 - r) : 8, step = tail ? 8 / tail : 8;
      const uint8_t *row = w + r * row_bytes;
      F8 sums[8][kMaxTokens];
      for (int i = 0; i < rows; ++i) full_groups(row + i * row_bytes, sums[i]);
      for (int i = 0; tail && i < rows; i += step) {
        tails(row + i * row_bytes, rows - i < step ? rows - i : step, sums + i);
      }
      for (int t = 0; t < n; ++t) {
        if (rows == 8) {
          _mm256_storeu_ps(out[t] + r, tree8_of_eight(sums[0] + t, kMaxTokens));
        } else {
          for (int i = 0; i < rows; ++i) out[t][r + i] = tree8(sums[i][t]);
        }
      }
    }
  }
};

template <class Type, class Unit, int kPlanes>
inline void matvec_32_planes(const uint8_t *w, int64_t row_bytes, int64_t nb, int64_t row0, int64_t row1,
                             const void *const *act, int n, float *const *out) {
  if (n == 1) {
    Rows32<Type, Unit, kPlanes, true>(w, row_bytes, nb, act, n).run(row0, row1, out);
  } else {
    Rows32<Type, Unit, kPlanes, false>(w, row_bytes, nb, act, n).run(row0, row1, out);
  }
}

template <class Type, class Unit>
inline void matvec_32(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                      const void *const *act, int n, int planes, float *const *out) {
  if (planes == 2) {
    matvec_32_planes<Type, Unit, 2>(w, row_bytes, n_cols / 32, row0, row1, act, n, out);
  } else {
    matvec_32_planes<Type, Unit, 1>(w, row_bytes, n_cols / 32, row0, row1, act, n, out);
  }
}

}  // namespace
}  // namespace ft
#endif
