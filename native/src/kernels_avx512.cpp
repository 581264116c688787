// kernels_avx512.cpp - AVX-512 without VNNI: the first processors that had it (compiled with those flags; called only where the CPU has them).
#ifdef __AVX512BW__
#include "kernels_x86.h"
#else
#include "kernels.h"
#endif

namespace ft {

const Kernels *kernels_avx512() {
#ifdef __AVX512BW__
  static const Kernels table = x86_table("avx512");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace ft
