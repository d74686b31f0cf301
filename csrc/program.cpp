#include "program.h"

#include <stdexcept>

namespace sayfa {

void Program::Joined::call(const void* self, const Batch& batch, const Worker& worker, Counter& counter) {
  if (counter.fetch_add(1, std::memory_order_relaxed) != 0) return;
  const Worker alone{0, 1, worker.region, worker.wait, worker.scratch, worker.scratch_bytes};
  for (const Job& job : static_cast<const Joined*>(self)->jobs) {
    Counter own{0};
    job.call(job.self, batch, alone, own);
  }
}

void Program::join_last(int count, int64_t max_rows) {
  if (count < 1 || count > num_ops()) throw std::invalid_argument("join_last: no such ops");
  auto joined = std::make_shared<Joined>();
  std::string kind;
  for (auto op = ops_.end() - count; op != ops_.end(); ++op) {
    if (op->range.space != RowSpace::tokens) throw std::invalid_argument("join_last: only token ops can be joined");
    joined->jobs.push_back(op->job);
    kind += (kind.empty() ? "" : "+") + op->kind;
    op->range.min = max_rows + 1;
  }
  ops_.push_back({kind, joined, {&Joined::call, joined.get(), false}, {RowSpace::tokens, 1, max_rows}});
  stamps_.resize(ops_.size() + 1);
}

void Program::set_pages(uint8_t* base, int64_t layer_stride) {
  for (const PagesUser& user : pages_users_) user.place->base = base + user.layer * layer_stride;
}

void Program::run(const Batch& batch) {
  active_.clear();
  active_ops_.clear();
  for (int i = 0; i < num_ops(); ++i) {
    const Op& op = ops_[static_cast<size_t>(i)];
    const int64_t rows = num_rows(op.range.space, batch);
    if (rows < op.range.min || rows > op.range.max) continue;
    active_.push_back(op.job);
    active_ops_.push_back(i);
  }
  pool_->run(active_.data(), static_cast<int>(active_.size()), batch, timing_ ? stamps_.data() : nullptr);
}

std::vector<std::pair<std::string, int64_t>> Program::timings() const {
  std::vector<std::pair<std::string, int64_t>> result;
  for (size_t i = 0; i < active_ops_.size(); ++i)
    result.emplace_back(ops_[static_cast<size_t>(active_ops_[i])].kind, stamps_[i + 1] - stamps_[i]);
  return result;
}

}  // namespace sayfa
