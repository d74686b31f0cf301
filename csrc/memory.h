// Big blocks of memory that the library owns: 2 MiB aligned, huge pages asked for, zero at first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sayfa {

class Block {
 public:
  explicit Block(size_t bytes);  // throws std::bad_alloc
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Has the system put memory behind these bytes now, in place of at their first use; what is there stays. False where
  // it cannot (before Linux 5.14) or has none to give.
  bool populate(size_t offset, size_t bytes) const;

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

}  // namespace sayfa
