// Many copies to a GPU in one call: a layer of missing experts is hundreds of runs, each a call of the driver. And host
// memory copied by all threads.
#include <cstring>
#include <exception>

#include "freetoken.h"
#include "ops.h"

int ft_copy_runs(ft_copy_fn copy, const ft_copy *runs, int64_t n, void *stream) {
  for (int64_t i = 0; i < n; ++i) {
    const ft_copy &run = runs[i];
    const int result = copy(run.to, reinterpret_cast<const void *>(uintptr_t(run.from)), size_t(run.n_bytes), stream);
    if (result != 0) return result;
  }
  return 0;
}

namespace ft {
namespace {

constexpr int64_t kCopyPiece = 256 * 1024;  // bytes of one claim

struct Copying {
  uint8_t *to;
  const uint8_t *from;
  int64_t n_bytes;
};

void copy_pieces(Worker &worker, const void *context) {
  const auto &copying = *static_cast<const Copying *>(context);
  share_items(worker, div_up(copying.n_bytes, kCopyPiece), kMaxSize, [&](int64_t item) {
    const int64_t begin = item * kCopyPiece;
    std::memcpy(copying.to + begin, copying.from + begin, size_t(std::min(kCopyPiece, copying.n_bytes - begin)));
  });
}

}  // namespace
}  // namespace ft

int ft_copy_bytes(ft_pool *pool, void *to, const void *from, int64_t n_bytes) {
  if (pool == nullptr || to == nullptr || from == nullptr || !ft::is_size(n_bytes)) return -1;
  const ft::Copying copying{static_cast<uint8_t *>(to), static_cast<const uint8_t *>(from), n_bytes};
  try {
    pool->pool.run(ft::copy_pieces, &copying, 0);
  } catch (const std::exception &) {
    return -1;
  }
  return 0;
}
