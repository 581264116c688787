// MATVEC: a weight times up to 8 activations, rows shared out among the threads.
#include "kernels.h"
#include "ops.h"

namespace ft {
namespace {

bool is_valid(const ft_op &op) {
  const int type = static_cast<int>(op.i[0]);
  if (!has_pointers(op, {0, 1, 2}) || !are_sizes({op.i[1], op.i[2], op.i[3], op.i[6]})) return false;
  if (op.i[1] > op.i[6] || (op.i[4] != 1 && op.i[4] != 2) || decoder(type) == nullptr) return false;
  const int cls = type_class(type);
  return cls == 0 ? is_size(op.i[5]) : op.i[2] % cls == 0 && is_aligned(op.p[0]);
}

size_t scratch_floats(const ft_op &op) {
  return needs_scratch(static_cast<int>(op.i[0])) ? static_cast<size_t>(op.i[2]) : 0;
}

void run(const ft_op &op, Worker &worker) {
  const int type = static_cast<int>(op.i[0]), cls = type_class(type);
  const int64_t rows = op.i[1], cols = op.i[2];
  const int64_t act_bytes = cls == 0 ? op.i[5] * int64_t(sizeof(float)) : act_token_bytes(cls, cols);
  const auto *bias = input<float>(op, 3);
  const void *act[FT_MAX_TOKENS];
  float *out[FT_MAX_TOKENS];
  for (int t = 0; t < op.n; ++t) {
    act[t] = input<uint8_t>(op, 0) + t * act_bytes;
    out[t] = output<float>(op, 2) + t * op.i[6];
  }
  share_rows(worker, rows, op.i[3], input<uint8_t>(op, 1), [&](int64_t begin, int64_t end) {
    matvec(type, input<uint8_t>(op, 1), op.i[3], cols, begin, end, act, op.n, static_cast<int>(op.i[4]), out,
           worker.scratch());
    if (bias == nullptr) return;
    for (int t = 0; t < op.n; ++t) {
      for (int64_t r = begin; r < end; ++r) out[t][r] += bias[r];
    }
  });
}

}  // namespace

const OpInfo kMatvec = {is_valid, run, scratch_floats};

}  // namespace ft
