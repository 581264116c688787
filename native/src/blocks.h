// blocks.h - ggml's block formats, and for each type with an integer form (docs/numerics.md, section 3) how its
// integers, scales and factors are read. Layouts: ggml-common.h of llama.cpp.
#ifndef FT_BLOCKS_H
#define FT_BLOCKS_H
#include <cstdint>

#include "scalar.h"

namespace ft {
namespace {

struct BlockQ4_0 { uint16_t d; uint8_t qs[16]; };
struct BlockQ4_1 { uint16_t d, m; uint8_t qs[16]; };
struct BlockQ5_0 { uint16_t d; uint8_t qh[4], qs[16]; };
struct BlockQ5_1 { uint16_t d, m; uint8_t qh[4], qs[16]; };
struct BlockQ8_0 { uint16_t d; int8_t qs[32]; };
struct BlockMXFP4 { uint8_t e, qs[16]; };
struct BlockQ2_K { uint8_t scales[16], qs[64]; uint16_t d, dmin; };
struct BlockQ3_K { uint8_t hmask[32], qs[64], scales[12]; uint16_t d; };
struct BlockQ4_K { uint16_t d, dmin; uint8_t scales[12], qs[128]; };
struct BlockQ5_K { uint16_t d, dmin; uint8_t scales[12], qh[32], qs[128]; };
struct BlockQ6_K { uint8_t ql[128], qh[64]; int8_t scales[16]; uint16_t d; };
struct BlockIQ4_XS { uint16_t d, scales_h; uint8_t scales_l[4], qs[128]; };
static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22, "block size");
static_assert(sizeof(BlockQ5_1) == 24 && sizeof(BlockQ8_0) == 34 && sizeof(BlockMXFP4) == 17, "block size");
static_assert(sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144, "block size");
static_assert(sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210 && sizeof(BlockIQ4_XS) == 136, "block size");

static const int8_t kTableIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t kTableMXFP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Values 0..15 of a block are the low nibbles, 16..31 the high ones.
inline void nibbles(const uint8_t *qs, int8_t *n, int offset) {
  for (int j = 0; j < 16; ++j) {
    n[j] = int8_t((qs[j] & 15) - offset);
    n[j + 16] = int8_t((qs[j] >> 4) - offset);
  }
}

inline void nibbles_table(const uint8_t *qs, int8_t *n, const int8_t *table) {
  for (int j = 0; j < 16; ++j) {
    n[j] = table[qs[j] & 15];
    n[j + 16] = table[qs[j] >> 4];
  }
}

inline void five_bits(const uint8_t *qs, const uint8_t *qh, int8_t *n, int offset) {
  for (int j = 0; j < 16; ++j) {
    n[j] = int8_t(((qs[j] & 15) | (((qh[j >> 3] >> (j & 7)) & 1) << 4)) - offset);
    n[j + 16] = int8_t(((qs[j] >> 4) | (((qh[2 + (j >> 3)] >> (j & 7)) & 1) << 4)) - offset);
  }
}

// A type of class 32: integers of a block, its factor d, and m where kHasMin.
struct FormQ4_0 {
  using Block = BlockQ4_0;
  static constexpr bool kHasMin = false;
  static void integers(const Block &b, int8_t *n) { nibbles(b.qs, n, 8); }
  static float d(const Block &b) { return half_float(b.d); }
  static float m(const Block &) { return 0; }
};

struct FormQ4_1 {
  using Block = BlockQ4_1;
  static constexpr bool kHasMin = true;
  static void integers(const Block &b, int8_t *n) { nibbles(b.qs, n, 0); }
  static float d(const Block &b) { return half_float(b.d); }
  static float m(const Block &b) { return half_float(b.m); }
};

struct FormQ5_0 {
  using Block = BlockQ5_0;
  static constexpr bool kHasMin = false;
  static void integers(const Block &b, int8_t *n) { five_bits(b.qs, b.qh, n, 16); }
  static float d(const Block &b) { return half_float(b.d); }
  static float m(const Block &) { return 0; }
};

struct FormQ5_1 {
  using Block = BlockQ5_1;
  static constexpr bool kHasMin = true;
  static void integers(const Block &b, int8_t *n) { five_bits(b.qs, b.qh, n, 0); }
  static float d(const Block &b) { return half_float(b.d); }
  static float m(const Block &b) { return half_float(b.m); }
};

struct FormQ8_0 {
  using Block = BlockQ8_0;
  static constexpr bool kHasMin = false;
  static void integers(const Block &b, int8_t *n) { std::memcpy(n, b.qs, 32); }
  static float d(const Block &b) { return half_float(b.d); }
  static float m(const Block &) { return 0; }
};

struct FormIQ4_NL {
  using Block = BlockQ4_0;
  static constexpr bool kHasMin = false;
  static void integers(const Block &b, int8_t *n) { nibbles_table(b.qs, n, kTableIQ4); }
  static float d(const Block &b) { return half_float(b.d); }
  static float m(const Block &) { return 0; }
};

struct FormMXFP4 {
  using Block = BlockMXFP4;
  static constexpr bool kHasMin = false;
  static void integers(const Block &b, int8_t *n) { nibbles_table(b.qs, n, kTableMXFP4); }
  static float d(const Block &b) { return e8m0_half_float(b.e); }
  static float m(const Block &) { return 0; }
};

// 32 bytes' fields at bit `shift`; add_fields adds `factor` times theirs, and `offset`.
inline void fields(const uint8_t *bytes, int shift, int mask, int8_t *n) {
  for (int i = 0; i < 32; ++i) n[i] = int8_t((bytes[i] >> shift) & mask);
}

inline void add_fields(const uint8_t *bytes, int shift, int mask, int factor, int offset, int8_t *n) {
  for (int i = 0; i < 32; ++i) n[i] = int8_t(n[i] + factor * ((bytes[i] >> shift) & mask) + offset);
}

// Scales and minimums of a class 256 block, one each for the 16 groups of 16 values (doubled where the format has 8).
struct Scales {
  int16_t sc[16], mn[16];
};

// The 12 bytes of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minimums.
inline void scales_k4(const uint8_t *s, Scales &out) {
  for (int j = 0; j < 4; ++j) {
    out.sc[2 * j] = out.sc[2 * j + 1] = s[j] & 63;
    out.mn[2 * j] = out.mn[2 * j + 1] = s[j + 4] & 63;
    out.sc[2 * j + 8] = out.sc[2 * j + 9] = int16_t((s[j + 8] & 15) | ((s[j] >> 6) << 4));
    out.mn[2 * j + 8] = out.mn[2 * j + 9] = int16_t((s[j + 8] >> 4) | ((s[j + 4] >> 6) << 4));
  }
}

// A type of class 256: integers, scales, its factor d, and dmin where kHasMin.
struct FormQ2_K {
  using Block = BlockQ2_K;
  static constexpr bool kHasMin = true;
  static void integers(const Block &b, int8_t *n) {
    for (int j = 0; j < 8; ++j) fields(b.qs + 32 * (j >> 2), 2 * (j & 3), 3, n + 32 * j);
  }
  static void scales(const Block &b, Scales &s) {
    for (int j = 0; j < 16; ++j) {
      s.sc[j] = b.scales[j] & 15;
      s.mn[j] = b.scales[j] >> 4;
    }
  }
  static float d(const Block &b) { return half_float(b.d); }
  static float dmin(const Block &b) { return half_float(b.dmin); }
};

struct FormQ3_K {
  using Block = BlockQ3_K;
  static constexpr bool kHasMin = false;
  static void integers(const Block &b, int8_t *n) {
    for (int j = 0; j < 8; ++j) {
      fields(b.qs + 32 * (j >> 2), 2 * (j & 3), 3, n + 32 * j);
      add_fields(b.hmask, j, 1, 4, -4, n + 32 * j);
    }
  }
  static void scales(const Block &b, Scales &s) {
    for (int j = 0; j < 16; ++j) {
      const int low = (b.scales[j & 7] >> (4 * (j >> 3))) & 15;
      s.sc[j] = int16_t((low | (((b.scales[8 + (j & 3)] >> (2 * (j >> 2))) & 3) << 4)) - 32);
    }
  }
  static float d(const Block &b) { return half_float(b.d); }
  static float dmin(const Block &) { return 0; }
};

struct FormQ4_K {
  using Block = BlockQ4_K;
  static constexpr bool kHasMin = true;
  static void integers(const Block &b, int8_t *n) {
    for (int j = 0; j < 8; ++j) fields(b.qs + 32 * (j >> 1), 4 * (j & 1), 15, n + 32 * j);
  }
  static void scales(const Block &b, Scales &s) { scales_k4(b.scales, s); }
  static float d(const Block &b) { return half_float(b.d); }
  static float dmin(const Block &b) { return half_float(b.dmin); }
};

struct FormQ5_K {
  using Block = BlockQ5_K;
  static constexpr bool kHasMin = true;
  static void integers(const Block &b, int8_t *n) {
    for (int j = 0; j < 8; ++j) {
      fields(b.qs + 32 * (j >> 1), 4 * (j & 1), 15, n + 32 * j);
      add_fields(b.qh, j, 1, 16, 0, n + 32 * j);
    }
  }
  static void scales(const Block &b, Scales &s) { scales_k4(b.scales, s); }
  static float d(const Block &b) { return half_float(b.d); }
  static float dmin(const Block &b) { return half_float(b.dmin); }
};

struct FormQ6_K {
  using Block = BlockQ6_K;
  static constexpr bool kHasMin = false;
  static void integers(const Block &b, int8_t *n) {
    for (int j = 0; j < 8; ++j) {
      const int half = j >> 2, quarter = j & 3;
      fields(b.ql + 64 * half + 32 * (quarter & 1), 4 * (quarter >> 1), 15, n + 32 * j);
      add_fields(b.qh + 32 * half, 2 * quarter, 3, 16, -32, n + 32 * j);
    }
  }
  static void scales(const Block &b, Scales &s) {
    for (int j = 0; j < 16; ++j) s.sc[j] = b.scales[j];
  }
  static float d(const Block &b) { return half_float(b.d); }
  static float dmin(const Block &) { return 0; }
};

struct FormIQ4_XS {
  using Block = BlockIQ4_XS;
  static constexpr bool kHasMin = false;
  static void integers(const Block &b, int8_t *n) {
    for (int j = 0; j < 8; ++j) nibbles_table(b.qs + 16 * j, n + 32 * j, kTableIQ4);
  }
  static void scales(const Block &b, Scales &s) {
    for (int j = 0; j < 8; ++j) {
      const int low = (b.scales_l[j >> 1] >> (4 * (j & 1))) & 15;
      s.sc[2 * j] = s.sc[2 * j + 1] = int16_t((low | (((b.scales_h >> (2 * j)) & 3) << 4)) - 32);
    }
  }
  static float d(const Block &b) { return half_float(b.d); }
  static float dmin(const Block &) { return 0; }
};

}  // namespace
}  // namespace ft
#endif
