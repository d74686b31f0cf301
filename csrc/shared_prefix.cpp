#include "shared_prefix.h"

#include <algorithm>

namespace sayfa {

namespace {

// Whole key blocks before the token of a sequence.
int32_t whole_blocks(const Batch& b, int32_t s) { return (b.context_len[s] - 1) / kKeyBlock; }

const int32_t* pages_of(const Batch& b, int32_t s) { return b.page_table + int64_t{s} * b.P; }

bool same_block(const Batch& b, int32_t s, int32_t t, int32_t block) {
  const int32_t pages = kKeyBlock / b.page_size, start = block * pages;
  return std::equal(pages_of(b, s) + start, pages_of(b, s) + start + pages, pages_of(b, t) + start);
}

}  // namespace

void SharedPrefixes::find(const Batch& batch) {
  members_.clear();
  runs_.clear();
  for (int32_t s = 0; s < batch.S; ++s)
    if (batch.query_start[s + 1] - batch.query_start[s] == 1 && whole_blocks(batch, s) > 0) members_.push_back(s);
  if (members_.size() < 2) return;
  // In the order of their pages, sequences with the same start stand side by side, the shorter ones first.
  const int32_t pages = kKeyBlock / batch.page_size;
  std::sort(members_.begin(), members_.end(), [&](int32_t s, int32_t t) {
    const int32_t* left = pages_of(batch, s);
    const int32_t* right = pages_of(batch, t);
    return std::lexicographical_compare(left, left + whole_blocks(batch, s) * pages, right,
                                        right + whole_blocks(batch, t) * pages);
  });
  split(batch, 0, static_cast<int32_t>(members_.size()), 0);
}

// Members [first, end) are the same before `block`: parts them by what they have there, and goes on within each part.
void SharedPrefixes::split(const Batch& batch, int32_t first, int32_t end, int32_t block) {
  while (first < end) {
    const int32_t leader = members_[first];
    int32_t last = first + 1;
    if (whole_blocks(batch, leader) > block)
      while (last < end && same_block(batch, leader, members_[last], block)) ++last;
    if (last - first > 1) {
      // Between two that are the same in a block, all are.
      int32_t stop = block + 1;
      while (whole_blocks(batch, leader) > stop && same_block(batch, leader, members_[last - 1], stop)) ++stop;
      runs_.push_back({first, last - first, block, stop});
      split(batch, first, last, stop);
    }
    first = last;
  }
}

}  // namespace sayfa
