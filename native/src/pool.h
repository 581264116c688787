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
  // Part number i < kParts of the work between two barriers: how much of it is done. The first call finds 0. Returns
  // the sum with n added; whoever reaches the whole sees what all who added had written.
  int64_t add_done(int i, int64_t n);
  void set_ready(int i);       // what this thread wrote is seen by all who find the part ready
  bool is_ready(int i) const;  // since the last barrier
  // All threads arrive before any leaves; all counters start again at 0.
  void barrier();

 private:
  uint64_t phase() const;

  Pool &pool_;
  int index_;
  int piece_ = 0;
};

constexpr int kPieces = 8;
constexpr int kParts = 1024;
constexpr int kDoneBits = 24;  // of a part's counter; the phase is above, so that an old count is known as such

void relax(int &turns);  // one turn of a waiting loop; turns starts at 0

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

  // Until as many calls of let_sleep(), threads without a job go on spinning: one is about to come.
  void stay_awake();
  void let_sleep() { n_holding_.fetch_sub(1, std::memory_order_relaxed); }

 private:
  friend class Worker;

  void work(int index);
  void wait_for_job(uint32_t seen);
  void wake_sleepers();
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
  std::atomic<int> n_holding_{0};
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  Counter claims_[kPieces];
  struct alignas(64) Part {
    std::atomic<uint64_t> done{0}, ready{0};
  };
  std::vector<Part> parts_;

  // A barrier has two levels: few threads meet on one cache line, and the last of each team on another.
  struct Team {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint64_t> phase{1};
  };
  const int team_size_, n_teams_;
  std::vector<Team> teams_;
  alignas(64) std::atomic<int> teams_arrived_{0};
};

inline int Worker::n_threads() const { return pool_.n_threads_; }

inline float *Worker::scratch() const { return pool_.scratch_[static_cast<size_t>(index_)]; }

inline uint64_t Worker::phase() const {
  return pool_.teams_[static_cast<size_t>(index_ / pool_.team_size_)].phase.load(std::memory_order_relaxed);
}

inline int64_t Worker::add_done(int i, int64_t n) {
  std::atomic<uint64_t> &done = pool_.parts_[static_cast<size_t>(i)].done;
  const uint64_t now = phase() << kDoneBits;
  uint64_t old = done.load(std::memory_order_relaxed), sum;
  do {
    sum = (old >> kDoneBits == now >> kDoneBits ? old : now) + static_cast<uint64_t>(n);
  } while (!done.compare_exchange_weak(old, sum, std::memory_order_acq_rel, std::memory_order_relaxed));
  return static_cast<int64_t>(sum - now);
}

inline void Worker::set_ready(int i) {
  pool_.parts_[static_cast<size_t>(i)].ready.store(phase(), std::memory_order_release);
}

inline bool Worker::is_ready(int i) const {
  return pool_.parts_[static_cast<size_t>(i)].ready.load(std::memory_order_acquire) == phase();
}

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
