// The thread that computes experts in the middle of a GPU's step. The protocol stands in freetoken.h.
#include <algorithm>
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

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

using Flag = std::atomic<uint64_t>;
static_assert(sizeof(Flag) == 8 && Flag::is_always_lock_free, "flags are plain 64-bit words for the GPU");

struct Place {
  alignas(64) Flag asked;
  alignas(64) Flag done;
};
static_assert(sizeof(Place) == 128, "freetoken.h says so");

constexpr int kReleased = 1;
constexpr milliseconds kSpin(2);        // a GPU that takes longer to ask lets the pool sleep,
constexpr milliseconds kLinger(20);     // and after this the thread only looks now and then
constexpr microseconds kLook(100);
constexpr milliseconds kWatch(10);      // how often a wait that lasts is looked for
constexpr milliseconds kReleaseEvery(1);

// Whether a place has nothing to compute: all its experts are left out.
bool is_idle(const std::vector<ft_op> &ops) {
  bool has_experts = false;
  for (const ft_op &op : ops) {
    if (op.code != FT_OP_EXPERTS) continue;
    has_experts = true;
    const auto *ids = static_cast<const int32_t *>(op.p[1]);
    const auto is_one = [&](int32_t id) { return id >= 0 && id < op.i[0]; };
    if (ids == nullptr || std::any_of(ids, ids + op.n * op.i[1], is_one)) return false;
  }
  return has_experts;
}

// The pool's threads stay awake from wake() to sleep().
class Awake {
 public:
  explicit Awake(ft::Pool &pool) : pool_(pool) {}
  ~Awake() { sleep(); }
  void wake() {
    if (!is_on_) pool_.stay_awake();
    is_on_ = true;
  }
  void sleep() {
    if (is_on_) pool_.let_sleep();
    is_on_ = false;
  }

 private:
  ft::Pool &pool_;
  bool is_on_ = false;
};

}  // namespace

struct ft_meeting {
  ft_meeting(ft_pool *pool, int n_places, void *flags)
      : pool_(pool), places_(static_cast<Place *>(flags)), ops_(size_t(n_places)) {
    try {
      watcher_ = std::thread([this] { watch(); });
      thread_ = std::thread([this] { work(); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~ft_meeting() { end(); }

  bool has(int place) const { return place >= 0 && size_t(place) < ops_.size(); }

  int set(int place, const ft_op *ops, int n_ops) {
    if (!has(place) || n_ops < 0) return -1;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_expected(place)) return -1;
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
    wake_.notify_all();
    return 0;
  }

  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail(kReleased, -1);
    set_all_done();
    wake_.notify_all();
  }

  int reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
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

  void spent(uint64_t *n_met, uint64_t *n_run, uint64_t *run_ns) const {
    *n_met = n_met_.load();
    *n_run = n_run_.load();
    *run_ns = run_ns_.load();
  }

  void slow_down(double factor) { factor_.store(factor < 1.0 ? 1.0 : factor); }

  void limit(double seconds) { limit_ms_.store(int64_t(seconds * 1e3)); }

 private:
  void end() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_ending_.store(true);
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
    if (watcher_.joinable()) watcher_.join();
  }

  bool is_expected(int32_t place) const {
    const auto has_it = [&](const std::vector<int32_t> &s) { return std::find(s.begin(), s.end(), place) != s.end(); };
    return has_it(step_) || std::any_of(steps_.begin(), steps_.end(), has_it);
  }

  void set_all_done() {
    for (size_t i = 0; i < ops_.size(); ++i) places_[i].done.store(1, std::memory_order_release);
  }

  // --- the thread -------------------------------------------------------------------------------------------------

  void work() {
    Awake awake(pool_->pool);
    while (next(awake)) {
      awake.wake();
      for (const int32_t place : step_) meet(place, awake);
      const std::lock_guard<std::mutex> lock(mutex_);
      step_.clear();
      pending_.fetch_sub(1);
    }
  }

  // Waits for the next step that is expected; false at the end.
  bool next(Awake &awake) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (steps_.empty()) {
      lock.unlock();
      awake.sleep();
      lock.lock();
    }
    wake_.wait(lock, [this] { return is_ending_.load() || !steps_.empty(); });
    if (is_ending_.load()) return false;
    step_.swap(steps_.front());
    steps_.pop_front();
    return true;
  }

  void meet(int32_t number, Awake &awake) {
    Place &place = places_[number];
    if (!wait_until_asked(place, awake)) return;
    is_running_.store(true, std::memory_order_relaxed);
    place.asked.store(0, std::memory_order_relaxed);
    if (failure_.load() == 0 && !is_idle(ops_[size_t(number)])) {
      awake.wake();
      run(number);
    }
    place.done.store(1, std::memory_order_release);
    is_running_.store(false, std::memory_order_relaxed);
    n_met_.fetch_add(1, std::memory_order_relaxed);
  }

