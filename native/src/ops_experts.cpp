// EXPERTS: gate and up rows of all routed (token, expert) pairs, activation, quantisation for `down`, down rows, merge.
// Pairs of one expert form a group, so that the expert's rows are read once for all tokens of the batch.
//
// No barrier stands inside. Threads claim ranges of hidden rows, group after group, then ranges of `down` rows alike.
// Whoever completes a group's hidden rows quantises them; a range of `down` waits for its own group only. Whoever
// completes a block of output rows, over all groups, merges it.
#include "kernels.h"
#include "ops.h"

namespace ft {
namespace {

constexpr int64_t kMaxUsed = 64;
constexpr int kMaxGroups = FT_MAX_TOKENS * int(kMaxUsed);
constexpr int64_t kMaxRows = 1 << 20;  // of a matrix: what is done of it fits into kDoneBits
constexpr int kMaxBlocks = 256;        // of output rows
constexpr int64_t kBlockRows = 128;    // of one, or more where there would be too many
static_assert(kMaxGroups + kMaxBlocks <= kParts, "parts of the pool");
static_assert(kMaxGroups * (kMaxRows / kMaxBlocks) < int64_t(1) << kDoneBits, "rows of a block over all groups");

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
  if (!has_pointers(op, {0, 1, 3, 4, 5, 6, 8}) || !is_aligned(op.p[8])) return false;
  if (op.p[7] != nullptr && op.p[2] == nullptr) return false;
  if (!are_sizes({op.i[0], op.i[1], op.i[2], op.i[3], op.i[7], op.i[8], op.i[9]})) return false;
  if (op.i[2] > kMaxRows || op.i[3] > kMaxRows) return false;
  if (op.i[1] > kMaxUsed || op.i[1] > op.i[0] || (op.i[10] != 0 && op.i[10] != 1)) return false;
  if (op.i[11] != 1 && op.i[11] != 2) return false;
  if (!is_stride(op)) return false;
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

// Rows of one group: of gate and up, or of down.
struct Piece {
  bool is_down;
  int group;
  int64_t begin, end;
};

// Which products an expert has, seen by one thread. Every thread forms the same groups.
struct Experts {
  const ft_op &op;
  Worker &worker;
  const Kernels &k = kernels();
  const int64_t n_expert = op.i[0], n_used = op.i[1], d = op.i[2], ff = op.i[3];
  const int planes = static_cast<int>(op.i[11]);
  const int64_t block_rows = std::max(kBlockRows, round_up(div_up(d, kMaxBlocks), kRowStep));
  int n_groups = 0;
  Group groups[kMaxGroups];

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

  // Rows from `row` on of gate (0), up (1) or down (2) of a group's expert.
  const uint8_t *bank(int which, int group, int64_t row) const {
    const int64_t rows = which == 2 ? d : ff, row_bytes = op.i[7 + which];
    const int64_t stride = op.i[12] != 0 ? op.i[12] : rows * row_bytes;
    return input<uint8_t>(op, 3 + which) + groups[group].expert * stride + row * row_bytes;
  }

