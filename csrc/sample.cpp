// Logits → token and log-probabilities, one row at a time. The meaning is that of runner/draw.py, which is its reference:
//
//   1. NaN, +inf or nothing but -inf: token -1, and nothing else is written (a -inf alone is a masked id);
//   2. temperature below 1e-5: the largest logit, lowest id among equals;
//   3. else: keep the top_k largest (ties: lower ids); weights exp2((x - largest) * log2(e) / temperature);
//      drop weights below min_p of the largest; keep the fewest best that reach top_p of the sum over what top_k left;
//      walk the survivors in ascending id to the first whose cumulative weight exceeds uniform * their sum.
//   Log-probabilities are those of the logits as handed in. Rank is 1 + how many logits are larger.
//
// One pass finds the largest logit and the largest of each 64 strided ones ("peaks"); the k-th best peak is a border that
// leaves few candidates. Sums: float32 chains within a chunk, chunks and survivors in float64, in one fixed order.
#include <cfloat>
#include <cmath>

#include "ops.h"
#include "sample_select.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kLogprobFloor = -9999.0f;
constexpr int64_t kVectors = 64;           // of a chunk
constexpr int64_t kChunk = kVectors * W;   // logits
constexpr int64_t kMinPeaksPerEntry = 3;   // fewer peaks for each wanted entry: the border is not worth it

inline int64_t num_chunks(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }

class RowSampler {
 public:
  static size_t scratch_bytes(int64_t vocab) {
    const int64_t padded = num_chunks(vocab) * kChunk;
    return static_cast<size_t>(2 * padded * static_cast<int64_t>(sizeof(Entry)) + 2 * (padded / kVectors) * 12 +
                               num_chunks(vocab) * 8 + 64 * 8 + kChunk * 4);
  }

  RowSampler(int64_t vocab, uint8_t* memory) : vocab_(vocab), chunks_(num_chunks(vocab)) {
    const int64_t padded = chunks_ * kChunk;
    tail_ = carve<float>(memory, kChunk);
    peaks_ = carve<float>(memory, padded / kVectors);
    sums_ = carve<double>(memory, chunks_);
    peak_entries_ = carve<Entry>(memory, padded / kVectors);
    entries_ = carve<Entry>(memory, padded);
    copy_ = carve<Entry>(memory, padded);
  }

  void run(const SampleArgs& args, int32_t r) {
    row_ = args.logits + r * args.stride;
    args.token[r] = -1;
    load_tail();
    if (!scan()) return;
    const int32_t top_k = args.top_k[r];
    const bool greedy = args.temperature[r] < kGreedyBelow || top_k == 1;
    const int32_t token = greedy ? best_ : draw(args.temperature[r], top_k, args.top_p[r], args.min_p[r], args.uniform[r]);
    args.token[r] = token;
    if (args.num_top[r] >= 0) score(args, r, token);
  }

 private:
  template <class T>
  static T* carve(uint8_t*& memory, int64_t count) {
    T* start = reinterpret_cast<T*>(memory);
    memory += (sizeof(T) * static_cast<size_t>(count) + 63) / 64 * 64;
    return start;
  }

  // The last chunk is read from a copy that is filled up with -inf.
  void load_tail() {
    const int64_t start = (chunks_ - 1) * kChunk, rest = vocab_ - start;
    std::memcpy(tail_, row_ + start, static_cast<size_t>(rest) * sizeof(float));
    for (int64_t i = rest; i < kChunk; ++i) tail_[i] = -HUGE_VALF;
  }

  const float* chunk(int64_t c) const { return c + 1 == chunks_ ? tail_ : row_ + c * kChunk; }

  // Largest logit, its first id, and the peaks. False if the row has no usable distribution.
  bool scan() {
    Vf bad[2] = {};
    int64_t best_chunk = 0;
    largest_ = -HUGE_VALF;
    for (int64_t c = 0; c < chunks_; ++c) {
      const float* x = chunk(c);
      Vf peak[2] = {vset(-HUGE_VALF), vset(-HUGE_VALF)};
      for (int64_t v = 0; v < kVectors; v += 2)
        for (int i = 0; i < 2; ++i) {
          const Vf value = vload(x + (v + i) * W);
          // -inf becomes finite, NaN and +inf do not: they times 0 are NaN.
          bad[i] = vfma(vmax(vset(-FLT_MAX), value), vzero(), bad[i]);
          peak[i] = vmax(peak[i], value);
        }
      const Vf both = vmax(peak[0], peak[1]);
      vstore(peaks_ + c * W, both);
      const float top = hmax(both);
      if (top > largest_) largest_ = top, best_chunk = c;
    }
    if (!(hsum(bad[0] + bad[1]) == 0) || largest_ == -HUGE_VALF) return false;
    const float* x = chunk(best_chunk);
    int64_t i = 0;
    while (x[i] != largest_) ++i;
    best_ = static_cast<int32_t>(best_chunk * kChunk + i);
    return true;
  }

