// ft_many_matvec and ft_many_experts: products of any number of tokens for prefill, one call each, all threads.
// Work is claimed as (tile of rows, tokens): who takes which changes no result.
#include <exception>
#include <vector>

#include "kernels.h"
#include "ops.h"

namespace ft {
namespace {

constexpr int64_t kMaxTokens = 512;     // of one claim: its results stay in the second cache
constexpr int64_t kMergePiece = 512;    // columns of one claim of the merge
constexpr int64_t kMaxRows = 1 << 24;   // tokens, and token-expert pairs, of one call
constexpr int64_t kMaxExperts = 1 << 16;
constexpr int64_t kClaimsPerThread = 4;

int64_t align64(int64_t n_bytes) { return (n_bytes + 63) & ~int64_t(63); }

const TileKernel *tile_kernel(int64_t type) {
  if (type < 0 || type >= kMaxTypes) return nullptr;
  const TileKernel &tile = kernels().tile[type];
  return tile.product != nullptr ? &tile : nullptr;
}

bool is_bank(int64_t type, int64_t cols) {
  const TileKernel *tile = tile_kernel(type);
  return tile != nullptr && is_size(cols) && cols % tile->block == 0;
}

// A weight matrix and how its activations lie.
struct Matrix {
  const Kernels &k;
  const TileKernel &tile;
  TileAct layout;
  const uint8_t *data;
  int64_t rows, row_bytes, stride;  // from one copy to the next
  Matrix(int64_t type, const void *weights, int64_t n_rows, int64_t n_cols, int64_t n_row_bytes, int64_t n_stride = 0)
      : k(kernels()), tile(*tile_kernel(type)), layout(tile.block, tile.group, n_cols),
        data(static_cast<const uint8_t *>(weights)), rows(n_rows), row_bytes(n_row_bytes),
        stride(n_stride != 0 ? n_stride : n_rows * n_row_bytes) {}
  int64_t n_tiles() const { return div_up(rows, k.tile_rows); }
  int tile_height(int64_t t) const { return int(std::min<int64_t>(k.tile_rows, rows - t * k.tile_rows)); }
  bool has_layout_of(const Matrix &other) const {
    return layout.block == other.layout.block && layout.group == other.layout.group;
  }
  // Rows of tile t, of the matrix's `which`-th copy (expert).
  void product(int64_t which, int64_t t, const uint8_t *const *act, int64_t n, float *y) const {
    const uint8_t *w = data + which * stride + t * k.tile_rows * row_bytes;
    tile.product(w, row_bytes, layout.n_cols, tile_height(t), act, n, y);
  }
};

void quantize_rows(Worker &worker, const Matrix &m, const float *x, int64_t n, uint8_t *act) {
  share_items(worker, n, n * m.layout.n_cols, [&](int64_t row) {
    m.k.tile_quantize(x + row * m.layout.n_cols, m.layout, act + row * m.layout.n_bytes());
  });
}

// --- one matrix -----------------------------------------------------------------------------------------------

struct ManyMatvec {
  const ft_op &op;
  Matrix m{op.i[0], op.p[1], op.i[1], op.i[2], op.i[3]};
  uint8_t *act = output<uint8_t>(op, 4);

  // Few tiles are cut by tokens too.
  int64_t tokens_per_claim(int n_threads) const {
    if (n_threads == 1) return kMaxTokens;
    const int64_t cuts = div_up(n_threads * kClaimsPerThread, m.n_tiles());
    return std::clamp<int64_t>(div_up(div_up(op.n, cuts), 12) * 12, 48, kMaxTokens);
  }

  void claim(Worker &worker, int64_t t, int64_t first, int64_t last) const {
    const uint8_t *rows[kMaxTokens];
    for (int64_t i = first; i < last; ++i) rows[i - first] = act + i * m.layout.n_bytes();
    float *y = worker.scratch();
    m.product(0, t, rows, last - first, y);
    const auto *bias = input<float>(op, 3);
    const int64_t at = t * m.k.tile_rows;
    for (int64_t i = first; i < last; ++i) {
      const float *from = y + (i - first) * m.k.tile_rows;
      float *to = output<float>(op, 2) + i * m.rows + at;
      for (int r = 0; r < m.tile_height(t); ++r) to[r] = bias != nullptr ? from[r] + bias[at + r] : from[r];
    }
  }

