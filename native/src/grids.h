// grids.h - code words of the IQ2 and IQ3 types: bytes of magnitude + 64, the first value lowest.
#ifndef FT_GRIDS_H
#define FT_GRIDS_H
#include <cstdint>

namespace ft {

constexpr int kGridBias = 64;  // 64 + magnitude and 64 - magnitude are both in 2..126

struct Grids {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024];
  uint32_t iq3_xxs[256], iq3_s[512];
};
extern const Grids kGrids;  // grids.cpp

}  // namespace ft
#endif
