// x86_vectors.h - AVX2 vectors, the dot products that VNNI shortens, and folds in the orders of docs/numerics.md.
#ifndef FT_X86_VECTORS_H
#define FT_X86_VECTORS_H
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace ft {
namespace {

using I8 = __m256i;
using F8 = __m256;

// Calls inside a row would spill its registers; the compiler's own limits stop it from inlining everything.
#define FT_INLINE inline __attribute__((always_inline))

constexpr int kAhead = 4096;  // bytes of weights asked for ahead of their use: what a core's memory has under way

FT_INLINE I8 load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
FT_INLINE __m128i load16(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }

template <int kBytes>
FT_INLINE void prefetch(const void *p) {
  for (int i = 0; i < kBytes; i += 64) _mm_prefetch(static_cast<const char *>(p) + kAhead + i, _MM_HINT_T0);
}

FT_INLINE uint32_t word32(const void *p) {
  uint32_t u;
  std::memcpy(&u, p, 4);
  return u;
}

FT_INLINE int word16(const void *p) {
  uint16_t u;
  std::memcpy(&u, p, 2);
  return u;
}

// --- the places where VNNI helps ------------------------------------------------------------------------------
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define FT_VNNI 1
FT_INLINE I8 add_dot(I8 sum, I8 u, I8 a) { return _mm256_dpbusd_epi32(sum, u, a); }        // over quadruples
FT_INLINE I8 add_pairs(I8 sum, I8 a, I8 b) { return _mm256_dpwssd_epi32(sum, a, b); }      // of int16
#elif defined(__AVXVNNI__)
#define FT_VNNI 1
FT_INLINE I8 add_dot(I8 sum, I8 u, I8 a) { return _mm256_dpbusd_avx_epi32(sum, u, a); }
FT_INLINE I8 add_pairs(I8 sum, I8 a, I8 b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
#else
FT_INLINE I8 add_pairs(I8 sum, I8 a, I8 b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
#endif

// sum + sc * (u*a), sc int16 for each pair of products; a pair is at most 128 * 127 * 2 < 2^15.
FT_INLINE I8 add_scaled(I8 sum, I8 u, I8 a, I8 sc) { return add_pairs(sum, _mm256_maddubs_epi16(u, a), sc); }

// --- folds ----------------------------------------------------------------------------------------------------

FT_INLINE I8 fold2(I8 a, I8 b) { return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); }
FT_INLINE I8 fold4(I8 ab, I8 cd) {
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// Lane i of the result is the sum of the lanes of v[i].
FT_INLINE I8 fold8(const I8 *v) {
  const I8 low = fold4(fold2(v[0], v[1]), fold2(v[2], v[3]));
  const I8 high = fold4(fold2(v[4], v[5]), fold2(v[6], v[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

// tree8 of eight vectors, in order.
FT_INLINE F8 tree8_of_eight(const F8 *v, int step) {
  F8 two[4], four[2];  // l0+l4 l1+l5 l2+l6 l3+l7 of rows i and i + 4; then the two halves of rows i, i + 1, i + 4, i + 5
  for (int i = 0; i < 4; ++i) {
    const F8 a = v[i * step], b = v[(i + 4) * step];
    two[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  for (int i = 0; i < 2; ++i) {
    const F8 a = two[2 * i], b = two[2 * i + 1];
    four[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  return _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x88), _mm256_shuffle_ps(four[0], four[1], 0xdd));
}

FT_INLINE float tree8(F8 v) {
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));  // l0+l4, l1+l5, l2+l6, l3+l7
  const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

}  // namespace
}  // namespace ft
#endif
