// grids.h - code words of the IQ2 and IQ3 types: bytes of magnitude + 64, the first value lowest.
#ifndef FT_GRIDS_H
#define FT_GRIDS_H
#include <cstdint>

namespace ft {

constexpr int kGridBias = 64;  // 64 + magnitude and 64 - magnitude are both in 2..126

// Code words of the IQ3 types packed, in two planes of bytes: four levels of 3 bits, the first value lowest.
template <int kCount>
struct CodeBytes {
  alignas(64) uint8_t low[kCount], high[kCount];
};

struct Grids {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024];
  uint32_t iq3_xxs[256], iq3_s[512];
  CodeBytes<256> words_iq3_xxs;
  CodeBytes<512> words_iq3_s;
  alignas(64) uint8_t levels_iq3_xxs[64], levels_iq3_s[64];  // 64 + magnitude, over and over
};
extern const Grids kGrids;  // grids.cpp

}  // namespace ft
#endif
