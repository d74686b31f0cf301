// The pool without Python: every chunk of every job is done exactly once, jobs never overlap, whatever the number of workers.
// Run by tests/native/test_threads.py; prints nothing and returns 0 when all is well.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../shares.h"
#include "../threads.h"

using namespace sayfa;

namespace {

struct Load {
  int64_t chunks;
  int work;
  std::atomic<int64_t>* done;       // chunks of this job that are done
  const std::atomic<int64_t>* before;  // of the job before, and how many it has
  int64_t before_chunks;
};

std::atomic<int> failures{0};

void call(const void* self, const Batch&, const Worker& worker) {
  const Load& load = *static_cast<const Load*>(self);
  if (load.before && load.before->load() != load.before_chunks) failures.fetch_add(1);
  for_shares(worker, load.chunks, 1 + load.work % 3, [&](int64_t first, int64_t end) {
    volatile int sink = 0;
    for (int k = 0; k < load.work; ++k) sink = sink + k;
    load.done->fetch_add(end - first);
  });
}

void attack(Pool& pool, unsigned seed, int num_jobs) {
  std::vector<std::atomic<int64_t>> done(static_cast<size_t>(num_jobs));
  std::vector<Load> loads;
  std::vector<Job> jobs;
  for (int j = 0; j < num_jobs; ++j) {
    seed = seed * 1664525u + 1013904223u;
    const size_t at = static_cast<size_t>(j);
    loads.push_back({(seed >> 8) % 9, static_cast<int>((seed >> 12) % 300), &done[at], j ? &done[at - 1] : nullptr,
                     j ? loads.back().chunks : 0});
  }
  for (const Load& load : loads) jobs.push_back({&call, &load});
  std::vector<int64_t> stamps(static_cast<size_t>(num_jobs) + 1);
  pool.run(jobs.data(), num_jobs, Batch{}, seed & 1 ? stamps.data() : nullptr);
  for (int j = 0; j < num_jobs; ++j)
    if (done[static_cast<size_t>(j)].load() != loads[static_cast<size_t>(j)].chunks) failures.fetch_add(1);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  for (int count : {1, 2, 3, 8, 64}) {
    Pool pool(count);
    for (int round = 0; round < rounds; ++round) attack(pool, static_cast<unsigned>(round * 977 + count), 1 + round % 40);
  }
  for (int count : {2, 3}) {  // lists of different lengths in quick succession
    Pool pool(count);
    for (int round = 0; round < 50 * rounds; ++round) attack(pool, static_cast<unsigned>(round), 1 + round % 3);
  }
  for (int round = 0; round < rounds; ++round) {  // pools that live for one run
    Pool pool(2 + round % 3);
    attack(pool, static_cast<unsigned>(round), 3);
  }
  if (failures.load()) std::printf("%d failures\n", failures.load());
  return failures.load() ? 1 : 0;
}
