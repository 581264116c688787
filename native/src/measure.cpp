// What a machine's memory can give, for `ft bench kernels`: a plain reading loop, and rows handed to a foreign product.
#include <atomic>
#include <exception>

#include "freetoken.h"
#include "ops.h"

namespace ft {
namespace {

constexpr int64_t kReadPiece = 256 * 1024;  // bytes of one claim
constexpr int kStreams = 4;

struct Reading {
  const uint8_t *p;
  int64_t n_bytes;
  std::atomic<uint64_t> sum{0};
};

// Four streams of one piece at a time, which is what one core needs to keep its memory busy.
uint64_t sum_words(const uint8_t *p, int64_t n_bytes) {
  const int64_t stream = n_bytes / (kStreams * 64) * 64;
  uint64_t sums[kStreams] = {};
  for (int64_t at = 0; at < stream; at += 64) {
    for (int i = 0; i < kStreams; ++i) {
      uint64_t words[8];
      __builtin_memcpy(words, p + i * stream + at, 64);
      sums[i] += ((words[0] + words[1]) + (words[2] + words[3])) + ((words[4] + words[5]) + (words[6] + words[7]));
    }
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  for (int64_t at = kStreams * stream; at < n_bytes; at += 8) {
    uint64_t word = 0;
    __builtin_memcpy(&word, p + at, size_t(std::min<int64_t>(8, n_bytes - at)));
    sum += word;
  }
  return sum;
}

void read_pieces(Worker &worker, const void *context) {
  auto &reading = *static_cast<Reading *>(const_cast<void *>(context));
  uint64_t sum = 0;
  share_items(worker, div_up(reading.n_bytes, kReadPiece), kMaxSize, [&](int64_t item) {
    const int64_t begin = item * kReadPiece;
    sum += sum_words(reading.p + begin, std::min(kReadPiece, reading.n_bytes - begin));
  });
  reading.sum.fetch_add(sum, std::memory_order_relaxed);
}

struct Rows {
  ft_row_dot_fn dot;
  int n_cols;
  const uint8_t *w;
  int64_t row_bytes, n_rows;
  const void *act;
  float *y;
};

void call_rows(Worker &worker, const void *context) {
  const auto &rows = *static_cast<const Rows *>(context);
  share_rows(worker, rows.n_rows, rows.row_bytes, rows.w, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      rows.dot(rows.n_cols, rows.y + r, 0, rows.w + r * rows.row_bytes, 0, rows.act, 0, 1);
    }
  });
}

int run(ft_pool *pool, Job job, const void *context) {
  try {
    pool->pool.run(job, context, 0);
  } catch (const std::exception &) {
    return -1;
  }
  return 0;
}

}  // namespace
}  // namespace ft

extern "C" {

FT_API int ft_read_bytes(ft_pool *pool, const void *p, int64_t n_bytes, uint64_t *sum) {
  if (pool == nullptr || p == nullptr || sum == nullptr || !ft::is_size(n_bytes)) return -1;
  ft::Reading reading;
  reading.p = static_cast<const uint8_t *>(p);
  reading.n_bytes = n_bytes;
  const int result = ft::run(pool, ft::read_pieces, &reading);
  *sum = reading.sum.load();
  return result;
}

FT_API int ft_call_rows(ft_pool *pool, ft_row_dot_fn dot, int n_cols, const void *w, int64_t row_bytes, int64_t n_rows,
                        const void *act, float *y) {
  if (pool == nullptr || dot == nullptr || w == nullptr || act == nullptr || y == nullptr) return -1;
  if (!ft::are_sizes({n_cols, row_bytes, n_rows})) return -1;
  const ft::Rows rows = {dot, n_cols, static_cast<const uint8_t *>(w), row_bytes, n_rows, act, y};
  return ft::run(pool, ft::call_rows, &rows);
}

}  // extern "C"
