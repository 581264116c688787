// KV_STORE and ATTENTION. A page holds 256 positions of all KV heads, and a split of the softmax is one page, so that
// a work item reads one contiguous run of keys and one of values.
#include <cstring>

#include "kernels.h"
#include "ops.h"

namespace ft {
namespace {

constexpr int64_t kPage = FT_KV_PAGE;

bool has_pages(const int32_t *pos, const int32_t *table, int n, int64_t stride) {
  for (int t = 0; t < n; ++t) {
    if (pos[t] < 0 || pos[t] / kPage >= stride) return false;
    if (table[t * stride + pos[t] / kPage] < 0) return false;
  }
  return true;
}

// --- KV_STORE -----------------------------------------------------------------------------------------------------
bool kv_store_is_valid(const ft_op &op) {
  return has_pointers(op, {0, 1, 2, 3, 4, 5}) && are_sizes({op.i[0], op.i[1], op.i[2], op.i[3], op.i[4], op.i[5]}) &&
         op.i[0] * op.i[1] <= op.i[4] && op.i[0] * op.i[2] <= op.i[5] && (op.i[6] == 0 || op.i[6] == 1) &&
         has_pages(input<int32_t>(op, 4), input<int32_t>(op, 5), op.n, op.i[3]);
}

// Writes one head's `dim` values to its place in the pages.
void store_head(const float *x, void *pages, int64_t row, int64_t dim, bool is_f16) {
  if (is_f16) {
    kernels().to_f16(x, static_cast<uint16_t *>(pages) + row * dim, dim);
  } else {
    std::memcpy(static_cast<float *>(pages) + row * dim, x, static_cast<size_t>(dim) * sizeof(float));
  }
}

void kv_store(const ft_op &op, Worker &worker) {
  const int64_t n_kv = op.i[0], dim_k = op.i[1], dim_v = op.i[2], stride = op.i[3];
  const bool is_f16 = op.i[6] == 1;
  share_parts(worker, op.n * n_kv, op.n * n_kv * dim_k, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t t = item / n_kv, head = item % n_kv, pos = input<int32_t>(op, 4)[t];
      const int64_t page = input<int32_t>(op, 5)[t * stride + pos / kPage];
      const int64_t row = (page * n_kv + head) * kPage + pos % kPage;
      store_head(input<float>(op, 0) + t * op.i[4] + head * dim_k, op.p[2], row, dim_k, is_f16);
      store_head(input<float>(op, 1) + t * op.i[5] + head * dim_v, op.p[3], row, dim_v, is_f16);
    }
  });
}

// --- ATTENTION ----------------------------------------------------------------------------------------------------
bool attention_is_valid(const ft_op &op) {
  return has_pointers(op, {0, 1, 2, 3, 4, 5, 6}) &&
         are_sizes({op.i[0], op.i[1], op.i[2], op.i[3], op.i[4], op.i[7]}) && op.i[4] % op.i[0] == 0 &&
         op.i[4] * op.i[1] <= op.i[7] && op.i[5] >= 0 && (op.i[6] == 0 || op.i[6] == 1) &&
         has_pages(input<int32_t>(op, 4), input<int32_t>(op, 5), op.n, op.i[3]);
}

// One attention operation, unpacked. Partial results of (token, split, head) are records of dim_v + 2 floats in the
// scratch: m, l, then o.
struct Attention {
  const ft_op &op;
  const Kernels &k = kernels();
  const int64_t n_kv = op.i[0], dim_k = op.i[1], dim_v = op.i[2], stride = op.i[3], n_head = op.i[4];
  const int64_t record = dim_v + 2;
  const bool is_f16 = op.i[6] == 1;
  int64_t first[FT_MAX_TOKENS];            // first position that token t attends to
  int64_t split_begin[FT_MAX_TOKENS + 1];  // running number of splits over all tokens

  explicit Attention(const ft_op &operation) : op(operation) {
    split_begin[0] = 0;
    for (int t = 0; t < op.n; ++t) {
      const int64_t at = pos(t), window = op.i[5];
      first[t] = window > 0 ? std::max<int64_t>(0, at - window + 1) : 0;
      split_begin[t + 1] = split_begin[t] + at / kPage - first[t] / kPage + 1;
    }
  }

  int64_t pos(int64_t t) const { return input<int32_t>(op, 4)[t]; }
  int64_t n_splits(int64_t t) const { return split_begin[t + 1] - split_begin[t]; }
  float *partial(int64_t split, int64_t head) const {
    return output<float>(op, 6) + (split * n_head + head) * record;
  }

  void run_split(int64_t t, int64_t split, int64_t head) const;
  void merge(int64_t t, int64_t head) const;
};

