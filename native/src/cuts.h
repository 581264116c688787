// How rows are cut into claims: half of them in equal parts for all threads, half of the rest in smaller ones, and so on
// down to a least part, so that streams are long at first and no thread is late at the end.
#ifndef FT_CUTS_H
#define FT_CUTS_H
#include <algorithm>
#include <cstdint>

namespace ft {

struct Range {
  int64_t begin, end;
};

constexpr int64_t kRowStep = 16;  // cuts fall on multiples: whole cache lines of output, whole groups of eight blocks

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

class Cuts {
 public:
  // least: rows of the smallest part, where the threads have that many each.
  Cuts(int64_t n_rows, int n_threads, int64_t least) : n_rows_(n_rows) {
    const int64_t share = round_up(std::max<int64_t>(n_rows / n_threads, 1), kRowStep);
    least = n_threads == 1 ? n_rows : std::min(round_up(least, kRowStep), share);
    int64_t begin = 0, claim = 0;
    for (; n_rounds_ < kMaxRounds - 1; ++n_rounds_) {
      const int64_t size = round_up((n_rows - begin) / (2 * n_threads), kRowStep);
      if (size <= least || n_threads == 1) break;
      rounds_[n_rounds_] = {claim, begin, size};
      claim += n_threads;
      begin += n_threads * size;
    }
    const int64_t last = n_rounds_ == kMaxRounds - 1 ? std::max(least, rounds_[n_rounds_ - 1].size) : least;
    rounds_[n_rounds_++] = {claim, begin, std::max<int64_t>(last, 1)};
    n_claims_ = claim + (std::max<int64_t>(n_rows - begin, 0) + rounds_[n_rounds_ - 1].size - 1) / rounds_[n_rounds_ - 1].size;
  }

  int64_t n_claims() const { return n_claims_; }

  Range at(int64_t claim) const {
    int i = n_rounds_ - 1;
    while (rounds_[i].first_claim > claim) --i;
    const int64_t begin = rounds_[i].begin + (claim - rounds_[i].first_claim) * rounds_[i].size;
    return {begin, std::min(begin + rounds_[i].size, n_rows_)};
  }

 private:
  struct Round {
    int64_t first_claim, begin, size;
  };
  static constexpr int kMaxRounds = 16;  // 2^15 times as many rows as the least parts take
  int64_t n_rows_, n_claims_;
  int n_rounds_ = 0;
  Round rounds_[kMaxRounds];
};

}  // namespace ft
#endif
