#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <new>

namespace sayfa {

namespace {
constexpr size_t kHuge = size_t{2} << 20;

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulate = MADV_POPULATE_WRITE;
#else
constexpr int kPopulate = 23;  // the kernel may know what these headers do not
#endif
}  // namespace

Block::Block(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) bytes = 64;
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  // Small blocks stay on small pages: a whole huge page for a few rows would only cost memory.
  const bool huge = bytes >= kHuge;
  mapping_bytes_ = huge ? ((bytes + kHuge - 1) & ~(kHuge - 1)) + kHuge : bytes;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  const auto start = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<uint8_t*>(huge ? (start + kHuge - 1) & ~(kHuge - 1) : start);
#ifdef MADV_HUGEPAGE
  if (huge) madvise(data_, (bytes + kHuge - 1) & ~(kHuge - 1), MADV_HUGEPAGE);
#endif
}

bool Block::populate(size_t offset, size_t bytes) const {
  if (offset > bytes_ || bytes > bytes_ - offset) return false;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(data_ + offset) & ~(page - 1);
  const size_t length = reinterpret_cast<uintptr_t>(data_ + offset + bytes) - first;
  int failed;
  do failed = madvise(reinterpret_cast<void*>(first), length, kPopulate);
  while (failed && errno == EINTR);
  return !failed;
}

Block::~Block() {
  if (mapping_) munmap(mapping_, mapping_bytes_);
}

}  // namespace sayfa
