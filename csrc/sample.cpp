// Logits → token and log-probabilities, one row at a time. The meaning is that of runner/draw.py, which is its
// reference:
//
//   1. NaN, +inf or nothing but -inf: token -1, and nothing else is written (a -inf alone is a masked id);
//   2. temperature below 1e-5: the largest logit, lowest id among equals;
//   3. else: keep the top_k largest (ties: lower ids); weights exp2((x - largest) * log2(e) / temperature);
//      drop weights below min_p of the largest; keep the fewest best that reach top_p of the sum over what top_k left;
//      walk the survivors in ascending id to the first whose cumulative weight exceeds uniform * their sum.
//   Log-probabilities are those of the logits as handed in. Rank is 1 + how many logits are larger.
//
// One pass finds the largest logit and the largest of each 64 strided ones ("peaks"); the k-th best peak is a border
// that leaves few candidates. Sums: float32 chains within a chunk, chunks in float64, in one fixed order.
#include <cfloat>
#include <cmath>

#include "ops.h"
#include "sample_select.h"
#include "shares.h"

namespace sayfa {
namespace SAYFA_ISA {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kLogprobFloor = -9999.0f;
constexpr int64_t kVectors = 64;          // of a chunk
constexpr int64_t kChunk = kVectors * W;  // logits
constexpr int64_t kMinPeaksPerEntry = 3;  // fewer peaks for each wanted entry: the border is not worth it

inline int64_t num_chunks(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }

class RowSampler {
 public:
  static size_t scratch_bytes(int64_t vocab) {
    const int64_t chunks = num_chunks(vocab), room = chunks * kChunk + W;
    return static_cast<size_t>(kChunk * 4 + chunks * W * 4 + chunks * 8 + 5 * room * 4 + 8 * 64);
  }

  RowSampler(int64_t vocab, uint8_t* memory) : vocab_(vocab), chunks_(num_chunks(vocab)) {
    const int64_t room = chunks_ * kChunk + W;
    tail_ = carve<float>(memory, kChunk);
    peaks_ = carve<float>(memory, chunks_ * W);
    sums_ = carve<double>(memory, chunks_);
    list_.value = carve<float>(memory, room);
    list_.weight = carve<float>(memory, room);
    list_.id = carve<int32_t>(memory, room);
    space_.value = carve<float>(memory, room);
    space_.weight = carve<float>(memory, room);
  }

