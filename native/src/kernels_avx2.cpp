// kernels_avx2.cpp - AVX2 and F16C (compiled with those flags; called only where the CPU has them).
#include "kernels_common.h"

namespace ft {

const Kernels *kernels_avx2() {
#ifdef __AVX2__
  static const Kernels table = common_table("avx2");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace ft
