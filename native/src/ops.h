// The operations of freetoken.h, each as three functions; program.cpp walks them. Arithmetic: docs/numerics.md.
#ifndef FT_OPS_H
#define FT_OPS_H
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "freetoken.h"
#include "pool.h"

namespace ft {

struct OpInfo {
  bool (*is_valid)(const ft_op &op);
  void (*run)(const ft_op &op, Worker &worker);  // called by every thread; ends without a barrier
  size_t (*scratch_floats)(const ft_op &op);     // per thread; nullptr means none
};

extern const OpInfo kEmbed, kRmsNorm, kQuantize, kAdd, kGlu, kRope, kGatedAdd, kScale;  // ops_rows.cpp
extern const OpInfo kMatvec;                                                            // ops_matvec.cpp
extern const OpInfo kKvStore, kAttention;                                               // ops_attention.cpp
extern const OpInfo kRouter;                                                            // ops_router.cpp
extern const OpInfo kExperts;                                                           // ops_experts.cpp

// --- checks ---------------------------------------------------------------------------------------------------
constexpr int64_t kMaxSize = int64_t(1) << 40;  // no size or stride of a real model is near; products stay in int64

inline bool is_size(int64_t value) { return value > 0 && value < kMaxSize; }

inline bool are_sizes(std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), is_size);
}

// Whether none of the pointers p[0], ... named by their indices is null.
inline bool has_pointers(const ft_op &op, std::initializer_list<int> indices) {
  return std::all_of(indices.begin(), indices.end(), [&](int i) { return op.p[i] != nullptr; });
}

inline bool is_aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

// --- sharing out ----------------------------------------------------------------------------------------------
// Below this many elements one thread does the work at once: the others would only fetch its cache lines.
constexpr int64_t kSerialElements = 1024;

inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls body(item) for every item of 0..n_items-1, each on one of the threads; `elements` is the whole work's size.
template <typename Body>
void share_items(Worker &worker, int64_t n_items, int64_t elements, Body body) {
  if (worker.n_threads() == 1 || n_items == 1 || elements <= kSerialElements) {
    if (worker.index() != 0) return;
    for (int64_t item = 0; item < n_items; ++item) body(item);
    return;
  }
  for (int64_t item = worker.claim(n_items); item >= 0; item = worker.claim(n_items)) body(item);
}

// Rows of one claim: a few claims a thread so that a late thread is made up for, and whole cache lines of output.
inline int64_t rows_per_claim(int64_t n_rows, int n_threads) {
  if (n_threads == 1) return n_rows;
  const int64_t share = div_up(n_rows, int64_t(n_threads) * 6);
  return std::clamp<int64_t>(div_up(share, 16) * 16, 16, 512);
}

template <typename T>
const T *input(const ft_op &op, int index) {
  return static_cast<const T *>(op.p[index]);
}

template <typename T>
T *output(const ft_op &op, int index) {
  return static_cast<T *>(op.p[index]);
}

}  // namespace ft
#endif
