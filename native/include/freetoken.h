/* freetoken.h - the whole native interface, bound by freetoken/native.py through ctypes.
 *
 * Arithmetic: docs/numerics.md. All tensors are row-major fp32 unless said otherwise; sizes are in elements,
 * strides and lengths named *_bytes in bytes. The library trusts its caller: Python checks shapes and bounds.
 */
#ifndef FREETOKEN_H
#define FREETOKEN_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define FT_ABI_VERSION 2
#define FT_MAX_TOKENS 8    /* tokens of one program; more go through prefill */
#define FT_KV_PAGE 256     /* positions of one KV page, and of one attention split */

#if defined(_WIN32)
#define FT_API __declspec(dllexport)
#else
#define FT_API __attribute__((visibility("default")))
#endif

/* --- library ------------------------------------------------------------------------------------------------ */
FT_API int ft_abi_version(void);
FT_API int ft_op_bytes(void);                         /* sizeof(ft_op), checked by the binding */
FT_API const char *ft_variant(void);                  /* kernels in use, "auto" the first of these that the CPU can
                                                         run (gathers: and where they are fast): "avx512gather",
                                                         "avx512vbmi", "avx512vnni", "avxvnni", "avx512", "avx2",
                                                         "portable" */
FT_API int ft_set_variant(const char *name);          /* force one ("auto" restores); -1: unknown or not on this CPU */
FT_API const char *ft_cpu_features(void);             /* "avx2 f16c avx512f ..." as read from the CPU */

/* --- weights ------------------------------------------------------------------------------------------------ */
/* Type numbers are ggml's. Class of activation that the type's product takes:
 * 0 = fp32 row (float weights and types without an integer kernel), 32 or 256 = quantised blocks. */
FT_API int ft_type_class(int type);
/* ggml's to_float for types we do not decode ourselves; NULL removes. */
typedef void (*ft_to_float_fn)(const void *src, float *dst, int64_t n);
FT_API void ft_set_to_float(int type, ft_to_float_fn fn);
FT_API int ft_can_decode(int type);                   /* 1: own decoder or a registered to_float */

/* Bytes of one quantised activation buffer for n_tokens rows of n_cols (a multiple of cls), both planes. 64-aligned. */
FT_API int64_t ft_act_bytes(int cls, int64_t n_cols, int n_tokens);

/* --- thread pool -------------------------------------------------------------------------------------------- */
typedef struct ft_pool ft_pool;
/* n_threads includes the caller. cpus: n_threads CPU numbers to pin to, or NULL to leave them free; the caller is not
 * pinned. Workers spin spin_us microseconds for new work, then sleep: an idle pool uses no CPU. NULL on failure. */
FT_API ft_pool *ft_pool_create(int n_threads, const int *cpus, int spin_us);
FT_API void ft_pool_destroy(ft_pool *pool);
FT_API int ft_pool_threads(const ft_pool *pool);

/* --- programs ----------------------------------------------------------------------------------------------- */
/* A program is an array of operations run in order by all threads of a pool, a barrier between neighbours. Python
 * records one for each number of tokens and replays it every step with one call. `n` is the number of token rows.
 * Fields of each code are listed beside it; unnamed ones are 0.
 *
 * i7 of RMS_NORM, QUANTIZE, GLU, ROPE and KV_STORE: 1 = joined, no barrier between this operation and one of these
 * before it. They run in fixed parts: of n rows of heads (RMS_NORM with i1 > 1, ROPE, KV_STORE by its keys), or of n rows
 * in pieces of 256 values. A thread's parts are the same ones in operations of equal kind, n, heads or width. So what a
 * joined operation reads must be written by such an operation, or before the last barrier, and what it writes nobody
 * else may read or write since then. */
typedef struct ft_op {
  int32_t code;
  int32_t n;
  int64_t i[14];
  float f[6];
  void *p[14];
} ft_op;