  void run(const SampleArgs& args, int32_t r) {
    row_ = args.logits + r * args.stride;
    args.token[r] = -1;
    load_tail();
    if (!scan()) return;
    const int32_t top_k = args.top_k[r];
    const bool greedy = args.temperature[r] < kGreedyBelow || top_k == 1;
    scale_ = kLog2E / args.temperature[r];
    const int32_t token = greedy ? best_ : draw(top_k, args.top_p[r], args.min_p[r], args.uniform[r]);
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

  // ---------------------------------------------------------------------------------------------- candidates

  // Lists the ids with logits >= border. Weights are not set.
  void collect(float border) {
    list_.count = 0;
    const Vf least = vset(border);
    const Lanes first = lane_index(0);
    for (int64_t c = 0; c < chunks_; ++c) {
      if (mask_at_least(vload(peaks_ + c * W), least) == 0) continue;
      const float* x = chunk(c);
      for (int64_t v = 0; v < kVectors; ++v) {
        const Vf value = vload(x + v * W);
        const uint32_t mask = mask_at_least(value, least);
        if (mask == 0) continue;
        compress(mask, first + static_cast<int32_t>(c * kChunk + v * W), list_.id + list_.count);
        list_.count += compress(mask, value, list_.value + list_.count);
      }
    }
    list_.fill_up();
  }

  // Lists the k best ids.
  void collect_best(int64_t k) {
    const int64_t peaks = chunks_ * W;
    const double target = static_cast<double>(k);
    collect(k * kMinPeaksPerEntry > peaks ? -FLT_MAX : border_of(peaks_, nullptr, peaks, target, space_));
    if (list_.count <= k) return;
    keep_best(list_, border_of(list_.value, nullptr, list_.count, target, space_), target, false);
  }

  // Lists what weighs at least 2^reach, with weights.
  void collect_reach(float reach) {
    const float border = largest_ + reach / scale_;
    collect(border < -FLT_MAX ? -FLT_MAX : border);
    weigh();
  }

  Vf weight(Vf x) const { return vexp2((x - vset(largest_)) * vset(scale_)); }

  void weigh() {
    for (int64_t i = 0; i < list_.count; i += W) vstore(list_.weight + i, weight(vload(list_.value + i)));
    list_.fill_up();
  }

  double list_weight() const { return sum_of<false>(list_.value, list_.weight, list_.count, -FLT_MAX); }

  void keep_min_p(float min_p) {
    if (min_p > 0) list_.filter([&](int64_t i) { return mask_at_least(vload(list_.weight + i), vset(min_p)); });
  }

  void keep_top_p(double target) {
    keep_best(list_, border_of(list_.value, list_.weight, list_.count, target, space_), target, true);
  }

  // Sum of all weights of the row; sums_ keeps those of the chunks.
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

  // ---------------------------------------------------------------------------------------------- the draw

  int32_t draw(int32_t top_k, float top_p, float min_p, double uniform) {
    if (top_k > 0 && top_k < vocab_) {
      collect_best(top_k);
      weigh();
      const double target = list_weight() * static_cast<double>(top_p);
      keep_min_p(min_p);
      if (top_p < 1) keep_top_p(target);
      return draw_listed(uniform);
    }
    if (min_p <= 0 && top_p >= 1) return draw_all(uniform);
    // Only ids with a weight of at least min_p can survive. Rounding: a little more is listed, then weighed.
    const float reach = min_p > 0 ? std::log2(min_p) - 0.01f : -HUGE_VALF;
    if (top_p >= 1) {
      collect_reach(reach);
      keep_min_p(min_p);
      return draw_listed(uniform);
    }
    const double target = sum_weights() * static_cast<double>(top_p);
    constexpr float kReaches[] = {-10.0f, -20.0f, -HUGE_VALF};
    for (const float try_reach : kReaches) {
      const bool all = try_reach <= reach;
      collect_reach(all ? reach : try_reach);
      if (all || list_weight() >= target * 1.000001) break;
    }
    keep_min_p(min_p);
    keep_top_p(target);
    return draw_listed(uniform);
  }

  // Walks the list to the first candidate whose cumulative weight exceeds its share; the last one with weight if
  // rounding leaves none.
  int32_t draw_listed(double uniform) const {
    const double target = uniform * list_weight();
    double sum = 0;
    int32_t last = best_;
    for (int64_t i = 0; i < list_.count; ++i) {
      sum += list_.weight[i];
      if (list_.weight[i] > 0) last = list_.id[i];
      if (sum > target) break;
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

  // ---------------------------------------------------------------------------------------------- log-probabilities

  // Log-probabilities of the chosen id and of the best ones, and its rank.
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
    collect_best(wanted);
    if (list_.count < wanted) add_masked(wanted);
    sort_all(list_);
    const int64_t start = r * static_cast<int64_t>(args.top_stride);
    for (int64_t i = 0; i < wanted; ++i) {
      args.top_ids[start + i] = list_.id[i];
      args.top_logprobs[start + i] = logprob(list_.value[i], normaliser);
    }
  }

  // Fewer ids than wanted have a finite logit: the masked ones with the lowest ids follow.
  void add_masked(int64_t wanted) {
    for (int64_t id = 0; id < vocab_ && list_.count < wanted; ++id) {
      if (row_[id] > -HUGE_VALF) continue;
      list_.value[list_.count] = -HUGE_VALF;
      list_.id[list_.count++] = static_cast<int32_t>(id);
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
  Candidates list_{};
  Shrinking space_{};
};

}  // namespace

size_t sample_scratch_bytes(int32_t vocab) { return RowSampler::scratch_bytes(vocab); }

void sample(const SampleArgs& args, const Worker& worker) {
  RowSampler sampler(args.vocab, static_cast<uint8_t*>(worker.scratch));
  for_shares(worker, args.rows, 1, [&](int64_t r, int64_t) { sampler.run(args, static_cast<int32_t>(r)); });
}

}  // namespace SAYFA_ISA
}  // namespace sayfa
