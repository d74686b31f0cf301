// Entry points of the op kernels, one set per instruction set. Included by the kernel sources and by the file that
// fills `OpTable`; the names are those of the table's fields.
#pragma once

#include "sayfa.h"

#define SAYFA_DECLARE_OPS(ISA)                                                                      \
  namespace sayfa::ISA {                                                                            \
  void rms_norm(const RmsNormArgs&, const Batch&, const Worker&);                                   \
  void head_norm(const HeadNormArgs&, const Batch&, const Worker&);                                 \
  void rope(const RopeArgs&, const Batch&, const Worker&);                                          \
  void kv_write(const KvWriteArgs&, const Batch&, const Worker&);                                   \
  void attention(const AttentionArgs&, const Batch&, const Worker&);                                \
  void act_mul(const ActMulArgs&, const Batch&, const Worker&);                                     \
  void add(const AddArgs&, const Batch&, const Worker&);                                            \
  void gather(const GatherArgs&, const Batch&, const Worker&);                                      \
  void sample(const SampleArgs&, const Worker&);                                                    \
  size_t attention_scratch_bytes(const AttentionArgs&, int32_t max_tokens, int32_t max_rows);       \
  size_t attention_partials_bytes(const AttentionArgs&);                                            \
  size_t sample_scratch_bytes(int32_t vocab);                                                       \
  size_t kv_page_bytes(const KvLayer&);                                                             \
  }
