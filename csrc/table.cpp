// Fills the function table of one instruction-set variant. Sources that are not there leave their entries null.
#include "kernels.h"
#include "ops.h"

#define SAYFA_STRING_(x) #x
#define SAYFA_STRING(x) SAYFA_STRING_(x)

SAYFA_DECLARE_OPS(SAYFA_ISA)

namespace sayfa::SAYFA_ISA {

namespace {

OpTable ops() {
  OpTable table{};
#ifdef SAYFA_HAVE_SMALL_OPS
  table.rms_norm = rms_norm;
  table.head_norm = head_norm;
  table.rope = rope;
  table.act_mul = act_mul;
  table.add = add;
  table.gather = gather;
#endif
#ifdef SAYFA_HAVE_KV_WRITE
  table.kv_write = kv_write;
#endif
#ifdef SAYFA_HAVE_PAGED_ATTENTION
  table.attention = attention;
  table.attention_scratch_bytes = attention_scratch_bytes;
  table.attention_partials_bytes = attention_partials_bytes;
  table.kv_page_bytes = kv_page_bytes;
#endif
#ifdef SAYFA_HAVE_SAMPLE
  table.sample = sample;
  table.sample_scratch_bytes = sample_scratch_bytes;
#endif
  return table;
}

}  // namespace

// A function, not a constant: what it runs is never run on a machine that lacks the instructions.
Kernels kernels() { return {SAYFA_STRING(SAYFA_ISA), ops(), linear_table()}; }

}  // namespace sayfa::SAYFA_ISA