  // Entries with logits >= border, in ascending id, into `out`; weights are left unset.
  int64_t collect(float border, Entry* out) const {
    int64_t count = 0;
    const Vf least = vset(border);
    for (int64_t c = 0; c < chunks_; ++c) {
      if (!any_peak(c, least)) continue;
      const float* x = chunk(c);
      for (int64_t v = 0; v < kVectors; ++v)
        for (uint32_t mask = mask_at_least(vload(x + v * W), least); mask; mask &= mask - 1) {
          const int64_t i = v * W + __builtin_ctz(mask);
          out[count++] = {x[i], 0, static_cast<int32_t>(c * kChunk + i)};
        }
    }
    return count;
  }

  bool any_peak(int64_t c, Vf least) const { return mask_at_least(vload(peaks_ + c * W), least) != 0; }

  // A border that at least k logits reach, and not many more.
  float border_of(int64_t k) {
    const int64_t peaks = chunks_ * W;
    if (k * kMinPeaksPerEntry > peaks) return -FLT_MAX;
    for (int64_t i = 0; i < peaks; ++i) peak_entries_[i] = {peaks_[i], 0, static_cast<int32_t>(i)};
    const float border = select_best(peak_entries_, peaks, k).value;
    return border < -FLT_MAX ? -FLT_MAX : border;
  }

  void weigh(Entry* entries, int64_t count) const {
    for (int64_t i = 0; i < count; i += W) {
      alignas(64) float x[W] = {};
      const int64_t step = count - i < W ? count - i : W;
      for (int64_t j = 0; j < step; ++j) x[j] = entries[i + j].value;
      vstore(x, weight(vload(x)));
      for (int64_t j = 0; j < step; ++j) entries[i + j].weight = x[j];
    }
  }

  Vf weight(Vf x) const { return vexp2((x - vset(largest_)) * vset(scale_)); }

  // Sum of all weights; sums_ keeps those of the chunks.
  double sum_weights() {
    double total = 0;
    for (int64_t c = 0; c < chunks_; ++c) {
      const float* x = chunk(c);
      Vf chain[4] = {};
      for (int64_t v = 0; v < kVectors; v += 4)
        for (int i = 0; i < 4; ++i) chain[i] = chain[i] + weight(vload(x + (v + i) * W));
      sums_[c] = hsum((chain[0] + chain[1]) + (chain[2] + chain[3]));
      total += sums_[c];
    }
    return total;
  }

  int32_t draw(float temperature, int32_t top_k, float top_p, float min_p, double uniform) {
    scale_ = kLog2E / temperature;
    if (top_k > 0 && top_k < vocab_) return draw_best(top_k, top_p, min_p, uniform);
    if (min_p <= 0 && top_p >= 1) return draw_all(uniform);
    // Only ids with a weight of at least min_p can survive. Rounding: a little more is collected, then weighed.
    const float reach = min_p > 0 ? std::log2(min_p) - 0.01f : -HUGE_VALF;
    int64_t count = 0;
    if (top_p >= 1) {
      count = collect_reach(reach);
      return draw_entries(keep_min_p(count, min_p), uniform);
    }
    const double target = sum_weights() * static_cast<double>(top_p);
    constexpr float kReaches[] = {-10.0f, -20.0f, -HUGE_VALF};
    for (const float try_reach : kReaches) {
      const bool all = try_reach <= reach;
      count = keep_min_p(collect_reach(all ? reach : try_reach), min_p);
      double sum = 0;
      for (int64_t i = 0; i < count && !all; ++i) sum += entries_[i].weight;
      if (all || sum >= target * 1.000001) break;
    }
    return draw_entries(keep_top_p(count, target), uniform);
  }

  // Collects what weighs at least 2^reach.
  int64_t collect_reach(float reach) {
    const float border = largest_ + reach / scale_;
    const int64_t count = collect(border < -FLT_MAX ? -FLT_MAX : border, entries_);
    weigh(entries_, count);
    return count;
  }

