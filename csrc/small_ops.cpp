// The small ops as steps of their own: norms, rotary turn, activation, add, gather. Rows are handed out in chunks.
#include "ops.h"
#include "shares.h"
#include "small_rows.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

// Calls row(r) for chunks of rows. A chunk is about the same work whatever the width: large enough that taking it costs
// nothing, small enough that every worker gets some.
template <class Row>
void for_rows(int64_t rows, int64_t floats_per_row, const Worker& worker, Row row) {
  constexpr int64_t kFloatsPerChunk = 4096;
  int64_t chunk = kFloatsPerChunk / (floats_per_row > 0 ? floats_per_row : 1);
  const int64_t fair = rows / (4 * worker.count);
  if (chunk < fair && fair < 16) chunk = fair;
  if (chunk < 1) chunk = 1;
  for_shares(worker, rows, chunk, [&](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) row(r);
  });
}

}  // namespace

void rms_norm(const RmsNormArgs& args, const Batch& batch, const Worker& worker) {
  for_rows(num_rows(args.rows, batch), args.x.width, worker, [&](int64_t r) {
    rms_norm_row(args.x.row(r), args.weight, args.x.width, args.eps, args.out.row(r));
  });
}

void head_norm(const HeadNormArgs& args, const Batch& batch, const Worker& worker) {
  for_rows(batch.T, args.x.width, worker, [&](int64_t r) {
    for (int32_t h = 0; h < args.num_heads; ++h) {
      float* x = args.x.row(r) + static_cast<int64_t>(h) * args.head_dim;
      rms_norm_row(x, args.weight, args.head_dim, args.eps, x);
    }
  });
}

void rope(const RopeArgs& args, const Batch& batch, const Worker& worker) {
  const int64_t half_dim = args.rotary_dim / 2;
  for_rows(batch.T, args.x.width, worker, [&](int64_t r) {
    const float* cos = args.cos + batch.positions[r] * half_dim;
    const float* sin = args.sin + batch.positions[r] * half_dim;
    for (int32_t h = 0; h < args.num_heads; ++h) {
      float* x = args.x.row(r) + static_cast<int64_t>(h) * args.head_dim;
      if (args.adjacent)
        rope_adjacent(x, cos, sin, half_dim);
      else
        rope_half(x, cos, sin, half_dim);
    }
  });
}

void act_mul(const ActMulArgs& args, const Batch& batch, const Worker& worker) {
  const int64_t width = args.out.width;
  for_rows(batch.T, 4 * width, worker, [&](int64_t r) {
    const float* gate = args.x.row(r);
    if (args.act == 0)
      act_mul_row(gate, gate + width, width, args.out.row(r), silu);
    else
      act_mul_row(gate, gate + width, width, args.out.row(r), gelu_tanh);
  });
}

void add(const AddArgs& args, const Batch& batch, const Worker& worker) {
  const int64_t width = args.x.width;
  for_rows(num_rows(args.rows, batch), width, worker, [&](int64_t r) {
    float* x = args.x.row(r);
    const float* y = args.y.row(r);
    for (int64_t i = 0; i < width; ++i) x[i] += y[i];
  });
}

void gather(const GatherArgs& args, const Batch& batch, const Worker& worker) {
  for_rows(batch.L, args.x.width, worker, [&](int64_t r) {
    std::memcpy(args.out.row(r), args.x.row(batch.logit_rows[r]), static_cast<size_t>(args.x.width) * sizeof(float));
  });
}

}  // namespace SAYFA_ISA
}  // namespace sayfa
