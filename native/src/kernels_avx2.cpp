// kernels_avx2.cpp - AVX2 and F16C (compiled with those flags; called only where the CPU has them).
#ifdef __AVX2__
#include "kernels_x86.h"
#else
#include "kernels.h"
#endif

namespace ft {

const Kernels *kernels_avx2() {
#ifdef __AVX2__
  static const Kernels table = x86_table("avx2");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace ft
