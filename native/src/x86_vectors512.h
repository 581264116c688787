// x86_vectors512.h - 512-bit vectors, for processors that also permute bytes of whole registers (AVX512-VBMI; all of them
// have GFNI and BMI2 as well).
#ifndef FT_X86_VECTORS512_H
#define FT_X86_VECTORS512_H
#ifdef __AVX512VBMI__
#include "x86_vectors.h"

namespace ft {
namespace {

using I16 = __m512i;

FT_INLINE I16 load64(const void *p) { return _mm512_loadu_si512(p); }

FT_INLINE I16 fold2(I16 a, I16 b) { return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); }
FT_INLINE I16 fold4(I16 ab, I16 cd) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

}  // namespace
}  // namespace ft
#endif
#endif