  void run(Worker &worker) const {
    quantize_rows(worker, m, input<float>(op, 0), op.n, act);
    worker.barrier();
    const int64_t per_claim = tokens_per_claim(worker.n_threads()), cuts = div_up(op.n, per_claim);
    share_items(worker, m.n_tiles() * cuts, kMaxSize, [&](int64_t item) {
      const int64_t first = item % cuts * per_claim;
      claim(worker, item / cuts, first, std::min<int64_t>(first + per_claim, op.n));
    });
  }
};

// --- experts --------------------------------------------------------------------------------------------------

// Some pairs (token * k + rank) of one expert.
struct Share {
  int32_t expert;
  int64_t first, n;  // in `order`
};

// The banks, and where things stand in the scratch: activations, hidden rows and output rows of every pair.
struct Banks {
  const int64_t d, ff, n_pairs;
  const Matrix gate, up, down;
  const bool has_one_act;
  const int64_t up_at, down_at, hidden_at, rows_at, n_bytes;

  explicit Banks(const ft_op &op)
      : d(op.i[2]), ff(op.i[3]), n_pairs(op.n * op.i[1]),
        gate(op.i[4], op.p[3], ff, d, op.i[7], op.i[12]), up(op.i[5], op.p[4], ff, d, op.i[8], op.i[12]),
        down(op.i[6], op.p[5], d, ff, op.i[9], op.i[12]), has_one_act(up.has_layout_of(gate)),
        up_at(has_one_act ? 0 : op.n * gate.layout.n_bytes()), down_at(up_at + op.n * up.layout.n_bytes()),
        hidden_at(down_at + n_pairs * down.layout.n_bytes()), rows_at(hidden_at + align64(n_pairs * ff * 4)),
        n_bytes(rows_at + n_pairs * d * 4) {}
};

struct ManyExperts : Banks {
  const ft_op &op;
  const int64_t n_expert = op.i[0], n_used = op.i[1];
  uint8_t *const act_gate = output<uint8_t>(op, 8), *const act_up = act_gate + up_at;
  uint8_t *const act_down = act_gate + down_at;
  float *const hidden = reinterpret_cast<float *>(act_gate + hidden_at);
  float *const rows = reinterpret_cast<float *>(act_gate + rows_at);
  std::vector<int32_t> order;  // pairs, expert by expert, in ascending order
  std::vector<Share> shares;

  explicit ManyExperts(const ft_op &operation) : Banks(operation), op(operation) {
    const auto *ids = input<int32_t>(op, 1);
    std::vector<int64_t> starts(static_cast<size_t>(n_expert) + 1);
    for (int64_t pair = 0; pair < n_pairs; ++pair) {
      if (is_routed(ids[pair])) ++starts[size_t(ids[pair]) + 1];
    }
    for (int64_t e = 0; e < n_expert; ++e) {
      const int64_t count = starts[size_t(e) + 1];
      for (int64_t at = 0; at < count; at += kMaxTokens) {
        shares.push_back({int32_t(e), starts[size_t(e)] + at, std::min(kMaxTokens, count - at)});
      }
      starts[size_t(e) + 1] += starts[size_t(e)];
    }
    order.resize(static_cast<size_t>(starts.back()));
    for (int64_t pair = 0; pair < n_pairs; ++pair) {
      if (is_routed(ids[pair])) order[size_t(starts[size_t(ids[pair])]++)] = int32_t(pair);
    }
  }

  bool is_routed(int32_t id) const { return id >= 0 && id < n_expert; }

  void hidden_tile(Worker &worker, const Share &share, int64_t t) const {
    const uint8_t *x[kMaxTokens];
    const int32_t *pairs = order.data() + share.first;
    float *g = worker.scratch(), *u = g + kMaxTokens * kMaxTileRows;
    for (int64_t i = 0; i < share.n; ++i) x[i] = act_gate + pairs[i] / n_used * gate.layout.n_bytes();
    gate.product(share.expert, t, x, share.n, g);
    for (int64_t i = 0; i < share.n; ++i) x[i] = act_up + pairs[i] / n_used * up.layout.n_bytes();
    up.product(share.expert, t, x, share.n, u);
    const int height = gate.k.tile_rows;
    const auto act_mul = op.i[10] == 0 ? gate.k.silu_mul : gate.k.gelu_mul;
    for (int64_t i = 0; i < share.n; ++i) {
      act_mul(g + i * height, u + i * height, hidden + pairs[i] * ff + t * height, gate.tile_height(t));
    }
  }

  void down_tile(Worker &worker, const Share &share, int64_t t) const {
    const uint8_t *x[kMaxTokens];
    const int32_t *pairs = order.data() + share.first;
    float *y = worker.scratch();
    for (int64_t i = 0; i < share.n; ++i) x[i] = act_down + pairs[i] * down.layout.n_bytes();
    down.product(share.expert, t, x, share.n, y);
    const int height = down.k.tile_rows;
    for (int64_t i = 0; i < share.n; ++i) {
      std::copy_n(y + i * height, down.tile_height(t), rows + pairs[i] * d + t * height);
    }
  }

