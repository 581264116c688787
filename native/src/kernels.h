// kernels.h - the arithmetic of docs/numerics.md as tables of pure functions, one table per instruction set.
//
// No allocation, no threads, no state. Every table gives the same bits (a NaN may differ in sign and payload).
// Callers (ops_*.cpp) split rows and blocks among threads as they like: no split changes a result.
#ifndef FT_KERNELS_H
#define FT_KERNELS_H
#include <cfloat>
#include <cstdint>

#ifdef __FAST_MATH__
#error "docs/numerics.md fixes every rounding: compile without -ffast-math"
#endif
static_assert(FLT_EVAL_METHOD == 0, "fp32 must be computed as fp32: on 32-bit x86 use -msse2 -mfpmath=sse");

namespace ft {

constexpr int kMaxTypes = 64;  // ggml's type numbers are below this

// ggml's numbers of the types that have a kernel or decoder here.
enum Type {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
  Q6_K = 14, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23, BF16 = 30,
  MXFP4 = 39
};

// --- quantised activations ------------------------------------------------------------------------------------
// A buffer of n tokens is n times act_token_bytes(cls, n_cols), token after token, 64-aligned. One token:
//   class 32:  [eight blocks] Act32; then dx[], sx[], fp32, and the negated sums -A[], int32.
//   class 256: [block] Act256; then dx[], fp32.
// All of it is padded with zeros to a multiple of 8 blocks (but Act256). With one plane lo and its sums are zero.

// Eight blocks side by side: place [j][b] holds values 4j .. 4j + 3 of block b, so that a lane of 32 bits is a block.
// Where products of bytes may saturate (AVX2 without VNNI) there are also the values `a` themselves, the even ones of
// each four ([j][0]) and the odd ones ([j][1]); other variants leave `words` unwritten.
struct Act32 {
  int8_t hi[8][8][4], lo[8][8][4];
  int16_t words[8][2][8][2];
};
struct Act256 {
  int8_t hi[256], lo[256];
  int16_t sum16[2][16];  // of each plane (hi, lo), over each 16 values; group j stands at group_place(j)
  int16_t sum32[2][8];   // the same over each 32 values, in order
  int8_t digits16[3][16], digits32[3][8];  // sums of a over 16 and 32 values, in order: base 256, the lowest digit first
  int32_t total[2];      // of each plane
  int8_t pad[16];
};
static_assert(sizeof(Act32) == 1024 && sizeof(Act256) == 704, "layout of activations");

// Even groups, then odd ones: a group of 32 values takes one place of each half of a vector.
static inline int group_place(int j) { return (j & 1) * 8 + (j >> 1); }

static inline int64_t pad8(int64_t n) { return (n + 7) & ~int64_t(7); }

// Bytes of a token's planes: dx[] begins behind them.
static inline int64_t act_planes_bytes(int cls, int64_t nb) {
  return cls == 32 ? pad8(nb) / 8 * int64_t(sizeof(Act32)) : nb * int64_t(sizeof(Act256));
}

static inline int64_t act_token_bytes(int cls, int64_t n_cols) {
  const int64_t nb = n_cols / cls, scales = (cls == 32 ? 3 : 1) * 4 * pad8(nb);
  return (act_planes_bytes(cls, nb) + scales + 63) & ~int64_t(63);
}

// --- activations of many tokens -------------------------------------------------------------------------------
// One token: int16 [n_cols], columns 0 2 1 3 of each four; then dx[n_cols / block] and sx[n_cols / group], fp32.
constexpr float kTileUnits = 32767;  // of the largest value of a block
constexpr int kMaxTileRows = 32;

struct TileAct {
  int block, group;
  int64_t n_cols, dx_at, sx_at;
  TileAct(int block_cols, int group_cols, int64_t cols)
      : block(block_cols), group(group_cols), n_cols(cols), dx_at(2 * cols), sx_at(dx_at + cols / block * 4) {}
  int64_t n_bytes() const { return (sx_at + n_cols / group * 4 + 63) & ~int64_t(63); }
  float *dx(uint8_t *act) const { return reinterpret_cast<float *>(act + dx_at); }
  float *sx(uint8_t *act) const { return reinterpret_cast<float *>(act + sx_at); }
  const float *dx(const uint8_t *act) const { return reinterpret_cast<const float *>(act + dx_at); }
  const float *sx(const uint8_t *act) const { return reinterpret_cast<const float *>(act + sx_at); }
};

// y[i * tile_rows + r] = product of weight row r < n_rows <= tile_rows with act[i], i in [0, n). y is 64-aligned.
struct TileKernel {
  void (*product)(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int n_rows, const uint8_t *const *act,
                  int64_t n, float *y);
  int block, group;  // of its TileAct
};

// --- the table ------------------------------------------------------------------------------------------------
// out[i][r] = product of weight row r (at w + r * row_bytes) with activation i, for r in [row0, row1), i in [0, n).
// act[i] is one token of a quantised buffer (type class 32 or 256) or an fp32 row (class 0). n is at most 8.
using MatvecFn = void (*)(const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
                          const void *const *act, int n, int planes, float *const *out);
using DecodeFn = void (*)(const void *src, float *dst, int64_t n);

struct Kernels {
  const char *name;