enum {
  FT_OP_NOP = 0,
  /* x[n, cols] = row token[t] of a weight, times f0.
   * p0 const int32 *tokens, p1 weight data, p2 float *x; i0 type, i1 rows, i2 cols, i3 row_bytes; f0 scale */
  FT_OP_EMBED = 1,
  /* rms norm over groups: each token row holds i1 groups of i0 values (heads), same weight for every group.
   * p0 const float *x, p1 const float *w (i0 values), p2 float *y (may be x where i1 > 1), p3 const float *b or NULL,
   * p4 float *sum: with b (i1 = 1) the norm is of sum = x + b; y and sum are neither x nor b;
   * i0 width, i1 groups, i2 row stride of x, b and sum, i3 row stride of y (elements); f0 eps */
  FT_OP_RMS_NORM = 2,
  /* quantise n rows of cols. p0 const float *x, p1 void *act; i0 class (32 or 256), i1 cols, i2 planes (1 or 2),
   * i3 row stride of x */
  FT_OP_QUANTIZE = 3,
  /* y[n, rows] = W act (+ bias). p0 act (or const float *x where the class is 0), p1 weight data, p2 float *y,
   * p3 const float *bias or NULL; i0 type, i1 rows, i2 cols, i3 row_bytes, i4 planes, i5 row stride of x when class 0,
   * i6 row stride of y, i7 1 = joined: no barrier between this product and the MATVEC before it, since neither reads
   * what the other writes (at most 8 in a row) */
  FT_OP_MATVEC = 4,
  /* y = a + b elementwise over n * i0 values; p0 a, p1 b, p2 y (may be a or b) */
  FT_OP_ADD = 5,
  /* y = act(g) * u over n rows of i0 values. p0 g, p1 u, p2 y; i1 activation (0 silu, 1 gelu), i2 row stride of g and u,
   * i3 row stride of y */
  FT_OP_GLU = 6,
  /* rotate heads in place. p0 float *x, p1 const float *cos_sin [n, 2, rot/2]; i0 heads, i1 head_dim, i2 rot (even,
   * <= head_dim), i3 0 = neighbours (llama), 1 = halves (neox), i4 row stride of x */
  FT_OP_ROPE = 7,
  /* write keys and values into pages. p0 const float *k [n, i4 stride], p1 const float *v, p2 k pages, p3 v pages,
   * p4 const int32 *pos [n], p5 const int32 *page_table [n, i3];
   * i0 n_kv, i1 head_dim of k, i2 head_dim of v, i3 page table stride, i4 row stride of k, i5 row stride of v,
   * i6 element type (0 = f32, 1 = f16).
   * k pages: [page][n_kv][FT_KV_PAGE][head_dim], v pages alike. */
  FT_OP_KV_STORE = 8,
  /* attention of n tokens, each over its own pages. p0 const float *q [n, i7 stride], p1 k pages, p2 v pages,
   * p3 float *out [n, n_head*head_dim_v], p4 const int32 *pos, p5 const int32 *page_table, p6 float *scratch
   * (ft_attn_scratch_bytes), p7 const float *sinks [n_head] or NULL;
   * i0 n_kv, i1 head_dim of k, i2 head_dim of v, i3 page table stride, i4 n_head, i5 window (0 = all; else positions
   * pos-window+1..pos), i6 element type, i7 row stride of q; f0 scale, f1 softcap (0 = none) */
  FT_OP_ATTENTION = 9,
  /* choose experts. p0 const float *logits [n, E], p1 int32 *ids [n, k], p2 float *weights [n, k], p3 const float *bias
   * or NULL; i0 E, i1 k, i2 gate (0 softmax, 1 sigmoid, 2 softmax over the chosen), i3 normalise; f0 scale */
  FT_OP_ROUTER = 10,
  /* routed experts. p0 const float *x [n, d], p1 const int32 *ids [n, k] (an id < 0 is skipped and adds nothing),
   * p2 const float *weights [n, k], p3 gate bank, p4 up bank, p5 down bank, p6 float *rows [n, k, d] one row a routed
   * expert, p7 float *y [n, d] merged sum, or NULL (then p2 may be, too): rows alone, p8 void *scratch (ft_experts_scratch_bytes), p9 act of x (the class of gate and up;
   * NULL when 0), p10 second act of x when up has another class than gate (else NULL);
   * i0 E, i1 k, i2 d, i3 ff, i4 type gate, i5 type up, i6 type down, i7 row_bytes gate, i8 row_bytes up,
   * i9 row_bytes down, i10 activation, i11 planes, i12 bytes from one expert to the next in all three banks, or 0: an
   * expert is rows*row_bytes bytes, experts one after another. */
  FT_OP_EXPERTS = 11,
  /* y = x * sigmoid(g[t]) + b: p0 x [n, i0], p1 g [n, 1], p2 b [n, i0], p3 y */
  FT_OP_GATED_ADD = 12,
  /* y = x * f0 over n * i0 values, then softcap f1 where not 0. p0 x, p1 y */
  FT_OP_SCALE = 13,
  FT_OP_COUNT = 14
};

