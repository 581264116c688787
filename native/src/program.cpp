// ft_run: check every operation, then let all threads of the pool walk the list in lockstep.
#include <exception>

#include "ops.h"

namespace ft {
namespace {

bool nop_is_valid(const ft_op &) { return true; }
void nop(const ft_op &, Worker &) {}
const OpInfo kNop = {nop_is_valid, nop, nullptr};

const OpInfo *const kTable[FT_OP_COUNT] = {&kNop,     &kEmbed,     &kRmsNorm, &kQuantize, &kMatvec, &kAdd,      &kGlu,
                                           &kRope,    &kKvStore,   &kAttention, &kRouter, &kExperts, &kGatedAdd, &kScale};

struct Program {
  const ft_op *ops;
  int n_ops;
};

// Operations on rows that share them out in fixed parts, and so may stand between two barriers with others of them.
bool has_parts(const ft_op &op) {
  return op.code == FT_OP_RMS_NORM || op.code == FT_OP_QUANTIZE || op.code == FT_OP_GLU || op.code == FT_OP_ROPE ||
         op.code == FT_OP_KV_STORE;
}

bool is_joined(const ft_op &op) { return (op.code == FT_OP_MATVEC || has_parts(op)) && op.i[7] != 0; }

// All threads; the barrier after the last operation is the pool's own.
void walk(Worker &worker, const void *context) {
  const auto &program = *static_cast<const Program *>(context);
  for (int i = 0; i < program.n_ops; ++i) {
    const ft_op &op = program.ops[i];
    if (is_joined(op)) {
      if (op.code == FT_OP_MATVEC) worker.next_piece();
    } else if (i > 0) {
      worker.barrier();
    }
    kTable[op.code]->run(op, worker);
  }
}

bool is_valid(const ft_op &op) {
  return op.code >= 0 && op.code < FT_OP_COUNT && op.n >= 1 && op.n <= FT_MAX_TOKENS && kTable[op.code]->is_valid(op);
}

// Number of products before op i that run together with it.
int n_joined(const ft_op *ops, int i) {
  int n = 0;
  while (i - n > 0 && n < kPieces && is_joined(ops[i - n]) && ops[i - n - 1].code == FT_OP_MATVEC) ++n;
  return n;
}

bool may_join(const ft_op *ops, int i) {
  if (!is_joined(ops[i])) return true;
  if (i == 0) return false;
  if (has_parts(ops[i])) return has_parts(ops[i - 1]);
  return ops[i - 1].code == FT_OP_MATVEC && n_joined(ops, i) < kPieces;
}

}  // namespace
}  // namespace ft

extern "C" {

FT_API int ft_abi_version(void) { return FT_ABI_VERSION; }

FT_API int ft_op_bytes(void) { return static_cast<int>(sizeof(ft_op)); }

FT_API int ft_run(ft_pool *pool, const ft_op *ops, int n_ops) {
  if (pool == nullptr || n_ops < 0 || (ops == nullptr && n_ops > 0)) return -1;
  size_t scratch = 0;
  for (int i = 0; i < n_ops; ++i) {
    if (!ft::is_valid(ops[i]) || !ft::may_join(ops, i)) return -1 - i;
    const ft::OpInfo &info = *ft::kTable[ops[i].code];
    if (info.scratch_floats != nullptr) scratch = std::max(scratch, info.scratch_floats(ops[i]));
  }
  const ft::Program program = {ops, n_ops};
  try {
    pool->pool.run(ft::walk, &program, scratch);
  } catch (const std::exception &) {
    return -1 - n_ops;
  }
  return 0;
}

}  // extern "C"
