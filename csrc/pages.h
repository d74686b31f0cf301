// The K/V pages of all layers as one block of memory. A page is so many bytes here; kv_layout.h tells what stands in it.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

#include "memory.h"

namespace sayfa {

// [layer][page][page_stride bytes]
struct Pages {
  Block block;
  int64_t num_layers, num_pages, page_stride;
  Pages(int64_t layers, int64_t pages, int64_t stride)
      : block(static_cast<size_t>(layers * pages * stride)),
        num_layers(layers),
        num_pages(pages),
        page_stride(stride) {}

  uint8_t* page(int64_t layer, int64_t index) { return block.data() + (layer * num_pages + index) * page_stride; }

  // Throws std::invalid_argument for a page that is not there.
  void copy(int64_t from, int64_t to) {
    for (const int64_t index : {from, to})
      if (index < 0 || index >= num_pages)
        throw std::invalid_argument("page " + std::to_string(index) + " cannot be copied, allowed are 0 to " +
                                    std::to_string(num_pages - 1));
    for (int64_t layer = 0; layer < num_layers; ++layer)
      std::memcpy(page(layer, to), page(layer, from), static_cast<size_t>(page_stride));
  }

  // `count` pages from `first` on, of one layer; see Block::populate.
  bool populate(int64_t layer, int64_t first, int64_t count) {
    if (layer < 0 || layer >= num_layers || first < 0 || count < 0 || first + count > num_pages)
      throw std::invalid_argument("these pages are not there");
    const int64_t offset = (layer * num_pages + first) * page_stride;
    return block.populate(static_cast<size_t>(offset), static_cast<size_t>(count * page_stride));
  }
};

}  // namespace sayfa
