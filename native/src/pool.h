// A persistent team of threads that walks one job in lockstep. The caller of run() is its worker 0.
#ifndef FT_POOL_H
#define FT_POOL_H
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ft {

class Pool;

// What one thread sees of a job: who it is, what is left to claim, where to wait for the others.
class Worker {
 public:
  Worker(Pool &pool, int index) : pool_(pool), index_(index) {}
  int index() const { return index_; }
  int n_threads() const;
  float *scratch() const;  // Pool::reserve_scratch() floats of this thread's own

  // The next unclaimed item of 0..n_items-1, or -1. Items are those of one piece of work between two barriers.
  int64_t claim(int64_t n_items);
  // Claims are of another piece of work from here on; up to kPieces between two barriers, the same on all threads.
  void next_piece() { ++piece_; }
  // All threads arrive before any leaves; all counters of claims start again at 0.
  void barrier();

 private:
  Pool &pool_;
  int index_;
  int piece_ = 0;
};

constexpr int kPieces = 8;

using Job = void (*)(Worker &worker, const void *context);

class Pool {
 public:
  Pool(int n_threads, const int *cpus, int spin_us);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int n_threads() const { return n_threads_; }

  // Calls job(worker, context) on every thread, with scratch_floats of scratch each, and returns when all are done.
  // Calls from several threads take turns.
  void run(Job job, const void *context, size_t scratch_floats);

 private:
  friend class Worker;

  void work(int index);
  void wait_for_job(uint32_t seen);
  void reserve_scratch(size_t n_floats);
  void stop();

  const int n_threads_;
  const int spin_us_;
  std::vector<std::thread> threads_;
  std::vector<float *> scratch_;
  size_t scratch_floats_ = 0;
  std::mutex turn_;  // held by the caller of run()

  // The job, written before epoch_ moves.
  Job job_ = nullptr;
  const void *context_ = nullptr;
  bool stopping_ = false;
  std::mutex sleep_;
  std::condition_variable wake_;

  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  Counter claims_[kPieces];
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

inline int Worker::n_threads() const { return pool_.n_threads_; }

inline float *Worker::scratch() const { return pool_.scratch_[static_cast<size_t>(index_)]; }

inline int64_t Worker::claim(int64_t n_items) {
  std::atomic<int64_t> &next = pool_.claims_[piece_].next;
  if (next.load(std::memory_order_relaxed) >= n_items) return -1;
  const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
  return item < n_items ? item : -1;
}

}  // namespace ft

struct ft_pool {
  ft::Pool pool;
  ft_pool(int n_threads, const int *cpus, int spin_us) : pool(n_threads, cpus, spin_us) {}
};
#endif
