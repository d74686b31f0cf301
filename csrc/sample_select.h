// Partial selection for sampling, by bisection on the value instead of sorting: the border that the k best reach, or
// the border above which weights sum to a share. One pass of whole vectors for each step, over a list that shrinks.
//
// Order of candidates: larger value first, lower id first among equals; lists are in ascending id. Every list is
// followed by at least one vector of room, and is filled up with `value` -inf and `weight` 0 to a whole number of
// vectors.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd_math.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

constexpr int64_t kSumVectors = 64;  // float32 chains run over this many vectors, then go to float64

// Lanes of `mask`, moved together, to out; returns how many. Writes a whole vector.
inline int64_t compress(uint32_t mask, Vf x, float* out) {
#if defined(__AVX512F__)
  vstore(out, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), x));
  return __builtin_popcount(mask);
#else
  float lane[W];
  vstore(lane, x);
  int64_t count = 0;
  for (; mask; mask &= mask - 1) out[count++] = lane[__builtin_ctz(mask)];
  return count;
#endif
}

inline int64_t compress(uint32_t mask, Lanes x, int32_t* out) {
  return compress(mask, from_bits(x), reinterpret_cast<float*>(out));
}

// Candidates of one row, as columns.
struct Candidates {
  float* value;
  float* weight;
  int32_t* id;
  int64_t count;

  void fill_up() {
    for (int64_t i = count; i < count + W; ++i) value[i] = -HUGE_VALF, weight[i] = 0;
  }

  // Keeps the lanes that keep(first index) returns as a mask.
  template <class Keep>
  void filter(Keep keep) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += W) {
      uint32_t mask = keep(i);
      if (count - i < W) mask &= (1u << (count - i)) - 1;
      const Vf values = vload(value + i), weights = vload(weight + i);
      Lanes ids;
      std::memcpy(&ids, id + i, sizeof ids);
      compress(mask, values, value + kept);
      compress(mask, ids, id + kept);
      kept += compress(mask, weights, weight + kept);
    }
    count = kept;
    fill_up();
  }
};

// Sum of the weights whose value is at least (Above: more than) t; without weights, how many there are.
template <bool Above>
double sum_of(const float* value, const float* weight, int64_t count, float t) {
  const Vf border = vset(t);
  double total = 0;
  for (int64_t start = 0; start < count; start += kSumVectors * W) {
    const int64_t end = count < start + kSumVectors * W ? count : start + kSumVectors * W;
    if (weight == nullptr) {
      int64_t lanes = 0;
      for (int64_t i = start; i < end; i += W) {
        const Vf x = vload(value + i);
        lanes += __builtin_popcount(Above ? mask_more(x, border) : mask_at_least(x, border));
      }
      total += static_cast<double>(lanes);
      continue;
    }
    const auto counted = [&](int64_t i) {
      const Vf x = vload(value + i);
      const Lanes inside = Above ? (Lanes)(x > border) : (Lanes)(x >= border);
      return from_bits(bits_of(vload(weight + i)) & inside);
    };
    // Two chains by name: an array that is indexed by i would lie in memory.
    Vf even = vzero(), odd = vzero();
    int64_t i = start;
    for (; i + W < end; i += 2 * W) {
      even = even + counted(i);
      odd = odd + counted(i + W);
    }
    if (i < end) even = even + counted(i);
    total += hsum(even + odd);
  }
  return total;
}

// Floats in their order as integers, and back.
inline int64_t order_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float at_order(int64_t order) {
  const int32_t key = static_cast<int32_t>(order), bits = key ^ ((key >> 31) & 0x7fffffff);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Work space of `border_of`, as long as the list.
struct Shrinking {
  float* value;
  float* weight;
};

// The largest t so that the values >= t weigh at least `target` (without weights: number at least `target`). Where all
// together do not reach it: -FLT_MAX or the least value. The list holds no NaN; -inf counts for nothing.
inline float border_of(const float* value, const float* weight, int64_t count, double target, Shrinking space) {
  constexpr int kStepsPerRound = 4;
  constexpr int64_t kShort = 4 * W;  // not worth shrinking further
  int64_t lo = order_of(-3.402823466e38f), hi = order_of(HUGE_VALF);  // reached (or as far as it goes); not reached
  double above = 0;                                                    // weight of what has left the list upwards
  while (hi - lo > 1) {
    for (int step = 0; step < (count > kShort ? kStepsPerRound : 40) && hi - lo > 1; ++step) {
      const int64_t middle = lo + (hi - lo) / 2;
      (above + sum_of<false>(value, weight, count, at_order(middle)) >= target ? lo : hi) = middle;
    }
    if (hi - lo <= 1) break;
    const float least = at_order(lo), most = at_order(hi);
    above += sum_of<false>(value, weight, count, most);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += W) {
      const Vf x = vload(value + i), w = weight ? vload(weight + i) : vzero();
      const uint32_t mask = mask_at_least(x, vset(least)) & ~mask_at_least(x, vset(most));
      if (mask == 0) continue;
      compress(mask, x, space.value + kept);
      if (weight) compress(mask, w, space.weight + kept);
      kept += __builtin_popcount(mask);
    }
    for (int64_t i = kept; i < kept + W; ++i) space.value[i] = -HUGE_VALF, space.weight[i] = 0;
    value = space.value;
    if (weight) weight = space.weight;
    count = kept;
  }
  return at_order(lo);
}

// Keeps the best candidates down to `border`; of those that equal it only as many, lower ids first, as it takes for the
// sum of weights (by_weight) or the number to reach `target`.
inline void keep_best(Candidates& list, float border, double target, bool by_weight) {
  double sum = sum_of<true>(list.value, by_weight ? list.weight : nullptr, list.count, border);
  const Vf edge = vset(border);
  list.filter([&](int64_t i) {
    const Vf x = vload(list.value + i);
    uint32_t keep = mask_more(x, edge);
    for (uint32_t equal = mask_at_least(x, edge) & ~keep; equal; equal &= equal - 1) {
      if (sum >= target) break;
      const int lane = __builtin_ctz(equal);
      sum += by_weight ? list.weight[i + lane] : 1;
      keep |= 1u << lane;
    }
    return keep;
  });
}

inline bool before(const Candidates& list, int64_t a, int64_t b) {
  return list.value[a] > list.value[b] || (list.value[a] == list.value[b] && list.id[a] < list.id[b]);
}

inline void exchange(Candidates& list, int64_t a, int64_t b) {
  const float value = list.value[a];
  const int32_t id = list.id[a];
  list.value[a] = list.value[b], list.id[a] = list.id[b];
  list.value[b] = value, list.id[b] = id;
}

// Best first (heap sort; weights are left behind).
inline void sort_all(Candidates& list) {
  auto sink = [&](int64_t root, int64_t count) {
    for (int64_t child; (child = 2 * root + 1) < count; root = child) {
      if (child + 1 < count && before(list, child, child + 1)) ++child;
      if (!before(list, root, child)) return;
      exchange(list, root, child);
    }
  };
  for (int64_t i = list.count / 2; i-- > 0;) sink(i, list.count);
  for (int64_t end = list.count; end-- > 1;) {
    exchange(list, 0, end);
    sink(0, end);
  }
}

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
