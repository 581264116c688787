// The operations of freetoken.h, each as three functions; program.cpp walks them. Arithmetic: docs/numerics.md.
#ifndef FT_OPS_H
#define FT_OPS_H
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "cuts.h"
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

// Whether the distance of experts (i12 of EXPERTS) leaves room for each matrix, or is none.
inline bool is_stride(const ft_op &op) {
  const int64_t n = op.i[12], d = op.i[2], ff = op.i[3];
  return n == 0 || (is_size(n) && n / op.i[7] >= ff && n / op.i[8] >= ff && n / op.i[9] >= d);
}

// Whether none of the pointers p[0], ... named by their indices is null.
inline bool has_pointers(const ft_op &op, std::initializer_list<int> indices) {
  return std::all_of(indices.begin(), indices.end(), [&](int i) { return op.p[i] != nullptr; });
}

inline bool is_aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

// --- sharing out ----------------------------------------------------------------------------------------------
// Below this many elements one thread does the work at once: the others would only fetch its cache lines.
constexpr int64_t kSerialElements = 1024;
constexpr int64_t kSerialBytes = 1024;  // of weights, likewise

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

// Calls body(begin, end) for this thread's part of the items 0..n_items-1. Parts are fixed, so that of two operations
// with the same items and elements a thread finds what it needs of the first in its own part: no barrier between them.
template <typename Body>
void share_parts(Worker &worker, int64_t n_items, int64_t elements, Body body) {
  const int64_t n_threads = elements <= kSerialElements ? 1 : worker.n_threads();
  const int64_t index = worker.index();
  if (index >= n_threads) return;
  const int64_t begin = n_items * index / n_threads, end = n_items * (index + 1) / n_threads;
  if (begin < end) body(begin, end);
}

constexpr int64_t kStreamBytes = 8192;   // a shorter stream of weights has hardly begun when it ends
constexpr int64_t kStartBytes = 4096;    // of a stream: what kernels do not ask for themselves (kAhead)
constexpr int64_t kFetchBytes = 65536;   // that a waiting thread fetches of what it waits to read

inline int64_t rows_of_stream(int64_t row_bytes) { return div_up(kStreamBytes, row_bytes); }

// Asks for bytes [begin, end) of weights, for the second cache.
inline void fetch(const uint8_t *p, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += 64) __builtin_prefetch(p + at, 0, 2);
}

// Calls body(begin, end) for ranges that make up all rows, each on one of the threads; the weights of a thread's next
// range are asked for before it runs one.
template <typename Body>
void share_rows(Worker &worker, int64_t n_rows, int64_t row_bytes, const uint8_t *w, Body body) {
  if (n_rows * row_bytes <= kSerialBytes) {
    if (worker.index() == 0) body(0, n_rows);
    return;
  }
  const Cuts cuts(n_rows, worker.n_threads(), rows_of_stream(row_bytes));
  for (int64_t claim = worker.claim(cuts.n_claims()); claim >= 0;) {
    const int64_t next = worker.claim(cuts.n_claims());
    if (next >= 0) {
      const Range ahead = cuts.at(next);
      fetch(w + ahead.begin * row_bytes, 0, std::min(kStartBytes, (ahead.end - ahead.begin) * row_bytes));
    }
    const Range range = cuts.at(claim);
    body(range.begin, range.end);
    claim = next;
  }
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