  // Quantise blocks [block0, block1) of one token row x (n_cols values) into `act_token`. Whoever takes the last
  // block writes the padding. cls 32 or 256, planes 1 or 2.
  void (*quantize)(const float *x, int cls, int64_t n_cols, int planes, void *act_token, int64_t block0,
                   int64_t block1);
  MatvecFn matvec[kMaxTypes];    // nullptr: decode the row and use dot_f32 (see matvec() below)
  DecodeFn decode_row[kMaxTypes];  // our own decoders; others: decoder() below

  // Products of many tokens (section 8); tile_rows is 0 where a variant has none, product nullptr where a type has none.
  TileKernel tile[kMaxTypes];
  int tile_rows;
  void (*tile_quantize)(const float *x, const TileAct &layout, uint8_t *act);

  // lanes32 dot product, lanes32 sum of squares, lanes8 sum.
  float (*dot_f32)(const float *a, const float *b, int64_t n);
  float (*sumsq)(const float *x, int64_t n);
  float (*sum8)(const float *x, int64_t n);
  float (*max)(const float *x, int64_t n);  // n >= 1; NaNs are passed over unless the first

  // s[j] = lanes32 dot of q with k[j*dim ...], j in [0, n): one KV head's keys of one page lie like that.
  void (*dots_f32)(const float *q, const float *k, int64_t dim, int64_t n, float *s);
  void (*dots_f16)(const float *q, const uint16_t *k, int64_t dim, int64_t n, float *s);
  // o[c] = sum over j ascending of p[j] * v[j*dim + c], from +0 (o is overwritten).
  void (*wsum_f32)(const float *p, const float *v, int64_t dim, int64_t n, float *o);
  void (*wsum_f16)(const float *p, const uint16_t *v, int64_t dim, int64_t n, float *o);

  // Elementwise. Outputs may be an input.
  void (*add)(const float *a, const float *b, float *y, int64_t n);
  void (*scale)(const float *x, float f, float *y, int64_t n);                          // x * f
  void (*softcap)(const float *x, float c, float *y, int64_t n);                        // c * tanh(x / c)
  void (*scale_mul)(const float *x, float f, const float *w, float *y, int64_t n);      // (x * f) * w
  void (*axpy)(float f, const float *x, float *y, int64_t n);                           // y = y + (f * x)
  void (*exp_minus)(const float *x, float m, float *y, int64_t n);                      // exp(x - m)
  void (*sigmoid)(const float *x, float *y, int64_t n);
  void (*silu_mul)(const float *g, const float *u, float *y, int64_t n);
  void (*gelu_mul)(const float *g, const float *u, float *y, int64_t n);
  // Rotate one head in place: half = rot / 2 pairs with cosines c and sines s.
  void (*rope_neox)(float *x, const float *c, const float *s, int64_t half);            // (x[i], x[i + half])
  void (*rope_pairs)(float *x, const float *c, const float *s, int64_t half);           // (x[2i], x[2i + 1])
  void (*to_f16)(const float *x, uint16_t *y, int64_t n);
};

const Kernels &kernels();  // the chosen table (dispatch.cpp); read once an operation

// dispatch.cpp: what ft_type_class returns; the decoder of a type (own or registered to_float) or nullptr.
int type_class(int type);
DecodeFn decoder(int type);

// out[i][r] for any decodable type, by the type's kernel or by decoding each row into `scratch` (n_cols floats, not
// read when the type has a kernel; needs_scratch tells).
bool needs_scratch(int type);
void matvec(int type, const uint8_t *w, int64_t row_bytes, int64_t n_cols, int64_t row0, int64_t row1,
            const void *const *act, int n, int planes, float *const *out, float *scratch);

// Tables, one a translation unit. Null where the CPU or compiler lacks the instructions.
const Kernels *kernels_portable();
const Kernels *kernels_avx2();
const Kernels *kernels_avxvnni();
const Kernels *kernels_avx512();
const Kernels *kernels_avx512vnni();
const Kernels *kernels_avx512vbmi();
const Kernels *kernels_avx512gather();

}  // namespace ft
#endif