  // False where the GPU was let go.
  bool wait_until_asked(const Place &place, Awake &awake) const {
    int turns = 0;
    Clock::time_point started;
    for (uint64_t looks = 0; place.asked.load(std::memory_order_acquire) == 0; ++looks) {
      if (is_ending_.load(std::memory_order_relaxed) || failure_.load(std::memory_order_relaxed) == kReleased) {
        return false;
      }
      ft::relax(turns);
      if (looks % 1024 != 1023) continue;
      const auto now = Clock::now();
      if (looks == 1023) started = now;
      if (now - started > kSpin) awake.sleep();
      while (now - started > kLinger && place.asked.load(std::memory_order_acquire) == 0 && !is_ending_.load() &&
             failure_.load() != kReleased) {
        std::this_thread::sleep_for(kLook);
      }
    }
    return true;
  }

  void run(int32_t number) {
    const std::vector<ft_op> &ops = ops_[size_t(number)];
    const auto started = Clock::now();
    const int result = ft_run(pool_, ops.data(), int(ops.size()));
    if (result != 0) fail(result, number);
    if (factor_.load(std::memory_order_relaxed) > 1.0) wait_longer(started, Clock::now() - started);
    n_run_.fetch_add(1, std::memory_order_relaxed);
    run_ns_.fetch_add(uint64_t((Clock::now() - started).count()), std::memory_order_relaxed);
  }

  void wait_longer(Clock::time_point started, Clock::duration took) const {
    int turns = 0;
    while (Clock::now() - started < took * factor_.load() && !is_ending_.load()) ft::relax(turns);
  }

  void fail(int code, int32_t place) {
    int none = 0;
    if (failure_.compare_exchange_strong(none, code)) {
      failed_place_.store(place);
    } else if (code == kReleased) {
      failure_.store(code);
    }
  }

  // --- who looks after it -----------------------------------------------------------------------------------------

  void watch() {
    uint64_t seen = 0;
    auto since = Clock::now();
    std::unique_lock<std::mutex> lock(mutex_);
    while (!is_ending_.load()) {
      const bool is_released = failure_.load() == kReleased;
      if (is_released) set_all_done();
      if (!is_released && pending_.load() == 0) {
        wake_.wait(lock);
        since = Clock::now();
        continue;
      }
      const uint64_t met = n_met_.load(std::memory_order_relaxed);
      if (met != seen || !is_waiting()) {
        seen = met;
        since = Clock::now();
      } else if (limit_ms_.load() > 0 && Clock::now() - since > milliseconds(limit_ms_.load())) {
        fail(kReleased, -1);
        set_all_done();
      }
      const milliseconds pause = failure_.load() == kReleased ? kReleaseEvery : kWatch;
      lock.unlock();
      std::this_thread::sleep_for(pause);
      lock.lock();
    }
  }

  // Whether the GPU waits for the thread.
  bool is_waiting() const {
    if (is_running_.load(std::memory_order_relaxed)) return true;
    const auto is_asked = [](const Place &place) { return place.asked.load(std::memory_order_relaxed) != 0; };
    return std::any_of(places_, places_ + ops_.size(), is_asked);
  }

  ft_pool *pool_;
  Place *places_;
  std::vector<std::vector<ft_op>> ops_;
  std::deque<std::vector<int32_t>> steps_;
  std::vector<int32_t> step_;  // the one under way
  std::mutex mutex_;           // of steps, and of flags that are set for a GPU which was let go
  std::condition_variable wake_;
  std::atomic<bool> is_ending_{false}, is_running_{false};
  std::atomic<int> pending_{0};
  std::atomic<int> failure_{0};
  std::atomic<int32_t> failed_place_{-1};
  std::atomic<uint64_t> n_met_{0}, n_run_{0}, run_ns_{0};
  std::atomic<int64_t> limit_ms_{0};
  std::atomic<double> factor_{1.0};
  std::thread watcher_, thread_;
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

void ft_meeting_limit(ft_meeting *meeting, double seconds) { meeting->limit(seconds); }

int ft_meeting_reset(ft_meeting *meeting) { return meeting->reset(); }

void ft_meeting_spent(const ft_meeting *meeting, uint64_t *n_met, uint64_t *n_run, uint64_t *run_ns) {
  meeting->spent(n_met, n_run, run_ns);
}

void ft_meeting_slow_down(ft_meeting *meeting, double factor) { meeting->slow_down(factor); }

void ft_place_ask(void *place) { static_cast<Place *>(place)->asked.store(1, std::memory_order_release); }

void ft_place_wait(void *place) {
  int turns = 0;
  while (static_cast<Place *>(place)->done.load(std::memory_order_acquire) == 0) ft::relax(turns);
}
