// The functions of one instruction-set variant, and the choice among variants. table.cpp fills one record per variant;
// dispatch.cpp chooses.
#pragma once

#include "linear.h"
#include "sayfa.h"

namespace sayfa {

struct Kernels {
  const char* name;
  OpTable ops;
  LinearTable linear;
};

// The variant called `name`, or the best one this machine runs when name is null or empty; null: unknown or not runnable.
const Kernels* find_kernels(const char* name);

// Names of the compiled variants in order of preference, a null at the end.
const char* const* compiled_isas();

// Whether this machine can run the variant called `name`.
bool runnable(const char* name);

}  // namespace sayfa