  // In the order of ranks.
  void merge(int64_t token, int64_t begin, int64_t end) const {
    float *y = output<float>(op, 7) + token * d;
    std::fill(y + begin, y + end, 0.0f);
    for (int64_t pair = token * n_used; pair < (token + 1) * n_used; ++pair) {
      if (!is_routed(input<int32_t>(op, 1)[pair])) continue;
      down.k.axpy(input<float>(op, 2)[pair], rows + pair * d + begin, y + begin, end - begin);
    }
  }

  void run(Worker &worker) const {
    const auto *x = input<float>(op, 0);
    quantize_rows(worker, gate, x, op.n, act_gate);
    if (!has_one_act) {
      worker.next_piece();
      quantize_rows(worker, up, x, op.n, act_up);
    }
    worker.barrier();
    const int64_t n_shares = int64_t(shares.size());
    share_items(worker, n_shares * gate.n_tiles(), kMaxSize, [&](int64_t item) {
      hidden_tile(worker, shares[size_t(item / gate.n_tiles())], item % gate.n_tiles());
    });
    worker.barrier();
    share_items(worker, int64_t(order.size()), kMaxSize, [&](int64_t item) {
      const int64_t pair = order[size_t(item)];
      down.k.tile_quantize(hidden + pair * ff, down.layout, act_down + pair * down.layout.n_bytes());
    });
    worker.barrier();
    share_items(worker, n_shares * down.n_tiles(), kMaxSize, [&](int64_t item) {
      down_tile(worker, shares[size_t(item / down.n_tiles())], item % down.n_tiles());
    });
    worker.barrier();
    const int64_t pieces = div_up(d, kMergePiece);
    share_items(worker, op.n * pieces, kMaxSize, [&](int64_t item) {
      const int64_t begin = item % pieces * kMergePiece;
      merge(item / pieces, begin, std::min(begin + kMergePiece, d));
    });
  }
};

bool is_valid_matvec(const ft_op &op) {
  return op.n > 0 && op.n <= kMaxRows && is_bank(op.i[0], op.i[2]) && are_sizes({op.i[1], op.i[3]});
}

bool is_valid_experts(const ft_op &op) {
  if (!are_sizes({op.i[0], op.i[1], op.i[2], op.i[3], op.i[7], op.i[8], op.i[9]})) return false;
  if (op.n <= 0 || op.i[0] > kMaxExperts || op.i[1] > op.i[0] || op.n > kMaxRows / op.i[1]) return false;
  if ((op.i[10] != 0 && op.i[10] != 1) || !is_stride(op)) return false;
  return is_bank(op.i[4], op.i[2]) && is_bank(op.i[5], op.i[2]) && is_bank(op.i[6], op.i[3]);
}

template <class Many>
void run_many(Worker &worker, const void *context) {
  static_cast<const Many *>(context)->run(worker);
}

template <class Many>
void run_on(ft_pool *pool, const Many &many, size_t n_products) {
  pool->pool.run(run_many<Many>, &many, n_products * kMaxTokens * kMaxTileRows);
}

}  // namespace
}  // namespace ft

extern "C" {

FT_API int ft_many_has(int type) { return ft::tile_kernel(type) != nullptr; }

FT_API int64_t ft_many_scratch_bytes(const ft_op *op) {
  if (op->code == FT_OP_MATVEC && ft::is_valid_matvec(*op)) return ft::ManyMatvec{*op}.m.layout.n_bytes() * op->n;
  if (op->code == FT_OP_EXPERTS && ft::is_valid_experts(*op)) return ft::Banks(*op).n_bytes;
  return -1;
}

FT_API int ft_many_run(ft_pool *pool, const ft_op *op) {
  const bool is_matvec = op->code == FT_OP_MATVEC;
  if (ft_many_scratch_bytes(op) < 0) return -1;
  if (!(is_matvec ? ft::has_pointers(*op, {0, 1, 2, 4}) : ft::has_pointers(*op, {0, 1, 2, 3, 4, 5, 7, 8}))) return -1;
  if (!ft::is_aligned(op->p[is_matvec ? 4 : 8])) return -1;
  try {
    if (is_matvec) {
      ft::run_on(pool, ft::ManyMatvec{*op}, 1);
    } else {
      ft::run_on(pool, ft::ManyExperts(*op), 2);
    }
  } catch (const std::exception &) {
    return -2;
  }
  return 0;
}

}  // extern "C"
