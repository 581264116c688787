// Thread pool: see pool.h. Waiting is spinning with pauses, then yielding, and between jobs at last sleeping.
#include "pool.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <new>

#include "freetoken.h"
#include "platform.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace ft {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kPausesBeforeYield = 300;  // some 5 us: longer than most waits between threads that really run

int team_size(int n_threads) {
  int size = 4;
  while (size * size < n_threads) ++size;
  return size;
}

bool pin_to_cpu(std::thread &thread, int cpu) {
#if defined(__linux__)
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) == 0;
#else
  (void)thread;
  (void)cpu;
  return true;
#endif
}

}  // namespace

void relax(int &turns) {
  if (++turns < kPausesBeforeYield) {
    pause_hint();
  } else {
    std::this_thread::yield();
  }
}

Pool::Pool(int n_threads, const int *cpus, int spin_us)
    : n_threads_(n_threads), spin_us_(spin_us), parts_(kParts), team_size_(team_size(n_threads)),
      n_teams_((n_threads + team_size_ - 1) / team_size_), teams_(static_cast<size_t>(n_teams_)) {
  scratch_.assign(static_cast<size_t>(n_threads), nullptr);
  try {
    for (int index = 1; index < n_threads; ++index) {
      threads_.emplace_back(&Pool::work, this, index);
      if (cpus != nullptr && !pin_to_cpu(threads_.back(), cpus[index])) throw std::bad_alloc();
    }
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() {
  stop();
  for (float *scratch : scratch_) std::free(scratch);
}

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stopping_ = true;
    epoch_.fetch_add(1, std::memory_order_seq_cst);
  }
  wake_.notify_all();
  for (std::thread &thread : threads_) thread.join();
  threads_.clear();
}

void Pool::reserve_scratch(size_t n_floats) {
  if (n_floats <= scratch_floats_) return;
  const size_t n_bytes = (n_floats * sizeof(float) + 127) / 64 * 64;
  for (float *&scratch : scratch_) {
    void *larger = std::aligned_alloc(64, n_bytes);
    if (larger == nullptr) throw std::bad_alloc();
    std::free(scratch);
    scratch = static_cast<float *>(larger);
  }
  scratch_floats_ = n_floats;
}

void Pool::run(Job job, const void *context, size_t scratch_floats) {
  std::lock_guard<std::mutex> turn(turn_);
  reserve_scratch(scratch_floats);
  const DefaultFloatMode mode;
  Worker worker(*this, 0);
  if (n_threads_ > 1) {
    job_ = job;
    context_ = context;
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    wake_sleepers();
  }
  job(worker, context);
  worker.barrier();
}

void Pool::wake_sleepers() {
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  { std::lock_guard<std::mutex> lock(sleep_); }
  wake_.notify_all();
}

void Pool::stay_awake() {
  n_holding_.fetch_add(1, std::memory_order_seq_cst);
  wake_sleepers();
}

void Pool::wait_for_job(uint32_t seen) {
  using Clock = std::chrono::steady_clock;
  const auto has_job = [&] { return epoch_.load(std::memory_order_seq_cst) != seen; };
  const auto is_held = [&] { return n_holding_.load(std::memory_order_seq_cst) > 0; };
  for (;;) {
    const auto end = Clock::now() + std::chrono::microseconds(spin_us_);
    int turns = 0;
    do {
      for (int burst = 0; burst < 64; ++burst) {
        if (epoch_.load(std::memory_order_acquire) != seen) return;
        relax(turns);
      }
    } while (is_held() || Clock::now() < end);
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return has_job() || is_held(); });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Pool::work(int index) {
  const DefaultFloatMode mode;
  Worker worker(*this, index);
  uint32_t seen = 0;
  for (;;) {
    wait_for_job(seen);
    ++seen;
    if (stopping_) return;
    job_(worker, context_);
    worker.barrier();
  }
}

void Worker::barrier() {
  Pool &pool = pool_;
  const int n_pieces = piece_ + 1;
  piece_ = 0;
  const int t = index_ / pool.team_size_;
  Pool::Team &team = pool.teams_[static_cast<size_t>(t)];
  const uint64_t next = phase() + 1;
  const int members = std::min(pool.team_size_, pool.n_threads_ - t * pool.team_size_);
  if (team.arrived.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
    team.arrived.store(0, std::memory_order_relaxed);
    if (pool.teams_arrived_.fetch_add(1, std::memory_order_acq_rel) == pool.n_teams_ - 1) {
      pool.teams_arrived_.store(0, std::memory_order_relaxed);
      for (int i = 0; i < n_pieces; ++i) pool.claims_[i].next.store(0, std::memory_order_relaxed);
      for (Pool::Team &each : pool.teams_) each.phase.store(next, std::memory_order_release);
      return;
    }
  }
  int turns = 0;
  while (team.phase.load(std::memory_order_acquire) != next) relax(turns);
}

}  // namespace ft

extern "C" {

FT_API ft_pool *ft_pool_create(int n_threads, const int *cpus, int spin_us) {
  if (n_threads < 1 || n_threads > ft::kMaxThreads || spin_us < 0) return nullptr;
  try {
    return new ft_pool(n_threads, cpus, spin_us);
  } catch (const std::exception &) {
    return nullptr;
  }
}

FT_API void ft_pool_destroy(ft_pool *pool) { delete pool; }

FT_API int ft_pool_threads(const ft_pool *pool) { return pool == nullptr ? 0 : pool->pool.n_threads(); }

}  // extern "C"
