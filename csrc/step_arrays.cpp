#include "step_arrays.h"

#include <algorithm>

namespace sayfa {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

// Why a row cannot be computed as planned, or nothing. In the order of runner/prepare.py.
std::string wrong_range(const PlanRow& r) {
  const bool wrong = r.start < 0 || r.count < 1 || r.num_logits < r.sample || r.num_logits > r.count;
  return wrong ? "row " + number(r.row) + ": start, count and number of logits contradict each other" : "";
}

std::string missing_tokens(const TableColumns& t, const PlanRow& r) {
  const int64_t end = int64_t{r.start} + r.count, there = t.num_tokens[r.row];
  if (end <= there) return "";
  return "row " + number(r.row) + ": the plan goes to " + number(end) + ", the row has " + number(there) + " tokens";
}

std::string missing_pages(const TableColumns& t, const PlanRow& r) {
  const int64_t end = int64_t{r.start} + r.count, there = t.num_pages[r.row];
  if (end <= there * t.page_size) return "";
  return "row " + number(r.row) + ": " + number(there) + " pages do not hold " + number(end) + " tokens";
}

}  // namespace

StepSizes step_sizes(const TableColumns& t, const PlanRow* plan, int64_t num_rows, std::string& error) {
  StepSizes sizes{0, 0, 0};
  int64_t furthest = 0;
  for (int64_t s = 0; s < num_rows; ++s) {
    const PlanRow& r = plan[s];
    if (r.row < 0 || r.row >= t.max_rows) {
      error = "the plan names row " + number(r.row) + ", outside the table of " + number(t.max_rows);
      return sizes;
    }
    error = wrong_range(r);
    if (error.empty()) error = missing_tokens(t, r);
    if (error.empty()) error = missing_pages(t, r);
    if (!error.empty()) return sizes;
    sizes.tokens += r.count;
    sizes.logits += r.num_logits;
    furthest = std::max(furthest, int64_t{r.start} + r.count);
  }
  sizes.pages = (furthest + t.page_size - 1) / t.page_size;
  return sizes;
}

void fill_step(const TableColumns& t, const PlanRow* plan, int64_t num_rows, const StepSizes& sizes, int32_t* out) {
  int32_t* rows = out;
  int32_t* end = rows + num_rows;
  int32_t* token_ids = end + num_rows;
  int32_t* positions = token_ids + sizes.tokens;
  int32_t* slots = positions + sizes.tokens;
  int32_t* query_start = slots + sizes.tokens;
  int32_t* logit_start = query_start + num_rows + 1;
  int32_t* page_table = logit_start + num_rows + 1;
  int32_t* logit_rows = page_table + num_rows * sizes.pages;
  int32_t token = 0, logit = 0;
  const auto page_size = static_cast<int32_t>(t.page_size);
  for (int64_t s = 0; s < num_rows; ++s) {
    const PlanRow& r = plan[s];
    const int32_t* row_tokens = t.tokens + r.row * t.token_stride;
    const int32_t* row_pages = t.pages + r.row * t.page_stride;
    rows[s] = r.row;
    end[s] = r.start + r.count;
    query_start[s] = token;
    logit_start[s] = logit;
    std::copy(row_pages, row_pages + sizes.pages, page_table + s * sizes.pages);
    for (int32_t position = r.start; position < r.start + r.count; ++position, ++token) {
      token_ids[token] = row_tokens[position];
      positions[token] = position;
      slots[token] = row_pages[position / page_size] * page_size + position % page_size;
    }
    for (int32_t i = token - r.num_logits; i < token; ++i) logit_rows[logit++] = i;
  }
  query_start[num_rows] = token;
  logit_start[num_rows] = logit;
}

}  // namespace sayfa
