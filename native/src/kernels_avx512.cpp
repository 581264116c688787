// kernels_avx512.cpp - AVX-512 with VNNI (compiled with those flags; called only where the CPU has them).
#include "kernels_common.h"

namespace ft {

const Kernels *kernels_avx512() {
#ifdef __AVX512VNNI__
  static const Kernels table = common_table("avx512vnni");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace ft
