#include "program.h"

#include <stdexcept>

namespace sayfa {

void Program::Joined::call(const void* self, const Batch& batch, const Worker& worker) {
  if (worker.lanes[0].take(worker.job, 1) < 0) return;
  for (const Job& job : static_cast<const Joined*>(self)->jobs) {
    Lane lane;
    const Worker alone{0, 1, worker.scratch, worker.scratch_bytes, &lane, worker.job};
    job.call(job.self, batch, alone);
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
  ops_.push_back({kind, joined, {&Joined::call, joined.get()}, {RowSpace::tokens, 1, max_rows}});
  stamps_.resize(ops_.size() + 1);
}

void Program::set_pages(uint8_t* base, int64_t layer_stride, int32_t num_pages) {
  for (const PagesUser& user : pages_users_) user.place->base = base + user.layer * layer_stride;
  limits.num_pages = num_pages;
}

namespace {

// Index of the first value outside [0, limit), or -1.
int32_t first_outside(const int32_t* values, int32_t count, int64_t limit) {
  for (int32_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) return i;
  return -1;
}

std::string outside(const char* field, const int32_t* values, int32_t count, int64_t limit) {
  const int32_t i = first_outside(values, count, limit);
  if (i < 0) return {};
  return std::string(field) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) + ", allowed are 0 to " +
         std::to_string(limit - 1);
}

// Rows of the batch against each other: token counts, contexts and the pages they need.
std::string check_rows(const Batch& b, const Limits& limits) {
  if (b.query_start[0] != 0 || b.query_start[b.S] != b.T) return "query_start does not run from 0 to the number of tokens";
  for (int32_t s = 0; s < b.S; ++s) {
    const int64_t tokens = int64_t{b.query_start[s + 1]} - b.query_start[s];
    const std::string row = " of row " + std::to_string(s);
    if (tokens < 0) return "query_start falls at the end" + row;
    if (b.query_start[s + 1] > b.T) return "query_start passes the number of tokens at the end" + row;
    if (b.context_len[s] < tokens) return "context_len" + row + " is shorter than its tokens";
    const int64_t pages = (int64_t{b.context_len[s]} + limits.page_size - 1) / limits.page_size;
    if (pages > b.P) return "page_table" + row + " has fewer pages than its context needs";
    const std::string bad = outside("page_table", b.page_table + int64_t{s} * b.P, static_cast<int32_t>(pages), limits.num_pages);
    if (!bad.empty()) return bad + row;
    for (int32_t t = b.query_start[s]; t < b.query_start[s + 1]; ++t) {
      const int32_t position = static_cast<int32_t>(b.context_len[s] - (b.query_start[s + 1] - t));
      if (b.positions[t] != position) return "positions" + row + " are not the last ones of its context";
    }
  }
  return {};
}

}  // namespace

std::string Program::check(const Batch& b) const {
  if (b.T < 1 || b.T > limits.max_tokens)
    return "the step has " + std::to_string(b.T) + " tokens, the executor was made for 1 to " + std::to_string(limits.max_tokens);
  if (b.L > limits.max_rows)
    return "the step has " + std::to_string(b.L) + " logit rows, the executor was made for " + std::to_string(limits.max_rows);
  std::string bad = outside("token_ids", b.token_ids, b.T, limits.vocab);
  if (bad.empty()) bad = outside("positions", b.positions, b.T, limits.positions);
  if (bad.empty()) bad = outside("slots", b.slots, b.T, int64_t{limits.num_pages} * limits.page_size);
  if (bad.empty()) bad = outside("logit_rows", b.logit_rows, b.L, b.T);
  return bad.empty() ? check_rows(b, limits) : bad;
}

void Program::run(Batch batch) {
  shared_.find(batch);
  batch.shared_runs = shared_.runs().data();
  batch.shared_members = shared_.members().data();
  batch.num_shared_runs = static_cast<int32_t>(shared_.runs().size());
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
