// A step program: ops bound to their arguments, run in order by the pool in one call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "shared_prefix.h"
#include "threads.h"

namespace sayfa {

// When an op takes part in a step, by the number of rows in its row space. Ops with no rows are left out.
struct RowRange {
  RowSpace space = RowSpace::tokens;
  int64_t min = 1;
  int64_t max = INT64_MAX;
};

// What a batch may hold; check() compares every number with it before a kernel sees one.
struct Limits {
  int32_t max_tokens = 0;
  int32_t max_rows = 0;   // of logits
  int32_t vocab = 0;
  int32_t positions = 0;  // length of the shortest rope table
  int32_t num_pages = 0;
  int32_t page_size = 0;
};

class Program {
 public:
  Program(std::shared_ptr<Pool> pool, const Kernels* kernels) : pool_(std::move(pool)), kernels_(kernels) {}

  const Kernels& kernels() const { return *kernels_; }
  const std::shared_ptr<Pool>& pool() const { return pool_; }

  // Appends an op.
  template <class Args>
  void add(const char* kind, void (*kernel)(const Args&, const Batch&, const Worker&), const Args& args,
           RowRange range) {
    auto bound = std::make_shared<Bound<Args>>(Bound<Args>{args, kernel});
    ops_.push_back({kind, bound, {&Bound<Args>::call, bound.get()}, range});
    active_.reserve(ops_.size());
    stamps_.resize(ops_.size() + 1);
  }

  // Joins the last `count` ops for steps of at most `max_rows` tokens: one worker runs them one after another, which is
  // cheaper than handing each to all. They must be token ops.
  void join_last(int count, int64_t max_rows);

  // Keeps `owner` alive as long as the program.
  void keep(std::shared_ptr<void> owner) { owners_.push_back(std::move(owner)); }

  // Registers a place that holds the K/V pages of a layer, to be filled by set_pages.
  void add_pages_user(KvLayer* place, int layer) { pages_users_.push_back({place, layer}); }
  void set_pages(uint8_t* base, int64_t layer_stride, int32_t num_pages);

  Limits limits;

  template <class Args>
  Args& last_args() {
    return static_cast<Bound<Args>*>(ops_.back().owner.get())->args;
  }

  // An empty string, or what is wrong with the batch.
  std::string check(const Batch& batch) const;

  // Runs a checked batch; fills in what its sequences share.
  void run(Batch batch);

  // The last product added, to be told of its successor; null if none.
  LinearArgs* last_linear = nullptr;

  int num_ops() const { return static_cast<int>(ops_.size()); }
  void set_timing(bool on) { timing_ = on; }
  // Kinds of the ops that ran in the last timed step, and the nanoseconds of each.
  std::vector<std::pair<std::string, int64_t>> timings() const;

 private:
  template <class Args>
  struct Bound {
    Args args;
    void (*kernel)(const Args&, const Batch&, const Worker&);
    static void call(const void* self, const Batch& batch, const Worker& worker) {
      const auto& bound = *static_cast<const Bound*>(self);
      bound.kernel(bound.args, batch, worker);
    }
  };
  struct Op {
    std::string kind;
    std::shared_ptr<void> owner;
    Job job;
    RowRange range;
  };
  struct Joined {
    std::vector<Job> jobs;
    static void call(const void* self, const Batch& batch, const Worker& worker);
  };
  struct PagesUser {
    KvLayer* place;
    int layer;
  };

  std::shared_ptr<Pool> pool_;
  const Kernels* kernels_;
  std::vector<Op> ops_;
  std::vector<Job> active_;
  std::vector<int> active_ops_;
  std::vector<int64_t> stamps_;
  std::vector<PagesUser> pages_users_;
  SharedPrefixes shared_;
  std::vector<std::shared_ptr<void>> owners_;
  bool timing_ = false;
};

}  // namespace sayfa
