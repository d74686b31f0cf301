// The one thread pool: a fixed number of workers that run a list of jobs in order, together.
//
// Jobs are passed through a gate, one atomic word. A worker enters the job at the gate, takes chunks from the lanes until
// none is left, and leaves; the last one to leave opens the gate for the next job. A worker that the
// operating system has put aside outside a chunk is not waited for: the job closes without it, and it joins at whatever
// job is open when it runs again. So a busy neighbour on one core costs its share and no more, and parked workers may
// take their time to wake while the first thread has already begun.
//
// Between lists the workers sleep in the kernel (futex); inside one they spin for a bounded count and then sleep.
// Workers are not pinned: pinning would stop the kernel from moving one away from a busy core.
#pragma once

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "memory.h"
#include "sayfa.h"

namespace sayfa {

// One op bound to its arguments.
struct Job {
  void (*call)(const void* self, const Batch& batch, const Worker& worker);
  const void* self;
};

// Cores this process may use (affinity mask), at least 1.
int usable_cores();

class Pool {
 public:
  // Throws std::system_error if the system refuses a thread; those that were started are then gone again.
  explicit Pool(int count);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int count() const { return count_; }

  // Each worker gets at least this much scratch memory. Not during run.
  void reserve_scratch(size_t bytes);

  // Runs jobs[0..num_jobs) in order and returns when all are done. The calling thread is worker 0. With `stamps`
  // (num_jobs + 1 entries) writes the steady clock in ns at the start and at the end of each job.
  void run(const Job* jobs, int num_jobs, const Batch& batch, int64_t* stamps);

 private:
  struct alignas(128) Word {
    std::atomic<uint64_t> value{0};
  };

  void start(int id);
  void stop();
  void work(int id);
  bool leave(uint64_t& entered);
  uint64_t await_change(uint64_t seen, int spins);
  void publish(uint64_t gate);

  Word gate_;
  Word sleepers_;
  std::atomic<bool> stop_{false};
  const int count_;
  const int spins_;
  const std::unique_ptr<Lane[]> lanes_;
  const Job* jobs_ = nullptr;
  const Batch* batch_ = nullptr;
  int64_t* stamps_ = nullptr;
  uint32_t first_ = 0;
  uint32_t end_ = 0;
  std::mutex running_;
  std::vector<std::unique_ptr<Block>> scratch_;
  std::vector<std::thread> threads_;
};

}  // namespace sayfa
