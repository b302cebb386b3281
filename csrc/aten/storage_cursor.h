#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include <sys/uio.h>

namespace residency {

/// Goes through the storages of a block in host memory, in the layout's order.
class StorageCursor {
 public:
  explicit StorageCursor(std::vector<iovec> storages) : storages_(std::move(storages)) {}

  /// Copies the next bytes into the buffers.
  void read(const std::vector<iovec>& buffers) {
    for_each_run(buffers, [](void* buffer, void* storage, std::size_t nbytes) {
      std::memcpy(buffer, storage, nbytes);
    });
  }
  /// Copies the buffers over the next bytes.
  void write(const std::vector<iovec>& buffers) {
    for_each_run(buffers, [](void* buffer, void* storage, std::size_t nbytes) {
      std::memcpy(storage, buffer, nbytes);
    });
  }

 private:
  template <class Copy>
  void for_each_run(const std::vector<iovec>& buffers, const Copy& copy) {
    for (const iovec& buffer : buffers) {
      for (std::size_t done = 0; done < buffer.iov_len;) {
        const iovec& storage = storages_.at(index_);
        const std::size_t nbytes = std::min(buffer.iov_len - done, storage.iov_len - offset_);
        copy(static_cast<std::byte*>(buffer.iov_base) + done,
             static_cast<std::byte*>(storage.iov_base) + offset_, nbytes);
        done += nbytes;
        offset_ += nbytes;
        if (offset_ == storage.iov_len) {
          ++index_;
          offset_ = 0;
        }
      }
    }
  }

  std::vector<iovec> storages_;
  std::size_t index_ = 0;
  std::size_t offset_ = 0;
};

}  // namespace residency