  void input_rows(const Group &group, int which, const void *quantised, int64_t begin, int64_t end) const;
  void hidden_rows(const Piece &piece) const;
  void quantize(int group) const;
  void down_rows(const Piece &piece) const;
  void await(const Piece &piece) const;
  void merge(int64_t begin, int64_t end) const;
  void run(const Piece &piece) const;
  Piece cut_end(Piece &piece) const;
  void fetch_start(const Piece &piece, int which) const;
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
  const uint8_t *w = bank(which, int(&group - groups), 0);
  matvec(type, w, row_bytes, d, begin, end, act, group.n, planes, out, worker.scratch());
}

void Experts::fetch_start(const Piece &piece, int which) const {
  const int64_t n_bytes = (piece.end - piece.begin) * op.i[7 + which];
  fetch(bank(which, piece.group, piece.begin), 0, std::min(n_bytes, kStartBytes));
}

// h = act(gate x) * (up x) of the group's pairs, in the place of gate's rows.
void Experts::hidden_rows(const Piece &piece) const {
  const Group &group = groups[piece.group];
  const int64_t begin = piece.begin, end = piece.end;
  fetch_start(piece, 1);
  input_rows(group, 0, op.p[9], begin, end);
  input_rows(group, 1, act_of_up(op), begin, end);
  const auto act_mul = op.i[10] == 0 ? k.silu_mul : k.gelu_mul;
  for (int i = 0; i < group.n; ++i) {
    float *g = gate(group.pairs[i]) + begin;
    act_mul(g, up(group.pairs[i]) + begin, g, end - begin);
  }
}

void Experts::quantize(int group) const {
  const int cls = type_class(static_cast<int>(op.i[6]));
  if (cls == 0) return;
  const Group &g = groups[group];
  for (int i = 0; i < g.n; ++i) k.quantize(gate(g.pairs[i]), cls, ff, planes, act(g.pairs[i]), 0, ff / cls);
}

void Experts::down_rows(const Piece &piece) const {
  const Group &group = groups[piece.group];
  const int type = static_cast<int>(op.i[6]), cls = type_class(type);
  const void *in[FT_MAX_TOKENS];
  float *out[FT_MAX_TOKENS];
  for (int i = 0; i < group.n; ++i) {
    in[i] = cls == 0 ? static_cast<const void *>(gate(group.pairs[i])) : act(group.pairs[i]);
    out[i] = output<float>(op, 6) + group.pairs[i] * d;
  }
  matvec(type, bank(2, piece.group, 0), op.i[9], ff, piece.begin, piece.end, in, group.n, planes, out,
         worker.scratch());
}

// Until the group's hidden rows are quantised; the piece's weights are fetched meanwhile.
void Experts::await(const Piece &piece) const {
  const uint8_t *w = bank(2, piece.group, piece.begin);
  const int64_t n_bytes = std::min((piece.end - piece.begin) * op.i[9], kFetchBytes);
  int64_t at = kStartBytes;
  for (int turns = 0; !worker.is_ready(piece.group); relax(turns)) {
    const int64_t to = std::min(at + 512, n_bytes);
    if (at < to) fetch(w, at, to);
    at = to;
  }
}

// Output rows of all tokens, each summed in the order of ranks.
void Experts::merge(int64_t begin, int64_t end) const {
  for (int64_t t = 0; t < op.n; ++t) {
    float *y = output<float>(op, 7) + t * d;
    std::fill(y + begin, y + end, 0.0f);
    for (int64_t pair = t * n_used; pair < (t + 1) * n_used; ++pair) {
      const int32_t id = input<int32_t>(op, 1)[pair];
      if (id < 0 || id >= n_expert) continue;
      k.axpy(input<float>(op, 2)[pair], output<float>(op, 6) + pair * d + begin, y + begin, end - begin);
    }
  }
}

void Experts::run(const Piece &piece) const {
  if (!piece.is_down) {
    hidden_rows(piece);
    if (worker.add_done(piece.group, piece.end - piece.begin) < ff) return;
    quantize(piece.group);
    worker.set_ready(piece.group);
    return;
  }
  await(piece);
  down_rows(piece);
  if (op.p[7] == nullptr) return;
  for (int64_t b = piece.begin / block_rows; b * block_rows < piece.end; ++b) {
    const int64_t first = b * block_rows, last = std::min(first + block_rows, d);
    const int64_t n_done = std::min(last, piece.end) - std::max(first, piece.begin);
    if (worker.add_done(kMaxGroups + int(b), n_done) == (last - first) * n_groups) merge(first, last);
  }
}

// Takes the last rows off a piece: no more than the start of another stream takes to come.
Piece Experts::cut_end(Piece &piece) const {
  const int64_t n_rows = round_up(rows_of_stream(op.i[piece.is_down ? 9 : 7]), kRowStep);
  Piece end = piece;
  end.begin = std::max(piece.begin, piece.end - n_rows);
  piece.end = end.begin;
  return end;
}

// One thread's pieces: first of all groups' hidden rows, then of all groups' down rows. A claim that reaches into the
// next group is two pieces.
class Pieces {
 public:
  explicit Pieces(const Experts &experts)
      : e(experts), hidden_(cut(e.ff, std::min(e.op.i[7], e.op.i[8]))), down_(cut(e.d, e.op.i[9])) {}

  bool next(Piece &piece) {
    if (left_.begin >= left_.end && !claim()) return false;
    const int64_t rows = is_down_ ? e.d : e.ff, height = round_up(rows, kRowStep);
    const int64_t group = left_.begin / height, first = left_.begin % height;
    const int64_t n = std::min(left_.end - left_.begin, height - first);
    piece = {is_down_, int(group), first, std::min(first + n, rows)};
    left_.begin += n;
    return true;
  }

 private:
  Cuts cut(int64_t rows, int64_t row_bytes) const {
    return Cuts(e.n_groups * round_up(rows, kRowStep), e.worker.n_threads(), rows_of_stream(row_bytes));
  }

  bool claim() {
    const int64_t claimed = e.worker.claim(hidden_.n_claims() + down_.n_claims());
    if (claimed < 0) return false;
    is_down_ = claimed >= hidden_.n_claims();
    left_ = is_down_ ? down_.at(claimed - hidden_.n_claims()) : hidden_.at(claimed);
    return true;
  }

  const Experts &e;
  const Cuts hidden_, down_;
  bool is_down_ = false;
  Range left_ = {0, 0};
};

void run(const ft_op &op, Worker &worker) {
  const Experts e(op, worker);
  if (e.n_groups == 0) {
    if (worker.index() == 0 && op.p[7] != nullptr) e.merge(0, e.d);
    return;
  }
  Pieces pieces(e);
  Piece piece, ahead;
  for (bool has_piece = pieces.next(piece); has_piece;) {
    const Piece end = e.cut_end(piece);
    if (piece.begin < piece.end) e.run(piece);
    // The next stream's start is on its way when its turn comes. It is claimed late: whoever holds a long piece that it
    // does not run yet keeps it from a thread that has nothing to do.
    const bool has_ahead = pieces.next(ahead);
    if (has_ahead) e.fetch_start(ahead, ahead.is_down ? 2 : 0);
    e.run(end);
    piece = ahead;
    has_piece = has_ahead;
  }
}

}  // namespace

const OpInfo kExperts = {is_valid, run, scratch_floats};

}  // namespace ft

extern "C" FT_API int64_t ft_experts_scratch_bytes(int n_tokens, int k, int64_t d, int64_t ff, int n_threads) {
  (void)d;
  (void)n_threads;
  return int64_t(n_tokens) * k * (2 * ft::row_bytes_of(ff) + ft::align64(ft::act_bytes_of(ff)));
}
