// Which sequences of a step read the same pages from their start on.
#pragma once

#include <vector>

#include "sayfa.h"

namespace sayfa {

// Finds, for the sequences with one token in the step, every run of whole key blocks that lies before the token and in the same
// pages for two of them at least. The runs of a sequence follow one another without a gap from block 0 on, with fewer and
// fewer members. Its arrays live until the next find().
class SharedPrefixes {
 public:
  void find(const Batch& batch);
  const std::vector<SharedRun>& runs() const { return runs_; }
  const std::vector<int32_t>& members() const { return members_; }  // of all runs, by SharedRun::first

 private:
  void split(const Batch& batch, int32_t first, int32_t end, int32_t block);

  std::vector<int32_t> members_;
  std::vector<SharedRun> runs_;
};

}  // namespace sayfa
