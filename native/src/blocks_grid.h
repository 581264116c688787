// blocks_grid.h - the IQ2 and IQ3 types: code words of 8 or 4 magnitudes (grids.h), signs, and scales of 4 bits.
// Layouts: ggml-common.h of llama.cpp. A weight is d * 2^-k * (2s + 1) * integer, or d * (2s + 1) * integer for IQ3_S.
#ifndef FT_BLOCKS_GRID_H
#define FT_BLOCKS_GRID_H
#include <cstdint>
#include <cstring>

#include "blocks.h"
#include "grids.h"

namespace ft {
namespace {

struct BlockIQ2_XXS { uint16_t d; uint8_t qs[64]; };  // for each 32 values: 4 code bytes, a word of signs and scale
struct BlockIQ2_XS { uint16_t d; uint8_t qs[64], scales[8]; };  // for each 8 values: 9 bits of code, 7 of signs
struct BlockIQ2_S { uint16_t d; uint8_t qs[32], signs[32], qh[8], scales[8]; };
struct BlockIQ3_XXS { uint16_t d; uint8_t qs[64], words[32]; };  // words of signs and scale
struct BlockIQ3_S { uint16_t d; uint8_t qs[64], qh[8], signs[32], scales[4]; };
static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82, "block size");
static_assert(sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110, "block size");

template <class Word>
inline Word word_at(const uint8_t *p) {
  Word w;
  std::memcpy(&w, p, sizeof(w));
  return w;
}

// Seven stored signs; the eighth makes their number even.
inline uint32_t even_signs(uint32_t seven) {
  const uint32_t a = seven ^ (seven >> 4), b = a ^ (a >> 2);
  return seven | (((b ^ (b >> 1)) & 1) << 7);
}

// Four times seven signs, in the lower 28 bits.
inline uint32_t even_signs4(uint32_t w) {
  uint32_t all = 0;
  for (int i = 0; i < 4; ++i) all |= even_signs((w >> (7 * i)) & 127) << (8 * i);
  return all;
}

// The j-th 32 values' signs, a set bit for a minus.
inline uint32_t signs_of(const BlockIQ2_XXS &b, int j) { return even_signs4(word_at<uint32_t>(b.qs + 8 * j + 4)); }
inline uint32_t signs_of(const BlockIQ3_XXS &b, int j) { return even_signs4(word_at<uint32_t>(b.words + 4 * j)); }
inline uint32_t signs_of(const BlockIQ2_S &b, int j) { return word_at<uint32_t>(b.signs + 4 * j); }
inline uint32_t signs_of(const BlockIQ3_S &b, int j) { return word_at<uint32_t>(b.signs + 4 * j); }
inline uint32_t signs_of(const BlockIQ2_XS &b, int j) {
  uint32_t all = 0;
  for (int i = 0; i < 4; ++i) all |= even_signs(b.qs[8 * j + 2 * i + 1] >> 1) << (8 * i);
  return all;
}

// The i-th code word's place in its table.
inline int code_of(const BlockIQ2_XXS &b, int i) { return b.qs[8 * (i >> 2) + (i & 3)]; }
inline int code_of(const BlockIQ2_XS &b, int i) { return word_at<uint16_t>(b.qs + 2 * i) & 511; }
inline int code_of(const BlockIQ2_S &b, int i) { return b.qs[i] | (((b.qh[i >> 2] >> (2 * (i & 3))) & 3) << 8); }
inline int code_of(const BlockIQ3_XXS &b, int i) { return b.qs[i]; }
inline int code_of(const BlockIQ3_S &b, int i) { return b.qs[i] | (((b.qh[i >> 3] >> (i & 7)) & 1) << 8); }

// The j-th 16 values' scale.
inline int scale_of(const BlockIQ2_XXS &b, int j) { return b.qs[8 * (j >> 1) + 7] >> 4; }
inline int scale_of(const BlockIQ3_XXS &b, int j) { return b.words[4 * (j >> 1) + 3] >> 4; }
inline int scale_of(const BlockIQ2_XS &b, int j) { return (b.scales[j >> 1] >> (4 * (j & 1))) & 15; }
inline int scale_of(const BlockIQ2_S &b, int j) { return (b.scales[j >> 1] >> (4 * (j & 1))) & 15; }
inline int scale_of(const BlockIQ3_S &b, int j) { return (b.scales[j >> 2] >> (4 * ((j >> 1) & 1))) & 15; }

// A form of class 256. kUnit is the power of two that d is multiplied with.
template <class BlockType, class Word, int kCount, Word (Grids::*kTable)[kCount], int kUnitBits>
struct FormGrid {
  using Block = BlockType;
  using Code = Word;
  static constexpr bool kHasMin = false;
  static constexpr float kUnit = 1.0f / (1 << kUnitBits);
  static const Word *table() { return kGrids.*kTable; }
  static void integers(const Block &b, int8_t *n) {
    constexpr int kWidth = sizeof(Word);
    for (int j = 0; j < 8; ++j) {
      const uint32_t signs = signs_of(b, j);
      for (int i = 0; i < 32; ++i) {
        const Word word = table()[code_of(b, (32 * j + i) / kWidth)];
        const int magnitude = int((word >> (8 * (i % kWidth))) & 255);
        n[32 * j + i] = int8_t((signs >> i) & 1 ? -magnitude : magnitude);
      }
    }
  }
  static void scales(const Block &b, Scales &s) {
    for (int j = 0; j < 16; ++j) s.sc[j] = int16_t(2 * scale_of(b, j) + 1);
  }
  static float d(const Block &b) { return half_float(b.d) * kUnit; }
  static float dmin(const Block &) { return 0; }
};

using FormIQ2_XXS = FormGrid<BlockIQ2_XXS, uint64_t, 256, &Grids::iq2_xxs, 3>;
using FormIQ2_XS = FormGrid<BlockIQ2_XS, uint64_t, 512, &Grids::iq2_xs, 3>;
using FormIQ2_S = FormGrid<BlockIQ2_S, uint64_t, 1024, &Grids::iq2_s, 3>;
using FormIQ3_XXS = FormGrid<BlockIQ3_XXS, uint32_t, 256, &Grids::iq3_xxs, 2>;
using FormIQ3_S = FormGrid<BlockIQ3_S, uint32_t, 512, &Grids::iq3_s, 0>;

}  // namespace
}  // namespace ft
#endif
