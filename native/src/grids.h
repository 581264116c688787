// grids.h - code words of the IQ2 and IQ3 types: bytes of magnitude, the first value lowest.
#ifndef FT_GRIDS_H
#define FT_GRIDS_H
#include <cstdint>

namespace ft {

constexpr int kGridBias = 64;  // 64 + magnitude and 64 - magnitude are both in 2..126

// Code words packed, in two planes of bytes. IQ2: the lower and the upper bits of eight levels; IQ3: four levels of 3
// bits, the first value lowest.
template <int kCount>
struct CodeBytes {
  static constexpr int count = kCount;
  alignas(64) uint8_t low[kCount], high[kCount];
};

// 64 + a magnitude with its sign, for places of 6 bits among which a level and a sign stand (x86_codes.h tells where).
struct LevelBytes {
  alignas(64) uint8_t at[4][64];
};

struct Grids {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024];
  uint32_t iq3_xxs[256], iq3_s[512];
  CodeBytes<256> packed_iq2_xxs;
  CodeBytes<512> packed_iq2_xs;
  CodeBytes<1024> packed_iq2_s;
  CodeBytes<256> packed_iq3_xxs;
  CodeBytes<512> packed_iq3_s;
  LevelBytes levels_iq2_xxs, levels_iq2_xs, levels_iq2_s, levels_iq3_xxs, levels_iq3_s;
};
extern const Grids kGrids;  // grids.cpp

}  // namespace ft
#endif
