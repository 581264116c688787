// kernels_avx512vbmi.cpp - as kernels_avx512vnni.cpp, with byte permutations of whole registers (VBMI); and the same with
// gathers (x86_gather.h).
#ifdef __AVX512VBMI__
#include "kernels_x86.h"
#else
#include "kernels.h"
#endif

namespace ft {

const Kernels *kernels_avx512vbmi() {
#ifdef __AVX512VBMI__
  static const Kernels table = x86_table("avx512vbmi");
  return &table;
#else
  return nullptr;
#endif
}

const Kernels *kernels_avx512gather() {
#ifdef __AVX512VBMI__
  static const Kernels table = gather_table("avx512gather");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace ft
