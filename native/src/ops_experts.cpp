// EXPERTS: gate and up rows of all routed (token, expert) pairs, activation, quantisation for `down`, down rows, merge.
// Pairs of one expert form a group, so that the expert's rows are read once for all tokens of the batch.
#include "kernels.h"
#include "ops.h"

namespace ft {
namespace {

constexpr int64_t kMaxUsed = 64;
constexpr int64_t kMergePiece = 256;  // columns of one claim of the merge

int64_t align64(int64_t n_bytes) { return (n_bytes + 63) & ~int64_t(63); }

// One pair's bytes of the scratch: g, u (h takes g's place) and h quantised, in either class.
int64_t row_bytes_of(int64_t ff) { return align64(ff * int64_t(sizeof(float))); }
int64_t act_bytes_of(int64_t ff) { return std::max(act_token_bytes(32, ff), act_token_bytes(256, ff)) + 128; }

bool type_is_valid(int64_t type, int64_t cols, const void *act) {
  if (decoder(static_cast<int>(type)) == nullptr) return false;
  const int cls = type_class(static_cast<int>(type));
  return cls == 0 || (cols % cls == 0 && act != nullptr && is_aligned(act));
}

const void *act_of_up(const ft_op &op) { return op.p[10] != nullptr ? op.p[10] : op.p[9]; }

bool is_valid(const ft_op &op) {
  if (!has_pointers(op, {0, 1, 2, 3, 4, 5, 6, 7, 8}) || !is_aligned(op.p[8])) return false;
  if (!are_sizes({op.i[0], op.i[1], op.i[2], op.i[3], op.i[7], op.i[8], op.i[9]})) return false;
  if (op.i[1] > kMaxUsed || op.i[1] > op.i[0] || (op.i[10] != 0 && op.i[10] != 1)) return false;
  if (op.i[11] != 1 && op.i[11] != 2) return false;
  const int gate = type_class(static_cast<int>(op.i[4])), up = type_class(static_cast<int>(op.i[5]));
  if (gate != 0 && up != 0 && gate != up && op.p[10] == nullptr) return false;
  return type_is_valid(op.i[4], op.i[2], op.p[9]) && type_is_valid(op.i[5], op.i[2], act_of_up(op)) &&
         type_is_valid(op.i[6], op.i[3], op.p[8]);
}

size_t scratch_floats(const ft_op &op) {
  int64_t n = 0;
  for (const int i : {4, 5}) n = needs_scratch(static_cast<int>(op.i[i])) ? std::max(n, op.i[2]) : n;
  if (needs_scratch(static_cast<int>(op.i[6]))) n = std::max(n, op.i[3]);
  return static_cast<size_t>(n);
}

// The pairs (token * k + rank) of one expert.
struct Group {
  int32_t expert;
  int32_t n;
  int16_t pairs[FT_MAX_TOKENS];
};

// Which products an expert has, seen by one thread. Every thread forms the same groups.
struct Experts {
  const ft_op &op;
  Worker &worker;
  const Kernels &k = kernels();
  const int64_t n_expert = op.i[0], n_used = op.i[1], d = op.i[2], ff = op.i[3];
  const int planes = static_cast<int>(op.i[11]);
  int n_groups = 0;
  Group groups[FT_MAX_TOKENS * kMaxUsed];

  Experts(const ft_op &operation, Worker &w) : op(operation), worker(w) {
    const auto *ids = input<int32_t>(op, 1);
    for (int pair = 0; pair < op.n * n_used; ++pair) {
      if (ids[pair] >= 0 && ids[pair] < n_expert) add_pair(ids[pair], pair);
    }
  }

  void add_pair(int32_t expert, int pair) {
    int g = 0;
    while (g < n_groups && (groups[g].expert != expert || groups[g].n == FT_MAX_TOKENS)) ++g;
    if (g == n_groups) {
      groups[g].expert = expert;
      groups[g].n = 0;
      ++n_groups;
    }
    groups[g].pairs[groups[g].n++] = static_cast<int16_t>(pair);
  }

  float *gate(int64_t pair) const { return reinterpret_cast<float *>(output<uint8_t>(op, 8) + pair * pair_bytes()); }
  float *up(int64_t pair) const { return gate(pair) + row_bytes_of(ff) / int64_t(sizeof(float)); }
  uint8_t *act(int64_t pair) const { return reinterpret_cast<uint8_t *>(gate(pair)) + 2 * row_bytes_of(ff); }
  int64_t pair_bytes() const { return 2 * row_bytes_of(ff) + align64(act_bytes_of(ff)); }

