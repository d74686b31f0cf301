// Weight products: packed panels, prepared (quantized) rows, and the table of kernels that each instruction set fills.
//
// A weight [N, K] is a list of segments; a segment is a run of output columns with one format, packed in panels of 32
// columns (64 for bf16) by all of K in reading order. See pack.h for the bytes.
#pragma once

#include "sayfa.h"

namespace sayfa {

struct LinearTable {
  void (*embed)(const EmbedArgs&, const Batch&, const Worker&, Counter&);
};

#ifdef SAYFA_ISA
namespace SAYFA_ISA {
LinearTable linear_table();
}
#endif

}  // namespace sayfa
