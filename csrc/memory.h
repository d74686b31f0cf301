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

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

}  // namespace sayfa
