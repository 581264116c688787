// kernels_avx512vnni.cpp - AVX-512 with VNNI (compiled with those flags; called only where the CPU has them).
#ifdef __AVX512VNNI__
#include "kernels_x86.h"
#else
#include "kernels.h"
#endif

namespace ft {

const Kernels *kernels_avx512vnni() {
#ifdef __AVX512VNNI__
  static const Kernels table = x86_table("avx512vnni");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace ft
