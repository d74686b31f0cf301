// How the workers share an op's units (rows, or what belongs to them).
#pragma once

#include "sayfa.h"

namespace sayfa {
namespace {

// Units [first, end).
struct Share {
  int64_t first, end;
  int64_t count() const { return end - first; }
};

// What is at home in one lane. Equal shares of successive ops have the same home, so that a worker finds what it needs in
// its own caches, most of the time.
inline Share share_of(int64_t units, int64_t lane, int64_t lanes) { return {units * lane / lanes, units * (lane + 1) / lanes}; }

// The lanes in the order in which a worker looks for work: its own first, then those of the others.
class Visit {
 public:
  explicit Visit(const Worker& worker) : worker_(worker), lane_(worker.id) {}
  int lane() const { return lane_; }
  // The next of the lane's `limit` chunks, or -1.
  int64_t take(int64_t limit) { return worker_.lanes[lane_].take(worker_.job, limit); }
  // Goes on to the next lane; false: all were visited.
  bool next() {
    lane_ = (lane_ + 1) % worker_.count;
    return lane_ != worker_.id;
  }

 private:
  const Worker& worker_;
  int lane_;
};

// Calls run(first, end) for chunks of [0, units).
template <class Run>
void for_shares(const Worker& worker, int64_t units, int64_t chunk, Run run) {
  Visit visit(worker);
  do {
    const Share share = share_of(units, visit.lane(), worker.count);
    const int64_t chunks = (share.count() + chunk - 1) / chunk;
    for (int64_t taken; (taken = visit.take(chunks)) >= 0;) {
      const int64_t first = share.first + taken * chunk, end = first + chunk;
      run(first, end < share.end ? end : share.end);
    }
  } while (visit.next());
}

}  // namespace
}  // namespace sayfa
