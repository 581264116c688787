// kernels_x86.h - the table of kernels written with AVX2 vectors, compiled by kernels_avx2.cpp, with VNNI's dot products
// (x86_vectors.h) by kernels_avxvnni.cpp, with wider vectors by kernels_avx512.cpp, with both by kernels_avx512vnni.cpp,
// and with byte permutations (x86_codes.h) and gathers (x86_gather.h) by kernels_avx512vbmi.cpp. They give the bits of
// kernels_common.h.
#ifndef FT_KERNELS_X86_H
#define FT_KERNELS_X86_H
#include "x86_floats.h"
#include "x86_floats512.h"
#include "x86_codes.h"
#include "x86_gather.h"
#ifndef __AVX512VBMI__
#include "x86_magnitudes.h"
#endif
#include "x86_products.h"
#include "x86_tiles.h"
#include "x86_wide256.h"
#include "x86_wide32.h"

namespace ft {
namespace {

#ifdef __AVX512VNNI__
using Unit32 = Wide;
#else
using Unit32 = Narrow;
#endif

template <class Blocks, class Vec>
inline void set_vec_32(Kernels &k, int type) {
  k.matvec[type] = matvec_32<Blocks, Unit32>;
  k.decode_row[type] = decode_32_vec<Vec>;
}

template <class Form, class Vec>
inline void set_vec_256(Kernels &k, int type) {
  k.matvec[type] = matvec_vec<Vec, Act256>;
  k.decode_row[type] = decode_256_vec<Form, Vec>;
}

inline Kernels x86_table(const char *name) {
  Kernels k = common_table(name);
  set_vec_32<BlocksQ4_0, VecQ4_0>(k, Q4_0);
  set_vec_32<BlocksQ4_1, VecQ4_1>(k, Q4_1);
  set_vec_32<BlocksQ5_0, VecQ5_0>(k, Q5_0);
  set_vec_32<BlocksQ5_1, VecQ5_1>(k, Q5_1);
  set_vec_32<BlocksQ8_0, VecQ8_0>(k, Q8_0);
  set_vec_32<BlocksIQ4_NL, VecIQ4_NL>(k, IQ4_NL);
  set_vec_32<BlocksMXFP4, VecMXFP4>(k, MXFP4);
  set_vec_256<FormQ2_K, VecQ2_K>(k, Q2_K);
  set_vec_256<FormQ3_K, VecQ3_K>(k, Q3_K);
  set_vec_256<FormQ4_K, VecQ4_K>(k, Q4_K);
  set_vec_256<FormQ5_K, VecQ5_K>(k, Q5_K);
  set_vec_256<FormQ6_K, VecQ6_K>(k, Q6_K);
  set_vec_256<FormIQ4_XS, VecIQ4_XS>(k, IQ4_XS);
  set_tiles(k);
  set_vec_256<FormIQ2_XXS, VecIQ2_XXS>(k, IQ2_XXS);
  set_vec_256<FormIQ2_XS, VecIQ2_XS>(k, IQ2_XS);
  set_vec_256<FormIQ2_S, VecIQ2_S>(k, IQ2_S);
  set_vec_256<FormIQ3_XXS, VecIQ3_XXS>(k, IQ3_XXS);
  set_vec_256<FormIQ3_S, VecIQ3_S>(k, IQ3_S);
#ifdef __AVX512VBMI__
  k.matvec[Q2_K] = matvec_wide<WideQ2_K, VecQ2_K>;
  k.matvec[Q3_K] = matvec_wide<WideQ3_K, VecQ3_K>;
  k.matvec[Q4_K] = matvec_wide<WideQ4_K, VecQ4_K>;
  k.matvec[Q5_K] = matvec_wide<WideQ5_K, VecQ5_K>;
  k.matvec[Q6_K] = matvec_wide<WideQ6_K, VecQ6_K>;
  k.matvec[IQ4_XS] = matvec_wide<WideIQ4_XS, VecIQ4_XS>;
  k.matvec[IQ2_XXS] = matvec_arranged<WideIQ2_XXS>;
  k.matvec[IQ2_XS] = matvec_arranged<WideIQ2_XS>;
  k.matvec[IQ2_S] = matvec_arranged<WideIQ2_S>;
  k.matvec[IQ3_XXS] = matvec_arranged<WideIQ3_XXS>;
  k.matvec[IQ3_S] = matvec_arranged<WideIQ3_S>;
#else
  k.matvec[IQ2_XXS] = matvec_arranged<MagIQ2_XXS>;
  k.matvec[IQ2_XS] = matvec_arranged<MagIQ2_XS>;
  k.matvec[IQ2_S] = matvec_arranged<MagIQ2_S>;
  k.matvec[IQ3_XXS] = matvec_arranged<MagIQ3_XXS>;
  k.matvec[IQ3_S] = matvec_arranged<MagIQ3_S>;
#endif
#ifdef __AVX512BW__
  k.matvec[F32] = matvec_float512<WideF32, VecF32>;
  k.matvec[F16] = matvec_float512<WideF16, VecF16>;
  k.matvec[BF16] = matvec_float512<WideBF16, VecBF16>;
#else
  k.matvec[F32] = matvec_float_vec<VecF32>;
  k.matvec[F16] = matvec_float_vec<VecF16>;
  k.matvec[BF16] = matvec_float_vec<VecBF16>;
#endif
  k.decode_row[F16] = decode_f16_vec;
  k.dot_f32 = dot_f32_vec;
  k.sumsq = sumsq_vec;
  k.dots_f32 = dots_vec<VecF32>;
  k.dots_f16 = dots_vec<VecF16>;
  k.wsum_f32 = wsum_vec<VecF32>;
  k.wsum_f16 = wsum_vec<VecF16>;
  k.exp_minus = exp_minus_vec;
  k.sigmoid = sigmoid_vec;
  k.silu_mul = silu_mul_vec;
  k.gelu_mul = gelu_mul_vec;
  k.to_f16 = to_f16_vec;
  return k;
}

#ifdef __AVX512VBMI__
inline Kernels gather_table(const char *name) {
  Kernels k = x86_table(name);
  k.matvec[IQ2_XS] = matvec_wide<GatherIQ2_XS, VecIQ2_XS>;
  k.matvec[IQ2_S] = matvec_wide<GatherIQ2_S, VecIQ2_S>;
  return k;
}
#endif

}  // namespace
}  // namespace ft
#endif
