// What a plan asks for → the flat arrays of one step. The fast twin of runner/prepare.py, which tells the meaning.
#pragma once

#include <cstdint>
#include <string>

namespace sayfa {

// The request table's columns, [max_rows] or [max_rows, stride].
struct TableColumns {
  const int32_t* tokens;
  const int32_t* pages;
  const int32_t* num_tokens;
  const int32_t* num_pages;
  int64_t token_stride, page_stride, max_rows, page_size;
};

// One scheduled row, as the five columns of the plan array lie.
struct PlanRow {
  int32_t row, start, count, num_logits, sample;
};

struct StepSizes {
  int64_t tokens, logits, pages;  // T, L, P of Batch
};

// Sizes of a step. `error` stays empty if the plan fits the table, else it is a sentence.
StepSizes step_sizes(const TableColumns& table, const PlanRow* plan, int64_t num_rows, std::string& error);

// Fills `out` with, one after the other: rows [S], end [S], token_ids, positions, slots [T], query_start [S + 1],
// logit_start [S + 1], page_table [S, P], logit_rows [L]. The plan must have passed step_sizes.
void fill_step(const TableColumns& table, const PlanRow* plan, int64_t num_rows, const StepSizes& sizes, int32_t* out);

}  // namespace sayfa