/* Run n_ops operations; 0, or -1-index of the first operation that is malformed (nothing has run then), or -1-n_ops
 * where memory for the threads' scratch is short. Malformed: null pointers, sizes that cannot be, n outside 1..8, a type
 * without decoder, tokens or positions past their tables, activation or experts scratch not 64-aligned, k above 64, an
 * expert with more than 2^20 rows.
 * Calls on one pool take turns; the caller's floating-point mode is set to the default meanwhile. */
FT_API int ft_run(ft_pool *pool, const ft_op *ops, int n_ops);

FT_API int64_t ft_attn_scratch_bytes(int n_tokens, int n_head, int head_dim_v, int64_t max_positions, int n_threads);
FT_API int64_t ft_experts_scratch_bytes(int n_tokens, int k, int64_t d, int64_t ff, int n_threads);

/* --- many tokens -------------------------------------------------------------------------------------------- */
/* Products of any number of tokens (up to 2^24, times k for experts) for prefill; docs/numerics.md, section 8. The
 * operation is laid out as in a program, x and y without gaps between rows:
 * FT_OP_MATVEC: p0 const float *x [n, cols], p1, p2, p3, i0 to i3 as above, p4 scratch; y [n, rows].
 * FT_OP_EXPERTS: p0 to p5, p7, i0 to i10 and i12 as above, p8 scratch. */
FT_API int ft_many_has(int type);                     /* 1: these kernels multiply many tokens by weights of a type */
FT_API int64_t ft_many_scratch_bytes(const ft_op *op); /* 64-aligned, pointers are not read; -1: malformed */
FT_API int ft_many_run(ft_pool *pool, const ft_op *op); /* 0, -1: malformed, -2: no memory */

/* --- whole tensors ------------------------------------------------------------------------------------------ */
/* dst[n_rows, n_cols] = decoded rows. dst_type 0 = f32. 0 or -1 (no decoder). */
FT_API int ft_dequantize(ft_pool *pool, int type, const void *src, int64_t n_rows, int64_t n_cols, int64_t row_bytes,
                         float *dst);

/* --- copies to a GPU ---------------------------------------------------------------------------------------- */
typedef struct {
  uint64_t to;   /* device address */
  uint64_t from; /* host address */
  uint64_t n_bytes;
} ft_copy;
/* Call `copy` (with the signature of cuMemcpyHtoDAsync) for each run in order, on `stream`. 0, or its first other result;
 * later runs are not copied then. */
typedef int (*ft_copy_fn)(uint64_t to, const void *from, size_t n_bytes, void *stream);
FT_API int ft_copy_runs(ft_copy_fn copy, const ft_copy *runs, int64_t n, void *stream);
/* Copy n_bytes of host memory by all threads. 0 or -1. */
FT_API int ft_copy_bytes(ft_pool *pool, void *to, const void *from, int64_t n_bytes);

