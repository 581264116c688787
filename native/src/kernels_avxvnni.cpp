// kernels_avxvnni.cpp - AVX2 with VNNI in its encoding: desktops without AVX-512 (compiled with those flags; called only where the CPU has them).
#ifdef __AVXVNNI__
#include "kernels_x86.h"
#else
#include "kernels.h"
#endif

namespace ft {

const Kernels *kernels_avxvnni() {
#ifdef __AVXVNNI__
  static const Kernels table = x86_table("avxvnni");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace ft