  void hidden_rows(const Group &group, int64_t begin, int64_t end) const;
  void input_rows(const Group &group, int which, const void *quantised, int64_t begin, int64_t end) const;
  void down_rows(const Group &group, int64_t begin, int64_t end) const;
  void merge(int64_t t, int64_t begin, int64_t end) const;
};

// Rows of gate (which = 0) or up (1) for the group's tokens.
void Experts::input_rows(const Group &group, int which, const void *quantised, int64_t begin, int64_t end) const {
  const int type = static_cast<int>(op.i[4 + which]), cls = type_class(type);
  const int64_t row_bytes = op.i[7 + which];
  const int64_t act_bytes = cls == 0 ? d * int64_t(sizeof(float)) : act_token_bytes(cls, d);
  const auto *x = static_cast<const uint8_t *>(cls == 0 ? op.p[0] : quantised);
  const void *act[FT_MAX_TOKENS];
  float *out[FT_MAX_TOKENS];
  for (int i = 0; i < group.n; ++i) {
    act[i] = x + group.pairs[i] / n_used * act_bytes;
    out[i] = which == 0 ? gate(group.pairs[i]) : up(group.pairs[i]);
  }
  const uint8_t *bank = input<uint8_t>(op, 3 + which) + group.expert * ff * row_bytes;
  matvec(type, bank, row_bytes, d, begin, end, act, group.n, planes, out, worker.scratch());
}

// h[begin..end) = act(gate x) * (up x) of the group's pairs, in the place of gate's rows.
void Experts::hidden_rows(const Group &group, int64_t begin, int64_t end) const {
  input_rows(group, 0, op.p[9], begin, end);
  input_rows(group, 1, act_of_up(op), begin, end);
  const auto act_mul = op.i[10] == 0 ? k.silu_mul : k.gelu_mul;
  for (int i = 0; i < group.n; ++i) {
    float *g = gate(group.pairs[i]) + begin;
    act_mul(g, up(group.pairs[i]) + begin, g, end - begin);
  }
}

void Experts::down_rows(const Group &group, int64_t begin, int64_t end) const {
  const int type = static_cast<int>(op.i[6]), cls = type_class(type);
  const void *in[FT_MAX_TOKENS];
  float *out[FT_MAX_TOKENS];
  for (int i = 0; i < group.n; ++i) {
    in[i] = cls == 0 ? static_cast<const void *>(gate(group.pairs[i])) : act(group.pairs[i]);
    out[i] = output<float>(op, 6) + group.pairs[i] * d;
  }
  const uint8_t *bank = input<uint8_t>(op, 5) + group.expert * d * op.i[9];
  matvec(type, bank, op.i[9], ff, begin, end, in, group.n, planes, out, worker.scratch());
}

void Experts::merge(int64_t t, int64_t begin, int64_t end) const {
  float *y = output<float>(op, 7) + t * d;
  std::fill(y + begin, y + end, 0.0f);
  for (int64_t pair = t * n_used; pair < (t + 1) * n_used; ++pair) {
    const int32_t id = input<int32_t>(op, 1)[pair];
    if (id < 0 || id >= n_expert) continue;
    k.axpy(input<float>(op, 2)[pair], output<float>(op, 6) + pair * d + begin, y + begin, end - begin);
  }
}

// Shares out `rows` rows of every group.
template <typename Body>
void share_rows(const Experts &e, int64_t rows, Body body) {
  const int n_threads = e.worker.n_threads();
  const int64_t per_claim = std::min(rows_per_claim(rows * std::max(e.n_groups, 1), n_threads), div_up(rows, 16) * 16);
  const int64_t claims = div_up(rows, per_claim);
  share_items(e.worker, claims * e.n_groups, kMaxSize, [&](int64_t item) {
    const int64_t begin = item % claims * per_claim;
    body(e.groups[item / claims], begin, std::min(begin + per_claim, rows));
  });
}

void run(const ft_op &op, Worker &worker) {
  const Experts e(op, worker);
  share_rows(e, e.ff, [&](const Group &group, int64_t begin, int64_t end) { e.hidden_rows(group, begin, end); });
  worker.barrier();
  const int cls = type_class(static_cast<int>(op.i[6]));
  if (cls != 0) {
    share_items(worker, op.n * e.n_used, kMaxSize, [&](int64_t pair) {
      const int32_t id = input<int32_t>(op, 1)[pair];
      if (id < 0 || id >= e.n_expert) return;
      e.k.quantize(e.gate(pair), cls, e.ff, e.planes, e.act(pair), 0, e.ff / cls);
    });
    worker.barrier();
  }
  share_rows(e, e.d, [&](const Group &group, int64_t begin, int64_t end) { e.down_rows(group, begin, end); });
  worker.barrier();
  const int64_t pieces = div_up(e.d, kMergePiece);
  share_items(worker, op.n * pieces, op.n * e.d * e.n_used, [&](int64_t item) {
    const int64_t begin = item % pieces * kMergePiece;
    e.merge(item / pieces, begin, std::min(begin + kMergePiece, e.d));
  });
}

}  // namespace

const OpInfo kExperts = {is_valid, run, scratch_floats};

}  // namespace ft

extern "C" FT_API int64_t ft_experts_scratch_bytes(int n_tokens, int k, int64_t d, int64_t ff, int n_threads) {
  (void)d;
  (void)n_threads;
  return int64_t(n_tokens) * k * (2 * ft::row_bytes_of(ff) + ft::align64(ft::act_bytes_of(ff)));
}
