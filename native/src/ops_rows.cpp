// Operations on rows of activations: embedding, norms, quantisation, elementwise arithmetic, rope.
#include <cmath>

#include "kernels.h"
#include "ops.h"

namespace ft {
namespace {

constexpr int64_t kPiece = 256;  // elements of an item of elementwise work: whole blocks of any quantisation

// Calls body(row, begin, end) for this thread's part of n rows of `width` elements.
template <typename Body>
void share_pieces(Worker &worker, int64_t n, int64_t width, Body body) {
  const int64_t pieces = div_up(width, kPiece);
  share_parts(worker, n * pieces, n * width, [&](int64_t first, int64_t last) {
    for (int64_t t = first / pieces; t * pieces < last; ++t) {
      const int64_t begin = std::max(first - t * pieces, int64_t(0)), end = std::min(last - t * pieces, pieces);
      body(t, begin * kPiece, std::min(end * kPiece, width));
    }
  });
}

// --- EMBED ------------------------------------------------------------------------------------------------------
bool embed_is_valid(const ft_op &op) {
  if (!has_pointers(op, {0, 1, 2}) || !are_sizes({op.i[1], op.i[2], op.i[3]})) return false;
  const auto *tokens = input<int32_t>(op, 0);
  for (int t = 0; t < op.n; ++t) {
    if (tokens[t] < 0 || tokens[t] >= op.i[1]) return false;
  }
  return decoder(static_cast<int>(op.i[0])) != nullptr;
}

void embed(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  const DecodeFn decode = decoder(static_cast<int>(op.i[0]));
  const int64_t cols = op.i[2];
  share_items(worker, op.n, op.n * cols, [&](int64_t t) {
    float *x = output<float>(op, 2) + t * cols;
    decode(input<uint8_t>(op, 1) + input<int32_t>(op, 0)[t] * op.i[3], x, cols);
    if (op.f[0] != 1.0f) k.scale(x, op.f[0], x, cols);
  });
}

// --- RMS_NORM ---------------------------------------------------------------------------------------------------
bool rms_norm_is_valid(const ft_op &op) {
  const bool is_sum = op.p[3] != nullptr;
  return has_pointers(op, {0, 1, 2}) && are_sizes({op.i[0], op.i[1], op.i[2], op.i[3]}) &&
         op.i[0] * op.i[1] <= std::min(op.i[2], op.i[3]) && is_sum == (op.p[4] != nullptr) &&
         (!is_sum || op.i[1] == 1);
}

size_t rms_norm_scratch_floats(const ft_op &op) { return op.p[3] == nullptr ? 0 : static_cast<size_t>(op.i[0]); }

float norm_scale(const Kernels &k, const float *x, int64_t width, float eps) {
  const float mean = k.sumsq(x, width) / static_cast<float>(width);
  return 1.0f / std::sqrt(mean + eps);
}

// One group a row: every thread adds and squares the whole of a row that it has a part of.
void rms_norm_rows(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  const int64_t width = op.i[0];
  share_pieces(worker, op.n, width, [&](int64_t t, int64_t begin, int64_t end) {
    const float *x = input<float>(op, 0) + t * op.i[2];
    if (op.p[3] != nullptr) {
      float *sum = worker.scratch();
      k.add(x, input<float>(op, 3) + t * op.i[2], sum, width);
      std::copy(sum + begin, sum + end, output<float>(op, 4) + t * op.i[2] + begin);
      x = sum;
    }
    const float scale = norm_scale(k, x, width, op.f[0]);
    k.scale_mul(x + begin, scale, input<float>(op, 1) + begin, output<float>(op, 2) + t * op.i[3] + begin, end - begin);
  });
}

void rms_norm_heads(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  const int64_t width = op.i[0], groups = op.i[1];
  share_parts(worker, op.n * groups, op.n * groups * width, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t t = item / groups, at = item % groups * width;
      const float *x = input<float>(op, 0) + t * op.i[2] + at;
      const float scale = norm_scale(k, x, width, op.f[0]);
      k.scale_mul(x, scale, input<float>(op, 1), output<float>(op, 2) + t * op.i[3] + at, width);
    }
  });
}

void rms_norm(const ft_op &op, Worker &worker) {
  (op.i[1] == 1 ? rms_norm_rows : rms_norm_heads)(op, worker);
}

// --- QUANTIZE ---------------------------------------------------------------------------------------------------
bool quantize_is_valid(const ft_op &op) {
  return has_pointers(op, {0, 1}) && is_aligned(op.p[1]) && (op.i[0] == 32 || op.i[0] == 256) &&
         are_sizes({op.i[1], op.i[3]}) && op.i[1] % op.i[0] == 0 && (op.i[2] == 1 || op.i[2] == 2);
}

