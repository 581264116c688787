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
      bytes |= Word(levels[level]) << (8 * j);
    }
    out[i] = bytes;
  }
}

// Four levels of 3 bits: the lower and the upper byte.
template <int kCount>
constexpr void pack_iq3(const uint16_t (&words)[kCount], CodeBytes<kCount> &out) {
  for (int i = 0; i < kCount; ++i) {
    out.low[i] = uint8_t(words[i] & 255);
    out.high[i] = uint8_t(words[i] >> 8);
  }
}

// Eight levels of 2 bits: their even and their odd bits.
template <int kCount>
constexpr void pack_iq2(const uint16_t (&words)[kCount], CodeBytes<kCount> &out) {
  for (int i = 0; i < kCount; ++i) {
    for (int j = 0; j < 8; ++j) {
      out.low[i] = uint8_t(out.low[i] | ((words[i] >> (2 * j)) & 1) << j);
      out.high[i] = uint8_t(out.high[i] | ((words[i] >> (2 * j + 1)) & 1) << j);
    }
  }
}

constexpr uint8_t signed_level(int magnitude, int minus) {
  return uint8_t(minus ? kGridBias - magnitude : kGridBias + magnitude);
}

constexpr int bit(int at, int i) { return (at >> i) & 1; }

constexpr void level_bytes_iq2(const uint8_t (&levels)[3], LevelBytes &out) {
  constexpr int kLow[4] = {5, 1, 3, 1}, kHigh[4] = {4, 0, 2, 0}, kMinus[4] = {3, 2, 5, 4};
  for (int k = 0; k < 4; ++k) {
    for (int at = 0; at < 64; ++at) {
      const int level = bit(at, kLow[k]) + 2 * bit(at, kHigh[k]);
      out.at[k][at] = level < 3 ? signed_level(levels[level], bit(at, kMinus[k])) : 0;
    }
  }
}

constexpr void level_bytes_iq3(const uint8_t (&levels)[8], LevelBytes &out) {
  constexpr int kMinus[4] = {2, 2, 1, 0};
  for (int k = 0; k < 4; ++k) {
    for (int at = 0; at < 64; ++at) out.at[k][at] = signed_level(levels[at >> 3], bit(at, kMinus[k]));
  }
}

constexpr Grids unpack_all() {
  Grids g = {};
  unpack<2>(kWordsIQ2_XXS, kLevelsIQ2_XXS, g.iq2_xxs);
  unpack<2>(kWordsIQ2_XS, kLevelsIQ2_XS, g.iq2_xs);
  unpack<2>(kWordsIQ2_S, kLevelsIQ2_S, g.iq2_s);
  unpack<3>(kWordsIQ3_XXS, kLevelsIQ3_XXS, g.iq3_xxs);
  unpack<3>(kWordsIQ3_S, kLevelsIQ3_S, g.iq3_s);
  pack_iq2(kWordsIQ2_XXS, g.packed_iq2_xxs);
  pack_iq2(kWordsIQ2_XS, g.packed_iq2_xs);
  pack_iq2(kWordsIQ2_S, g.packed_iq2_s);
  pack_iq3(kWordsIQ3_XXS, g.packed_iq3_xxs);
  pack_iq3(kWordsIQ3_S, g.packed_iq3_s);
  level_bytes_iq2(kLevelsIQ2_XXS, g.levels_iq2_xxs);
  level_bytes_iq2(kLevelsIQ2_XS, g.levels_iq2_xs);
  level_bytes_iq2(kLevelsIQ2_S, g.levels_iq2_s);
  level_bytes_iq3(kLevelsIQ3_XXS, g.levels_iq3_xxs);
  level_bytes_iq3(kLevelsIQ3_S, g.levels_iq3_s);
  return g;
}

}  // namespace

alignas(64) constexpr Grids kGrids = unpack_all();

}  // namespace ft
