// The contract of the native library: what a step program is made of, and the function table that each instruction-set
// variant fills. Plain C types only; nothing of Python, numpy or torch. Checks happen before this line (nn/program/program.py,
// native.py): beyond it a wrong shape is a crash.
//
// Each kernel source is compiled once per instruction set with -DSAYFA_ISA=<name>; its code lives in
// `namespace sayfa::SAYFA_ISA` and only in static or anonymous-namespace functions, because anything inline with external
// linkage that was compiled with wide flags could be the copy the linker keeps for all.
//
// Law of this library: the bits of one row never depend on how many other rows there are, on how a prompt was cut into
// chunks, or on the number of threads. So every reduction has an order fixed by the row alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sayfa {

// ---------------------------------------------------------------------------------------------- one step's input

// Keys whose softmax is computed at once, at absolute positions; page sizes divide it.
constexpr int32_t kKeyBlock = 256;

// Sequences that read the same pages: of key blocks [block_begin, block_end). Their numbers are `members` entries of
// Batch::shared_members from `first` on.
struct SharedRun {
  int32_t first, members;
  int32_t block_begin, block_end;
};

// T tokens of S sequences lie end to end. Pointers belong to the caller and live for the step.
struct Batch {
  const int32_t* token_ids;    // [T]
  const int32_t* positions;    // [T]
  const int32_t* slots;        // [T] page * page_size + offset; base/sizing.py sees that it fits 32 bits
  const int32_t* query_start;  // [S + 1]
  const int32_t* context_len;  // [S]
  const int32_t* page_table;   // [S, P] row-major
  const int32_t* logit_rows;   // [L]
  int32_t T, S, P, L;
  int32_t page_size;
  // What sequences have in common, see shared_prefix.h. Attention may use it; results do not depend on it.
  const SharedRun* shared_runs = nullptr;  // [num_shared_runs]
  const int32_t* shared_members = nullptr;
  int32_t num_shared_runs = 0;
};

// ---------------------------------------------------------------------------------------------- threads

// How an op's work is shared: each worker has a lane of chunks that it takes without meeting anybody, and those who are done
// take from the lanes of others. See shares.h. The value holds the job's number in its high half, so that a lane needs no
// reset: one of another job counts as untouched.
struct alignas(128) Lane {
  std::atomic<uint64_t> value{0};

  // The next of `limit` chunks of job `job`, or -1.
  int64_t take(uint32_t job, int64_t limit) {
    uint64_t seen = value.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t next = static_cast<uint32_t>(seen >> 32) == job ? static_cast<int64_t>(seen & 0xffffffff) : 0;
      if (next >= limit) return -1;
      const uint64_t taken = (static_cast<uint64_t>(job) << 32) | static_cast<uint64_t>(next + 1);
      if (value.compare_exchange_weak(seen, taken, std::memory_order_relaxed)) return next;
    }
  }
};

// One thread's view of an op. Laws for every kernel:
//  * Work is taken from the lanes in chunks and from nowhere else, and a worker leaves when all lanes are empty: one that the
//    operating system has put aside may come late to an op or miss it, and nobody waits for one that holds no chunk. The
//    executor goes on when the first has left and every worker that entered has, too.
//  * So a kernel that must merge partial results lets the worker that finishes last do it (an atomic count), or is
//    split in two ops.
//  * `count` may be used to choose chunk sizes, never the order in which a row's numbers are added.
struct Worker {
  int id;         // 0 .. count-1; 0 is the calling thread
  int count;      // workers of the pool
  void* scratch;  // this worker's own scratch memory, 64-byte aligned
  size_t scratch_bytes;
  Lane* lanes;   // [count]
  uint32_t job;  // number of this job, for lanes
};

// ---------------------------------------------------------------------------------------------- matrices

// A float32 activation matrix [rows, width]; rows start at 64-byte boundaries, `stride` floats apart.
struct Mat {
  float* data;
  int64_t stride;
  int64_t width;
  float* row(int64_t r) const { return data + r * stride; }
};

enum class RowSpace : int32_t { tokens = 0, logits = 1 };

inline int64_t num_rows(RowSpace space, const Batch& batch) { return space == RowSpace::tokens ? batch.T : batch.L; }

// ---------------------------------------------------------------------------------------------- K/V pages

enum class KvType : int32_t { f32 = 0, bf16 = 1, int8 = 2 };

