// Chooses the instruction-set variant: the best one this machine runs, or the one asked for by name.
#include <cstring>

#include "kernels.h"

namespace sayfa {

#define SAYFA_DECLARE(isa) \
  namespace isa {          \
  Kernels kernels();      \
  }
SAYFA_DECLARE(plain)
SAYFA_DECLARE(avx2)
SAYFA_DECLARE(avx512)
SAYFA_DECLARE(avx512bf16)
#undef SAYFA_DECLARE

namespace {

#if defined(__x86_64__)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

bool runs_avx512bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

bool runs_plain() { return true; }

struct Variant {
  const char* name;
  Kernels (*kernels)();
  bool (*runs)();
};

const Variant variants[] = {
#ifdef SAYFA_HAVE_ISA_avx512bf16
    {"avx512bf16", avx512bf16::kernels, runs_avx512bf16},
#endif
#ifdef SAYFA_HAVE_ISA_avx512
    {"avx512", avx512::kernels, runs_avx512},
#endif
#ifdef SAYFA_HAVE_ISA_avx2
    {"avx2", avx2::kernels, runs_avx2},
#endif
    {"plain", plain::kernels, runs_plain},
};

}  // namespace

const Kernels* find_kernels(const char* name) {
  static Kernels filled[sizeof(variants) / sizeof(variants[0])];
  const bool any = name == nullptr || *name == 0;
  for (size_t i = 0; i < sizeof(variants) / sizeof(variants[0]); ++i) {
    if ((!any && std::strcmp(name, variants[i].name)) || !variants[i].runs()) continue;
    filled[i] = variants[i].kernels();  // called under the interpreter's lock
    return &filled[i];
  }
  return nullptr;
}

const char* const* compiled_isas() {
  static const char* names[sizeof(variants) / sizeof(variants[0]) + 1] = {};
  size_t i = 0;
  for (const Variant& variant : variants) names[i++] = variant.name;
  return names;
}

bool runnable(const char* name) { return find_kernels(name) != nullptr; }

}  // namespace sayfa
