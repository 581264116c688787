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

constexpr Grids unpack_all() {
  Grids g = {};
  unpack<2>(kWordsIQ2_XXS, kLevelsIQ2_XXS, g.iq2_xxs);
  unpack<2>(kWordsIQ2_XS, kLevelsIQ2_XS, g.iq2_xs);
  unpack<2>(kWordsIQ2_S, kLevelsIQ2_S, g.iq2_s);
  unpack<3>(kWordsIQ3_XXS, kLevelsIQ3_XXS, g.iq3_xxs);
  unpack<3>(kWordsIQ3_S, kLevelsIQ3_S, g.iq3_s);
  return g;
}

}  // namespace

alignas(64) constexpr Grids kGrids = unpack_all();

}  // namespace ft