// Pages of one layer. Page p starts at base + p * page_stride; the layout inside a page is private to
// paged_attention.cpp and kv_write.cpp, which agree through kv_layout.h.
struct KvLayer {
  uint8_t* base;
  int64_t page_stride;  // bytes
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t page_size;
  KvType type;
};

// ---------------------------------------------------------------------------------------------- op arguments

struct EmbedArgs {
  const void* table;  // the file's rows as they are, blocks of table_type (types.h)
  int32_t table_type;
  int64_t vocab, width;
  float scale;
  Mat out;
};

struct RmsNormArgs {
  Mat x, out;  // may be the same
  const float* weight;
  float eps;
  RowSpace rows;
};

struct HeadNormArgs {
  Mat x;  // a view: data points at the first column, width = num_heads * head_dim
  int32_t num_heads, head_dim;
  const float* weight;
  float eps;
};

struct RopeArgs {
  Mat x;
  int32_t num_heads, head_dim, rotary_dim;
  const float* cos;  // [positions, rotary_dim / 2]
  const float* sin;
  bool adjacent;  // pairs (2i, 2i+1) instead of (i, i + rotary_dim/2)
};

struct KvWriteArgs {
  Mat key, value;
  KvLayer layer;
};

struct AttentionArgs {
  Mat query, out;
  KvLayer layer;
  int32_t num_heads;
  float scale;
  int32_t window;  // 0 = full
  // Shared by all workers: partial results of contexts that are split over them, or that share a prefix. Zeroed once when it
  // is allocated (it starts with self-resetting counters), 64-byte aligned, one for all layers. null = never split nor shared
  // (same bits, slower).
  uint8_t* partials;
  size_t partials_bytes;
};

struct ActMulArgs {
  Mat x, out;
  int32_t act;  // 0 silu, 1 gelu_tanh
};

struct AddArgs {
  Mat x, y;
  RowSpace rows;
};

struct GatherArgs {
  Mat x, out;
};

// Rows of logits → tokens. All arrays have one entry per row; see sample.cpp for the order of the steps.
struct SampleArgs {
  const float* logits;  // [rows, vocab], stride floats apart
  int64_t stride;
  int32_t rows, vocab;
  const float* temperature;  // < 1e-5: greedy
  const float* top_p;
  const float* min_p;
  const int32_t* top_k;  // <= 0: off
  const double* uniform;  // [rows] in [0, 1): the noise, keyed by (seed, position) on the Python side
  int32_t* token;         // out: the sampled id, -1 if the row has NaN, +inf or nothing but -inf (-inf = masked by the caller)
  const int32_t* num_top;  // log-probabilities wanted: -1 none, 0 the chosen only, k alternatives
  int32_t top_stride;
  float* logprob;       // out [rows]
  int32_t* rank;        // out [rows]
  int32_t* top_ids;     // out [rows, top_stride]
  float* top_logprobs;  // out [rows, top_stride]
};

// ---------------------------------------------------------------------------------------------- the table

// Filled once per instruction set. Linear products have their own table in linear.h.
// The functions carry the names of these fields and live in `namespace sayfa::SAYFA_ISA` (declared in ops.h).
struct OpTable {
  void (*rms_norm)(const RmsNormArgs&, const Batch&, const Worker&);
  void (*head_norm)(const HeadNormArgs&, const Batch&, const Worker&);
  void (*rope)(const RopeArgs&, const Batch&, const Worker&);
  void (*kv_write)(const KvWriteArgs&, const Batch&, const Worker&);
  void (*attention)(const AttentionArgs&, const Batch&, const Worker&);
  void (*act_mul)(const ActMulArgs&, const Batch&, const Worker&);
  void (*add)(const AddArgs&, const Batch&, const Worker&);
  void (*gather)(const GatherArgs&, const Batch&, const Worker&);
  void (*sample)(const SampleArgs&, const Worker&);
  // Sizes the executor must provide. `layer.base`, matrices and pointers of the arguments are not read.
  size_t (*attention_scratch_bytes)(const AttentionArgs&, int32_t max_tokens, int32_t max_rows);  // per worker
  size_t (*attention_partials_bytes)(const AttentionArgs&);  // shared, see AttentionArgs
  size_t (*sample_scratch_bytes)(int32_t vocab);                                                 // per worker
  size_t (*kv_page_bytes)(const KvLayer&);  // least page_stride of a layer, a multiple of 64; pages are 64-byte aligned
};

}  // namespace sayfa
