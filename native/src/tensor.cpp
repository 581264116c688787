// ft_dequantize: a whole tensor, rows shared out among the threads. Feeds prefill.
#include <exception>

#include "kernels.h"
#include "ops.h"

namespace ft {
namespace {

constexpr int64_t kClaimElements = 64 * 1024;

struct Tensor {
  DecodeFn decode;
  const uint8_t *src;
  int64_t n_rows, n_cols, row_bytes;
  float *dst;
};

void decode_rows(Worker &worker, const void *context) {
  const auto &tensor = *static_cast<const Tensor *>(context);
  const int64_t per_claim = std::max<int64_t>(1, kClaimElements / tensor.n_cols);
  share_items(worker, div_up(tensor.n_rows, per_claim), tensor.n_rows * tensor.n_cols, [&](int64_t item) {
    const int64_t end = std::min((item + 1) * per_claim, tensor.n_rows);
    for (int64_t row = item * per_claim; row < end; ++row) {
      tensor.decode(tensor.src + row * tensor.row_bytes, tensor.dst + row * tensor.n_cols, tensor.n_cols);
    }
  });
}

}  // namespace
}  // namespace ft

extern "C" FT_API int ft_dequantize(ft_pool *pool, int type, const void *src, int64_t n_rows, int64_t n_cols,
                                    int64_t row_bytes, float *dst) {
  const ft::DecodeFn decode = ft::decoder(type);
  if (pool == nullptr || src == nullptr || dst == nullptr || decode == nullptr) return -1;
  if (!ft::are_sizes({n_rows, n_cols, row_bytes})) return -1;
  const ft::Tensor tensor = {decode, static_cast<const uint8_t *>(src), n_rows, n_cols, row_bytes, dst};
  try {
    pool->pool.run(ft::decode_rows, &tensor, 0);
  } catch (const std::exception &) {
    return -1;
  }
  return 0;
}
