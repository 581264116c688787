// ROUTER: which experts a token takes and with which weights (docs/numerics.md section 7).
#include <limits>

#include "kernels.h"
#include "ops.h"

namespace ft {
namespace {

enum Gate { kSoftmax = 0, kSigmoid = 1, kSoftmaxChosen = 2 };
constexpr int64_t kMaxUsed = 64;
constexpr float kSmallestSum = 6.103515625e-5f;

bool is_valid(const ft_op &op) {
  return has_pointers(op, {0, 1, 2}) && are_sizes({op.i[0], op.i[1]}) && op.i[0] <= (1 << 20) && op.i[1] <= op.i[0] &&
         op.i[1] <= kMaxUsed && op.i[2] >= kSoftmax && op.i[2] <= kSoftmaxChosen;
}

size_t scratch_floats(const ft_op &op) { return static_cast<size_t>(op.i[0]); }

void softmax(const Kernels &k, const float *x, float *y, int64_t n) {
  k.exp_minus(x, k.max(x, n), y, n);
  const float sum = k.sum8(y, n);
  for (int64_t i = 0; i < n; ++i) y[i] = y[i] / sum;
}

// The k largest of value + bias, largest first, the lower number first at a tie; NaN counts as the least.
void choose(const float *value, const float *bias, int64_t n, int64_t k, int32_t *ids) {
  float keys[kMaxUsed];
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    float key = bias == nullptr ? value[i] : value[i] + bias[i];
    if (!(key == key)) key = -std::numeric_limits<float>::infinity();
    if (count == k && !(key > keys[k - 1])) continue;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && key > keys[at - 1]; --at) {
      keys[at] = keys[at - 1];
      ids[at] = ids[at - 1];
    }
    keys[at] = key;
    ids[at] = static_cast<int32_t>(i);
  }
}

void run(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  const int64_t n_expert = op.i[0], n_used = op.i[1], gate = op.i[2];
  share_items(worker, op.n, op.n * n_expert * 4, [&](int64_t t) {
    const float *logits = input<float>(op, 0) + t * n_expert, *prob = logits;
    if (gate == kSoftmax) softmax(k, logits, worker.scratch(), n_expert);
    if (gate == kSigmoid) k.sigmoid(logits, worker.scratch(), n_expert);
    if (gate != kSoftmaxChosen) prob = worker.scratch();
    int32_t *ids = output<int32_t>(op, 1) + t * n_used;
    float *weights = output<float>(op, 2) + t * n_used;
    choose(prob, input<float>(op, 3), n_expert, n_used, ids);
    for (int64_t r = 0; r < n_used; ++r) weights[r] = prob[ids[r]];
    if (gate == kSoftmaxChosen) softmax(k, weights, weights, n_used);
    if (op.i[3] != 0) {
      float sum = 0.0f;
      for (int64_t r = 0; r < n_used; ++r) sum = sum + weights[r];
      if (sum < kSmallestSum) sum = kSmallestSum;
      for (int64_t r = 0; r < n_used; ++r) weights[r] = weights[r] / sum;
    }
    if (op.f[0] != 1.0f) k.scale(weights, op.f[0], weights, n_used);
  });
}

}  // namespace

const OpInfo kRouter = {is_valid, run, scratch_floats};

}  // namespace ft