  int64_t keep_min_p(int64_t count, float min_p) {
    if (min_p <= 0) return count;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      entries_[kept] = entries_[i];
      kept += entries_[i].weight >= min_p;
    }
    return kept;
  }

  int64_t keep_top_p(int64_t count, double target) {
    std::memcpy(copy_, entries_, static_cast<size_t>(count) * sizeof(Entry));
    return keep_until(entries_, count, select_share(copy_, count, target));
  }

  int32_t draw_best(int32_t top_k, float top_p, float min_p, double uniform) {
    int64_t count = collect(border_of(top_k), entries_);
    if (count > top_k) {
      std::memcpy(copy_, entries_, static_cast<size_t>(count) * sizeof(Entry));
      count = keep_until(entries_, count, select_best(copy_, count, top_k));
    }
    weigh(entries_, count);
    double total = 0;
    for (int64_t i = 0; i < count; ++i) total += entries_[i].weight;
    count = keep_min_p(count, min_p);
    if (top_p < 1) count = keep_top_p(count, total * static_cast<double>(top_p));
    return draw_entries(count, uniform);
  }

  int32_t draw_entries(int64_t count, double uniform) const {
    double total = 0, sum = 0;
    for (int64_t i = 0; i < count; ++i) total += entries_[i].weight;
    int32_t last = best_;
    for (int64_t i = 0; i < count; ++i) {
      sum += entries_[i].weight;
      if (entries_[i].weight > 0) last = entries_[i].id;
      if (sum > uniform * total) break;
    }
    return last;
  }

  int32_t draw_all(double uniform) {
    const double target = uniform * sum_weights();
    double sum = 0;
    int64_t c = 0, last_chunk = best_ / kChunk;
    for (; c < chunks_; ++c) {
      if (sums_[c] > 0) last_chunk = c;
      if (sum + sums_[c] > target) break;
      sum += sums_[c];
    }
    if (c == chunks_) {
      c = last_chunk;  // rounding left nothing above the target: the last chunk with weight
      sum -= sums_[c];
    }
    // Inside the chunk one by one. Its own sum was rounded another way, so the last with weight is the way out.
    const float* x = chunk(c);
    int32_t last = best_;
    for (int64_t v = 0; v < kVectors; ++v) {
      alignas(64) float weights[W];
      vstore(weights, weight(vload(x + v * W)));
      for (int i = 0; i < W; ++i) {
        sum += weights[i];
        if (weights[i] > 0) last = static_cast<int32_t>(c * kChunk + v * W + i);
        if (sum > target) return last;
      }
    }
    return last;
  }

  // Log-probabilities of the chosen id and of the best ones.
  void score(const SampleArgs& args, int32_t r, int32_t token) {
    scale_ = kLog2E;
    const double normaliser = std::log(sum_weights()) + static_cast<double>(largest_);
    args.logprob[r] = logprob(row_[token], normaliser);
    int32_t larger = 0;
    const Vf chosen = vset(row_[token]);
    for (int64_t c = 0; c < chunks_; ++c) {
      if (mask_more(vload(peaks_ + c * W), chosen) == 0) continue;
      const float* x = chunk(c);
      for (int64_t v = 0; v < kVectors; ++v) larger += __builtin_popcount(mask_more(vload(x + v * W), chosen));
    }
    args.rank[r] = larger + 1;
    const int64_t wanted = args.num_top[r] < vocab_ ? args.num_top[r] : vocab_;
    if (wanted == 0) return;
    // -inf logits may be among the wanted, so all of them if the border says so.
    const float border = border_of(wanted);
    const int64_t count = collect(border <= -FLT_MAX ? -HUGE_VALF : border, entries_);
    int64_t real = 0;
    for (int64_t i = 0; i < count; ++i) real += entries_[i].id < vocab_;
    sort_best(entries_, real, wanted < real ? wanted : real);
    for (int64_t i = 0; i < wanted; ++i) {
      args.top_ids[r * static_cast<int64_t>(args.top_stride) + i] = entries_[i].id;
      args.top_logprobs[r * static_cast<int64_t>(args.top_stride) + i] = logprob(entries_[i].value, normaliser);
    }
  }

  static float logprob(float logit, double normaliser) {
    const double value = static_cast<double>(logit) - normaliser;
    return value > kLogprobFloor ? static_cast<float>(value) : kLogprobFloor;
  }

  const int64_t vocab_, chunks_;
  const float* row_ = nullptr;
  float largest_ = 0;
  float scale_ = 0;  // log2(e) / temperature
  int32_t best_ = 0;
  float* tail_;
  float* peaks_;
  double* sums_;
  Entry* peak_entries_;
  Entry* entries_;
  Entry* copy_;
};

}  // namespace

size_t sample_scratch_bytes(int32_t vocab) { return RowSampler::scratch_bytes(vocab); }

void sample(const SampleArgs& args, const Worker& worker, Counter& counter) {
  RowSampler sampler(args.vocab, static_cast<uint8_t*>(worker.scratch));
  for (int64_t r = counter.fetch_add(1, std::memory_order_relaxed); r < args.rows;
       r = counter.fetch_add(1, std::memory_order_relaxed))
    sampler.run(args, static_cast<int32_t>(r));
}

}  // namespace SAYFA_ISA
}  // namespace sayfa
