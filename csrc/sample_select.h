// Partial selection for sampling: the k best of a list, and the best whose weights reach a share, without sorting it.
//
// Order of entries: larger value first, lower id first among equals. It is total, so every result is unique.
#pragma once

#include <cstdint>

#include "simd_math.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

struct Entry {
  float value;   // the logit
  float weight;  // its probability, not normalised
  int32_t id;
};

inline bool before(const Entry& a, const Entry& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

inline void swap(Entry& a, Entry& b) {
  const Entry kept = a;
  a = b;
  b = kept;
}

inline void insertion_sort(Entry* entries, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const Entry entry = entries[i];
    int64_t j = i;
    for (; j > 0 && before(entry, entries[j - 1]); --j) entries[j] = entries[j - 1];
    entries[j] = entry;
  }
}

// Moves what comes before some middling entry to the front; returns that entry's place. count >= 3.
inline int64_t partition(Entry* entries, int64_t count) {
  Entry &low = entries[0], &middle = entries[count / 2], &high = entries[count - 1];
  if (before(middle, low)) swap(middle, low);
  if (before(high, low)) swap(high, low);
  if (before(middle, high)) swap(middle, high);  // the median of the three now stands last
  const Entry pivot = high;
  int64_t place = 0;
  for (int64_t i = 0; i < count - 1; ++i) {
    const Entry entry = entries[i];
    entries[i] = entries[place];
    entries[place] = entry;
    place += before(entry, pivot);
  }
  swap(entries[place], entries[count - 1]);
  return place;
}

constexpr int64_t kSmall = 24;  // shorter lists are sorted outright

// The last of the k best entries; entries are reordered so that the k best come first. 1 <= k <= count.
inline Entry select_best(Entry* entries, int64_t count, int64_t k) {
  int64_t lo = 0, hi = count;
  while (hi - lo > kSmall) {
    const int64_t place = lo + partition(entries + lo, hi - lo);
    if (place == k - 1) return entries[place];
    if (place > k - 1)
      hi = place;
    else
      lo = place + 1;
  }
  insertion_sort(entries + lo, hi - lo);
  return entries[k - 1];
}

// The last of the fewest best entries whose weights reach `target`, or of all if they do not. Reorders. count >= 1.
inline Entry select_share(Entry* entries, int64_t count, double target) {
  int64_t lo = 0, hi = count;
  double sum = 0;
  while (hi - lo > kSmall) {
    const int64_t place = lo + partition(entries + lo, hi - lo);
    double front = sum;
    for (int64_t i = lo; i < place; ++i) front += entries[i].weight;
    if (front >= target) {
      hi = place;
      continue;
    }
    sum = front + entries[place].weight;
    if (sum >= target) return entries[place];
    lo = place + 1;
  }
  insertion_sort(entries + lo, hi - lo);
  for (int64_t i = lo; i < hi; ++i) {
    sum += entries[i].weight;
    if (sum >= target) return entries[i];
  }
  return entries[hi - 1];  // not reached, or only by a rounding of the sum before
}

// Sorts the best k entries to the front, best first.
inline void sort_best(Entry* entries, int64_t count, int64_t k) {
  if (k < count) select_best(entries, count, k);
  for (int64_t lo = 0; lo < k;) {
    // Take them in runs: the best kSmall of what is left, sorted. k is a handful.
    const int64_t run = k - lo < kSmall ? k - lo : kSmall;
    if (lo + run < k) select_best(entries + lo, k - lo, run);
    insertion_sort(entries + lo, run);
    lo += run;
  }
}

// Keeps the entries up to and including `last`, in their order; returns how many.
inline int64_t keep_until(Entry* entries, int64_t count, const Entry& last) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    entries[kept] = entries[i];
    kept += !before(last, entries[i]);
  }
  return kept;
}

}  // namespace
}  // namespace SAYFA_ISA
}  // namespace sayfa
