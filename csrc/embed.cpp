// Rows of the embedding table, dequantized straight from the file's bytes.
#include "blocks.h"
#include "linear.h"
#include "shares.h"

namespace sayfa::SAYFA_ISA {

void embed(const EmbedArgs& a, const Batch& batch, const Worker& worker) {
  const auto type = static_cast<TensorType>(a.table_type);
  const int64_t bytes = row_bytes(type, a.width);
  for_shares(worker, batch.T, 1, [&](int64_t t, int64_t) {
    float* out = a.out.row(t);
    dequantize_row(type, static_cast<const uint8_t*>(a.table) + batch.token_ids[t] * bytes, a.width, out);
    if (a.scale != 1.0f)
      for (int64_t i = 0; i < a.width; ++i) out[i] *= a.scale;
  });
}

}  // namespace sayfa::SAYFA_ISA
