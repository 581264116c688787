// grids.cpp - unpacks grids_data.h, at compile time.
#include "grids.h"

#include "grids_data.h"

namespace ft {
namespace {

template <int kBits, class Word, int kCount, int kLevels>
constexpr void unpack(const uint16_t (&words)[kCount], const uint8_t (&levels)[kLevels], Word (&out)[kCount]) {
  for (int i = 0; i < kCount; ++i) {
    Word bytes = 0;
    for (int j = 0; j < int(sizeof(Word)); ++j) {
      const int level = (words[i] >> (kBits * j)) & ((1 << kBits) - 1);
      bytes |= Word(kGridBias + levels[level]) << (8 * j);
    }
    out[i] = bytes;
  }
}

template <int kCount>
constexpr void split(const uint16_t (&words)[kCount], CodeBytes<kCount> &out) {
  for (int i = 0; i < kCount; ++i) {
    out.low[i] = uint8_t(words[i] & 255);
    out.high[i] = uint8_t(words[i] >> 8);
  }
}

template <int kLevels>
constexpr void repeat(const uint8_t (&levels)[kLevels], uint8_t (&out)[64]) {
  for (int i = 0; i < 64; ++i) out[i] = uint8_t(kGridBias + levels[i % kLevels]);
}

constexpr Grids unpack_all() {
  Grids g = {};
  unpack<2>(kWordsIQ2_XXS, kLevelsIQ2_XXS, g.iq2_xxs);
  unpack<2>(kWordsIQ2_XS, kLevelsIQ2_XS, g.iq2_xs);
  unpack<2>(kWordsIQ2_S, kLevelsIQ2_S, g.iq2_s);
  unpack<3>(kWordsIQ3_XXS, kLevelsIQ3_XXS, g.iq3_xxs);
  unpack<3>(kWordsIQ3_S, kLevelsIQ3_S, g.iq3_s);
  split(kWordsIQ3_XXS, g.words_iq3_xxs);
  split(kWordsIQ3_S, g.words_iq3_s);
  repeat(kLevelsIQ3_XXS, g.levels_iq3_xxs);
  repeat(kLevelsIQ3_S, g.levels_iq3_s);
  return g;
}

}  // namespace

alignas(64) constexpr Grids kGrids = unpack_all();

}  // namespace ft
