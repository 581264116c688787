// kernels_portable.cpp - the variant of every CPU: the common code with the compiler's default instruction set.
#include "kernels_common.h"

namespace ft {

const Kernels *kernels_portable() {
  static const Kernels table = common_table("portable");
  return &table;
}

}  // namespace ft
