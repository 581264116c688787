// The thread that computes experts in the middle of a GPU's step. The protocol stands in freetoken.h.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "freetoken.h"
#include "pool.h"

namespace {

using Flag = std::atomic<uint64_t>;
static_assert(sizeof(Flag) == 8 && Flag::is_always_lock_free, "flags are plain 64-bit words for the GPU");

struct Place {
  alignas(64) Flag asked;
  alignas(64) Flag done;
};
static_assert(sizeof(Place) == 128, "freetoken.h says so");

constexpr int kReleased = 1;

}  // namespace

struct ft_meeting {
  ft_meeting(ft_pool *pool, int n_places, void *flags)
      : pool_(pool), places_(static_cast<Place *>(flags)), ops_(size_t(n_places)), thread_([this] { work(); }) {}

  ~ft_meeting() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_ending_.store(true);
    }
    wake_.notify_one();
    thread_.join();
  }

  bool has(int place) const { return place >= 0 && size_t(place) < ops_.size(); }

  int set(int place, const ft_op *ops, int n_ops) {
    if (!has(place) || n_ops < 0 || pending_.load() != 0) return -1;
    ops_[size_t(place)].assign(ops, ops + n_ops);
    return 0;
  }

  int expect(const int32_t *places, int n) {
    for (int i = 0; i < n; ++i) {
      if (!has(places[i])) return -1;
    }
    if (failure_.load() != 0) return -1;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      steps_.emplace_back(places, places + n);
      pending_.fetch_add(1);
    }
    wake_.notify_one();
    return 0;
  }

  void release() {
    fail(kReleased, -1);
    for (size_t i = 0; i < ops_.size(); ++i) places_[i].done.store(1, std::memory_order_release);
  }

  int reset() {
    if (pending_.load() != 0) return -1;
    for (size_t i = 0; i < ops_.size(); ++i) places_[i].asked.store(0);  // by a GPU that nobody answered
    failed_place_.store(-1);
    failure_.store(0);
    return 0;
  }

  int pending() const { return pending_.load(); }

  int failure(int32_t *place) const {
    *place = failed_place_.load();
    return failure_.load();
  }

  void slow_down(double factor) { factor_.store(factor < 1.0 ? 1.0 : factor); }

 private:
  void work() {
    std::vector<int32_t> step;
    while (next(step)) {
      for (const int32_t place : step) meet(place);
      pending_.fetch_sub(1);
    }
  }

  // The next step that is expected; false at the end.
  bool next(std::vector<int32_t> &step) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return is_ending_.load() || !steps_.empty(); });
    if (is_ending_.load()) return false;
    step.swap(steps_.front());
    steps_.pop_front();
    return true;
  }

  void meet(int32_t number) {
    Place &place = places_[number];
    int turns = 0;
    while (place.asked.load(std::memory_order_acquire) == 0) {
      if (is_ending_.load(std::memory_order_relaxed) || failure_.load(std::memory_order_relaxed) == kReleased) return;
      ft::relax(turns);
    }
    place.asked.store(0, std::memory_order_relaxed);
    if (failure_.load() == 0) run(number);
    place.done.store(1, std::memory_order_release);
  }

  void run(int32_t number) {
    const std::vector<ft_op> &ops = ops_[size_t(number)];
    const auto started = std::chrono::steady_clock::now();
    const int result = ft_run(pool_, ops.data(), int(ops.size()));
    if (result != 0) fail(result, number);
    const double factor = factor_.load(std::memory_order_relaxed);
    if (factor > 1.0) wait_until(started + (std::chrono::steady_clock::now() - started) * factor);
  }

  template <typename Time>
  void wait_until(Time end) const {
    int turns = 0;
    while (std::chrono::steady_clock::now() < end && !is_ending_.load()) ft::relax(turns);
  }

  void fail(int code, int32_t place) {
    int none = 0;
    if (failure_.compare_exchange_strong(none, code)) {
      failed_place_.store(place);
    } else if (code == kReleased) {
      failure_.store(code);
    }
  }

  ft_pool *pool_;
  Place *places_;
  std::vector<std::vector<ft_op>> ops_;
  std::deque<std::vector<int32_t>> steps_;
  std::mutex mutex_;  // of steps_
  std::condition_variable wake_;
  std::atomic<bool> is_ending_{false};
  std::atomic<int> pending_{0};
  std::atomic<int> failure_{0};
  std::atomic<int32_t> failed_place_{-1};
  std::atomic<double> factor_{1.0};
  std::thread thread_;  // the last: it runs from here on
};

ft_meeting *ft_meeting_create(ft_pool *pool, int n_places, void *flags) {
  if (pool == nullptr || flags == nullptr || n_places < 0 || uintptr_t(flags) % 64 != 0) return nullptr;
  try {
    return new ft_meeting(pool, n_places, flags);
  } catch (const std::exception &) {
    return nullptr;
  }
}

void ft_meeting_destroy(ft_meeting *meeting) { delete meeting; }

int ft_meeting_set(ft_meeting *meeting, int place, const ft_op *ops, int n_ops) {
  return meeting->set(place, ops, n_ops);
}

int ft_meeting_expect(ft_meeting *meeting, const int32_t *places, int n) { return meeting->expect(places, n); }

int ft_meeting_pending(const ft_meeting *meeting) { return meeting->pending(); }

int ft_meeting_failure(const ft_meeting *meeting, int32_t *place) { return meeting->failure(place); }

void ft_meeting_release(ft_meeting *meeting) { meeting->release(); }

int ft_meeting_reset(ft_meeting *meeting) { return meeting->reset(); }

void ft_meeting_slow_down(ft_meeting *meeting, double factor) { meeting->slow_down(factor); }