// Steps 1 and 2 of section 6 for one head and the split of running number `split`.
void Attention::run_split(int64_t t, int64_t split, int64_t head) const {
  const int64_t page_index = first[t] / kPage + split - split_begin[t];
  const int64_t begin = std::max(first[t] - page_index * kPage, int64_t(0));
  const int64_t n = std::min(pos(t) - page_index * kPage + 1, kPage) - begin;
  const int64_t page = input<int32_t>(op, 5)[t * stride + page_index];
  const int64_t row = (page * n_kv + head / (n_head / n_kv)) * kPage + begin;
  const float *q = input<float>(op, 0) + t * op.i[7] + head * dim_k;
  float *out = partial(split, head);

  alignas(64) float s[kPage];
  const int64_t aligned = begin & ~int64_t(7);  // lanes are those of the position within the split
  float *p = s + (begin - aligned);
  std::fill(s, p, 0.0f);
  if (is_f16) {
    k.dots_f16(q, input<uint16_t>(op, 1) + row * dim_k, dim_k, n, p);
  } else {
    k.dots_f32(q, input<float>(op, 1) + row * dim_k, dim_k, n, p);
  }
  k.scale(p, op.f[0], p, n);
  if (op.f[1] != 0.0f) k.softcap(p, op.f[1], p, n);
  out[0] = k.max(p, n);
  k.exp_minus(p, out[0], p, n);
  out[1] = k.sum8(s, n + (begin - aligned));
  if (is_f16) {
    k.wsum_f16(p, input<uint16_t>(op, 2) + row * dim_v, dim_v, n, out + 2);
  } else {
    k.wsum_f32(p, input<float>(op, 2) + row * dim_v, dim_v, n, out + 2);
  }
}

// Step 3 for one head. A sink is one more term of the sum, with a score of its own and no value.
void Attention::merge(int64_t t, int64_t head) const {
  const auto *sinks = input<float>(op, 7);
  float *out = output<float>(op, 3) + (t * n_head + head) * dim_v;
  float mm = partial(split_begin[t], head)[0];
  for (int64_t split = split_begin[t] + 1; split < split_begin[t + 1]; ++split) {
    const float m = partial(split, head)[0];
    if (m > mm) mm = m;
  }
  if (sinks != nullptr && sinks[head] > mm) mm = sinks[head];
  float total = 0.0f, w;
  std::fill(out, out + dim_v, 0.0f);
  for (int64_t split = split_begin[t]; split < split_begin[t + 1]; ++split) {
    const float *from = partial(split, head);
    k.exp_minus(from, mm, &w, 1);
    total = total + w * from[1];
    k.axpy(w, from + 2, out, dim_v);
  }
  if (sinks != nullptr) {
    k.exp_minus(sinks + head, mm, &w, 1);
    total = total + w;
  }
  k.scale(out, 1.0f / total, out, dim_v);
}

// All query heads of a KV head form one item, so that its page is fetched once; with few items each head is one.
void attention(const ft_op &op, Worker &worker) {
  const Attention a(op);
  const int64_t all_splits = a.split_begin[op.n];
  const bool by_head = all_splits * a.n_kv < int64_t(worker.n_threads()) * 4;
  const int64_t groups = by_head ? a.n_head : a.n_kv, heads = a.n_head / groups;
  const int64_t work = all_splits == op.n ? (a.pos(0) + 1) * a.n_head * a.dim_k : kMaxSize;
  share_items(worker, all_splits * groups, work, [&](int64_t item) {
    const int64_t split = item / groups, group = item % groups;
    int64_t t = 0;
    while (split >= a.split_begin[t + 1]) ++t;
    for (int64_t head = group * heads; head < (group + 1) * heads; ++head) {
      a.run_split(t, split, head);
      if (a.n_splits(t) == 1) a.merge(t, head);
    }
  });
  if (all_splits == op.n) return;
  worker.barrier();
  share_items(worker, op.n * a.n_head, all_splits * a.n_head * a.dim_v, [&](int64_t item) {
    const int64_t t = item / a.n_head;
    if (a.n_splits(t) > 1) a.merge(t, item % a.n_head);
  });
}

}  // namespace

const OpInfo kKvStore = {kv_store_is_valid, kv_store, nullptr};
const OpInfo kAttention = {attention_is_valid, attention, nullptr};

}  // namespace ft

extern "C" FT_API int64_t ft_attn_scratch_bytes(int n_tokens, int n_head, int head_dim_v, int64_t max_positions,
                                                int n_threads) {
  (void)n_threads;
  const int64_t splits = ft::div_up(std::max<int64_t>(max_positions, 1), FT_KV_PAGE);
  return int64_t(n_tokens) * n_head * splits * (head_dim_v + 2) * int64_t(sizeof(float));
}
