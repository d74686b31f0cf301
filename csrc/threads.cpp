#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <csignal>
#include <string>
#include <system_error>

namespace sayfa {

namespace {

// The gate: index of the open job in the high half (the half that sleepers wait on), and below it
//   bits 0-29 workers inside, bit 30 drained (no more may enter), bit 31 idle.
constexpr uint64_t kInside = 1;
constexpr uint64_t kDrained = uint64_t{1} << 30;
constexpr uint64_t kInsideMask = kDrained - kInside;
constexpr uint64_t kIdle = uint64_t{1} << 31;
constexpr int kMaxWorkers = 0x7fff;

// About 50 µs of pauses: longer than any fair wait inside a step, far shorter than a time slice.
constexpr int kSpins = 2000;
constexpr int kSpinsCrowded = 20;  // more workers than cores: the one waited for needs this core

uint32_t index_of(uint64_t gate) { return static_cast<uint32_t>(gate >> 32); }
uint64_t gate_at(uint32_t index, uint64_t low) { return (static_cast<uint64_t>(index) << 32) | low; }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(const void* address, uint32_t seen) {
  syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(const void* address) { syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// The high half of a gate word, on a little-endian machine (others are refused by the build).
const void* high_half(const std::atomic<uint64_t>& word) { return reinterpret_cast<const uint32_t*>(&word) + 1; }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// While it lives, threads are started with all signals blocked: those belong to the interpreter's main thread.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

int usable_cores() {
  // A fixed set holds 1,024 cores; larger machines need a larger one.
  for (int capacity = 1024; capacity <= 1 << 16; capacity *= 4) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    CPU_ZERO_S(bytes, set);
    const int error = sched_getaffinity(0, bytes, set);
    const int cores = error ? 0 : CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
    if (cores > 0) return cores;
  }
  return 1;
}

Pool::Pool(int count)
    : count_(count < 1 ? 1 : count > kMaxWorkers ? kMaxWorkers : count),
      spins_(count_ > usable_cores() ? kSpinsCrowded : kSpins),
      lanes_(new Lane[static_cast<size_t>(count_)]) {
  gate_.value.store(gate_at(0, kIdle));
  for (int i = 0; i < count_; ++i) scratch_.push_back(std::make_unique<Block>(1 << 16));
  threads_.reserve(static_cast<size_t>(count_));
  try {
    const SignalsBlocked blocked;
    for (int i = 1; i < count_; ++i) start(i);
  } catch (...) {
    stop();  // a thread that nobody has joined would end the process
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::start(int id) {
  try {
    threads_.emplace_back([this, id] { work(id); });
  } catch (const std::system_error& error) {
    const std::string which = "thread " + std::to_string(id + 1) + " of " + std::to_string(count_) + " cannot be started";
    throw std::system_error(error.code(), which);
  }
  pthread_setname_np(threads_.back().native_handle(), "sayfa-worker");
}

void Pool::stop() {
  stop_.store(true);
  publish(gate_at(index_of(gate_.value.load()) + 1, kIdle));
  for (std::thread& thread : threads_) thread.join();
}

void Pool::reserve_scratch(size_t bytes) {
  for (auto& block : scratch_)
    if (block->bytes() < bytes) block = std::make_unique<Block>(bytes);
}

void Pool::run(const Job* jobs, int num_jobs, const Batch& batch, int64_t* stamps) {
  if (num_jobs <= 0) return;
  std::lock_guard<std::mutex> lock(running_);
  jobs_ = jobs;
  batch_ = &batch;
  stamps_ = stamps;
  first_ = index_of(gate_.value.load(std::memory_order_relaxed)) + 1;
  end_ = first_ + static_cast<uint32_t>(num_jobs);
  if (stamps) stamps[0] = now_ns();
  publish(gate_at(first_, 0));
  work(0);
}

// Opens the gate and wakes whoever sleeps at it. Sequentially consistent with await_change: either the sleeper sees the
// new gate, or it is counted here.
void Pool::publish(uint64_t gate) {
  gate_.value.store(gate, std::memory_order_seq_cst);
  if (sleepers_.value.load(std::memory_order_seq_cst)) futex_wake_all(high_half(gate_.value));
}

// Waits until the gate's index is another than in `seen`; returns the gate.
uint64_t Pool::await_change(uint64_t seen, int spins) {
  const uint32_t index = index_of(seen);
  for (int i = 0; i < spins; ++i) {
    const uint64_t gate = gate_.value.load(std::memory_order_acquire);
    if (index_of(gate) != index) return gate;
    pause();
  }
  sleepers_.value.fetch_add(1, std::memory_order_seq_cst);
  uint64_t gate;
  while (index_of(gate = gate_.value.load(std::memory_order_seq_cst)) == index)
    futex_wait(high_half(gate_.value), index);
  sleepers_.value.fetch_sub(1, std::memory_order_relaxed);
  return gate;
}

// Leaves the job that was entered at gate `entered`. The last one out opens the next job and is inside it already: true.
// Others wait for the next job: false. `entered` becomes the gate as it is then.
bool Pool::leave(uint64_t& entered) {
  uint64_t gate = gate_.value.load(std::memory_order_relaxed);
  uint64_t after;
  do {
    after = (gate - kInside) | kDrained;
  } while (!gate_.value.compare_exchange_weak(gate, after, std::memory_order_acq_rel, std::memory_order_relaxed));
  if (after & kInsideMask) {
    entered = await_change(entered, spins_);
    return false;
  }

  const uint32_t next = index_of(entered) + 1;
  if (stamps_) stamps_[next - first_] = now_ns();
  const bool more = next != end_;  // read before the gate opens: after it the caller may have begun another run
  const uint64_t opened = more ? gate_at(next, kInside) : gate_at(next, kIdle);
  publish(opened);
  entered = opened;
  return more;
}

void Pool::work(int id) {
  Worker worker{id, count_, nullptr, 0, lanes_.get(), 0};
  uint64_t gate = gate_.value.load(std::memory_order_acquire);
  bool inside = false;  // this worker opened the job and is counted already
  for (;;) {
    if (gate & kIdle) {
      if (id == 0 || stop_.load(std::memory_order_relaxed)) return;
      gate = await_change(gate, 0);
      continue;
    }
    if (!inside) {
      if (gate & kDrained) {
        gate = await_change(gate, spins_);
        continue;
      }
      if (!gate_.value.compare_exchange_weak(gate, gate + kInside, std::memory_order_acq_rel,
                                             std::memory_order_acquire))
        continue;
    }
    worker.job = index_of(gate);
    const Job& job = jobs_[worker.job - first_];
    worker.scratch = scratch_[static_cast<size_t>(id)]->data();
    worker.scratch_bytes = scratch_[static_cast<size_t>(id)]->bytes();
    job.call(job.self, *batch_, worker);
    inside = leave(gate);
  }
}

}  // namespace sayfa
