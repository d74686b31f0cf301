// The table of the weight products of one instruction-set variant.
#include "linear.h"

namespace sayfa::SAYFA_ISA {

LinearTable linear_table() { return {nullptr}; }

}  // namespace sayfa::SAYFA_ISA