void quantize(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  const int cls = static_cast<int>(op.i[0]), planes = static_cast<int>(op.i[2]);
  const int64_t cols = op.i[1], token_bytes = act_token_bytes(cls, cols);
  share_pieces(worker, op.n, cols, [&](int64_t t, int64_t begin, int64_t end) {
    k.quantize(input<float>(op, 0) + t * op.i[3], cls, cols, planes, output<uint8_t>(op, 1) + t * token_bytes,
               begin / cls, end / cls);
  });
}

// --- ADD, GLU, GATED_ADD, SCALE -----------------------------------------------------------------------------------
bool add_is_valid(const ft_op &op) { return has_pointers(op, {0, 1, 2}) && is_size(op.i[0]); }

void add(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  share_pieces(worker, 1, op.n * op.i[0], [&](int64_t, int64_t begin, int64_t end) {
    k.add(input<float>(op, 0) + begin, input<float>(op, 1) + begin, output<float>(op, 2) + begin, end - begin);
  });
}

bool glu_is_valid(const ft_op &op) {
  return has_pointers(op, {0, 1, 2}) && are_sizes({op.i[0], op.i[2], op.i[3]}) && (op.i[1] == 0 || op.i[1] == 1);
}

void glu(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  const auto act_mul = op.i[1] == 0 ? k.silu_mul : k.gelu_mul;
  share_pieces(worker, op.n, op.i[0], [&](int64_t t, int64_t begin, int64_t end) {
    const int64_t at = t * op.i[2] + begin;
    act_mul(input<float>(op, 0) + at, input<float>(op, 1) + at, output<float>(op, 2) + t * op.i[3] + begin,
            end - begin);
  });
}

bool gated_add_is_valid(const ft_op &op) { return has_pointers(op, {0, 1, 2, 3}) && is_size(op.i[0]); }

void gated_add(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  const int64_t width = op.i[0];
  share_pieces(worker, op.n, width, [&](int64_t t, int64_t begin, int64_t end) {
    float gate;
    k.sigmoid(input<float>(op, 1) + t, &gate, 1);
    const float *x = input<float>(op, 0) + t * width, *b = input<float>(op, 2) + t * width;
    float *y = output<float>(op, 3) + t * width;
    for (int64_t i = begin; i < end; ++i) y[i] = b[i] + x[i] * gate;
  });
}

bool scale_is_valid(const ft_op &op) { return has_pointers(op, {0, 1}) && is_size(op.i[0]); }

void scale(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  share_pieces(worker, 1, op.n * op.i[0], [&](int64_t, int64_t begin, int64_t end) {
    float *y = output<float>(op, 1) + begin;
    k.scale(input<float>(op, 0) + begin, op.f[0], y, end - begin);
    if (op.f[1] != 0.0f) k.softcap(y, op.f[1], y, end - begin);
  });
}

// --- ROPE -------------------------------------------------------------------------------------------------------
bool rope_is_valid(const ft_op &op) {
  return has_pointers(op, {0, 1}) && are_sizes({op.i[0], op.i[1], op.i[2], op.i[4]}) && op.i[2] % 2 == 0 &&
         op.i[2] <= op.i[1] && (op.i[3] == 0 || op.i[3] == 1) && op.i[0] * op.i[1] <= op.i[4];
}

void rope(const ft_op &op, Worker &worker) {
  const Kernels &k = kernels();
  const auto rotate = op.i[3] == 0 ? k.rope_pairs : k.rope_neox;
  const int64_t heads = op.i[0], head_dim = op.i[1], half = op.i[2] / 2;
  share_parts(worker, op.n * heads, op.n * heads * head_dim, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t t = item / heads;
      const float *cosines = input<float>(op, 1) + t * 2 * half;
      rotate(output<float>(op, 0) + t * op.i[4] + item % heads * head_dim, cosines, cosines + half, half);
    }
  });
}

}  // namespace

const OpInfo kEmbed = {embed_is_valid, embed, nullptr};
const OpInfo kRmsNorm = {rms_norm_is_valid, rms_norm, rms_norm_scratch_floats};
const OpInfo kQuantize = {quantize_is_valid, quantize, nullptr};
const OpInfo kAdd = {add_is_valid, add, nullptr};
const OpInfo kGlu = {glu_is_valid, glu, nullptr};
const OpInfo kRope = {rope_is_valid, rope, nullptr};
const OpInfo kGatedAdd = {gated_add_is_valid, gated_add, nullptr};
const OpInfo kScale = {scale_is_valid, scale, nullptr};

}  // namespace ft
