// Fills the function table of one instruction-set variant.
#include "kernels.h"
#include "ops.h"

#define SAYFA_STRING_(x) #x
#define SAYFA_STRING(x) SAYFA_STRING_(x)

SAYFA_DECLARE_OPS(SAYFA_ISA)

namespace sayfa::SAYFA_ISA {

namespace {

OpTable ops() {
  OpTable table{};
  table.rms_norm = rms_norm;
  table.head_norm = head_norm;
  table.rope = rope;
  table.act_mul = act_mul;
  table.add = add;
  table.gather = gather;
  table.kv_write = kv_write;
  table.attention = attention;
  table.attention_scratch_bytes = attention_scratch_bytes;
  table.attention_partials_bytes = attention_partials_bytes;
  table.kv_page_bytes = kv_page_bytes;
  table.sample = sample;
  table.sample_scratch_bytes = sample_scratch_bytes;
  return table;
}

}  // namespace

// A function, not a constant: what it runs is never run on a machine that lacks the instructions.
Kernels kernels() { return {SAYFA_STRING(SAYFA_ISA), ops(), linear_table()}; }

}  // namespace sayfa::SAYFA_ISA