/* --- meeting a GPU ------------------------------------------------------------------------------------------ */
/* A thread that meets a GPU in the middle of its step, at places in memory that both see. A place is 128 bytes of
 * `flags`, zero at first: the uint64 at byte 0 says that the GPU asks, the one at byte 64 that the CPU is done. In
 * stream order the GPU sets `done` of a step's places to 0 at the step's beginning; where it asks, it has written what
 * the place's operations read, sets `asked` to 1, and waits for `done` to be 1. The thread sets `asked` to 0, runs the
 * operations on the pool, and sets `done`. Where all ids of a place's EXPERTS are skipped it runs none of them. Between
 * steps thread and pool sleep; within one they spin, unless the GPU takes milliseconds to ask. */
typedef struct ft_meeting ft_meeting;
/* `flags`: 128 * n_places bytes, 64-aligned; they and the pool outlive the meeting. NULL on failure. */
FT_API ft_meeting *ft_meeting_create(ft_pool *pool, int n_places, void *flags);
FT_API void ft_meeting_destroy(ft_meeting *meeting);
/* Copy the operations of a place, which no step is expected at. 0, or -1. Others may be under way. */
FT_API int ft_meeting_set(ft_meeting *meeting, int place, const ft_op *ops, int n_ops);
/* A step is about to be launched that asks at these places, in this order. 0; -1: no such place, or it has failed. */
FT_API int ft_meeting_expect(ft_meeting *meeting, const int32_t *places, int n);
/* Steps expected that have not ended. */
FT_API int ft_meeting_pending(const ft_meeting *meeting);
/* 0 while all is well; else what ft_run answered where it failed, or 1 after ft_meeting_release. `place` says where. */
FT_API int ft_meeting_failure(const ft_meeting *meeting, int32_t *place);
/* Let the GPU go on whatever the thread does: `done` becomes 1 everywhere, again and again until the reset, and no
 * operation runs any more. From any thread. */
FT_API void ft_meeting_release(ft_meeting *meeting);
/* Release without being told, where the GPU has asked and waits for more than so many seconds; 0 (as at first): never. */
FT_API void ft_meeting_limit(ft_meeting *meeting, double seconds);
/* Forget the failure, once no step is pending and the GPU's have ended. 0, or -1. */
FT_API int ft_meeting_reset(ft_meeting *meeting);
/* So far: places met, those of them at which operations ran, and nanoseconds that these took. */
FT_API void ft_meeting_spent(const ft_meeting *meeting, uint64_t *n_met, uint64_t *n_run, uint64_t *run_ns);
/* Make operations take `factor` times as long, at least 1: another machine's CPU. Also those that run already. */
FT_API void ft_meeting_slow_down(ft_meeting *meeting, double factor);
/* For a GPU without operations on memory in its streams, whose host functions (void (*)(void *)) these are: to ask at the
 * place at `place`, and to wait there. */
FT_API void ft_place_ask(void *place);
FT_API void ft_place_wait(void *place);

/* --- measuring ---------------------------------------------------------------------------------------------- */
/* Read n_bytes by all threads and nothing else; *sum = sum of the 64-bit words (a last part of one counts as padded with
 * zeros). 0 or -1. */
FT_API int ft_read_bytes(ft_pool *pool, const void *p, int64_t n_bytes, uint64_t *sum);
/* y[n_rows] by a foreign product of one row with the signature of ggml's vec_dot, rows shared out as ours are. 0 or -1. */
typedef void (*ft_row_dot_fn)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);
FT_API int ft_call_rows(ft_pool *pool, ft_row_dot_fn dot, int n_cols, const void *w, int64_t row_bytes, int64_t n_rows,
                        const void *act, float *y);

#ifdef __cplusplus
}
#endif
#endif
