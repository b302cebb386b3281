#include "csrc/aten/file_io.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <deque>
#include <exception>
#include <thread>
#include <utility>

#include <fmt/format.h>

#ifdef RESIDENCY_HAVE_LIBURING
#include <liburing.h>
#endif

#include "residency/core/errors.h"

namespace residency {
namespace {

// Large enough that a chunk costs more than its system call, small enough that several in flight
// keep a disk busy and that an abandoned transfer ends soon.
constexpr std::size_t kChunkBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxPieces = 512;
constexpr unsigned kNumInFlight = 8;

struct Chunk {
  std::vector<iovec> pieces;
  off_t at = 0;
  std::size_t nbytes = 0;
};

class Chunker {
 public:
  Chunker(const std::vector<iovec>& pieces, off_t at) : pieces_(pieces), at_(at) {}

  bool next(Chunk& chunk) {
    chunk.pieces.clear();
    chunk.at = at_;
    chunk.nbytes = 0;
    while (index_ < pieces_.size() && chunk.nbytes < kChunkBytes &&
           chunk.pieces.size() < kMaxPieces) {
      const iovec& piece = pieces_[index_];
      const std::size_t take = std::min(piece.iov_len - done_, kChunkBytes - chunk.nbytes);
      if (take != 0) {
        chunk.pieces.push_back({static_cast<std::byte*>(piece.iov_base) + done_, take});
      }
      chunk.nbytes += take;
      done_ += take;
      if (done_ == piece.iov_len) {
        ++index_;
        done_ = 0;
      }
    }
    at_ += static_cast<off_t>(chunk.nbytes);
    return chunk.nbytes != 0;
  }

 private:
  const std::vector<iovec>& pieces_;
  std::size_t index_ = 0;
  std::size_t done_ = 0;
  off_t at_;
};

// Removes the first `nbytes` bytes of what is left to transfer.
void advance(std::vector<iovec>& pieces, std::size_t nbytes) {
  std::size_t whole = 0;
  while (whole < pieces.size() && nbytes >= pieces[whole].iov_len) {
    nbytes -= pieces[whole].iov_len;
    ++whole;
  }
  pieces.erase(pieces.begin(), pieces.begin() + static_cast<std::ptrdiff_t>(whole));
  if (nbytes != 0) {
    pieces.front().iov_base = static_cast<std::byte*>(pieces.front().iov_base) + nbytes;
    pieces.front().iov_len -= nbytes;
  }
}

bool is_transient(int error_number) noexcept {
  return error_number == EINTR || error_number == EAGAIN;
}

[[noreturn]] void throw_failure(const FileTransfer& transfer, int error_number) {
  throw StorageError(*transfer.path, error_number,
                     transfer.direction == FileTransfer::Direction::kRead ? "read" : "write");
}

[[noreturn]] void throw_end_of_file(const FileTransfer& transfer, off_t at) {
  if (transfer.direction == FileTransfer::Direction::kWrite) {
    throw_failure(transfer, EIO);
  }
  throw MaterializationError(fmt::format(
      "{}: the file is truncated: it ends at byte {}, where bytes of the value were expected",
      *transfer.path, at));
}

void throw_if_abandoned(const FileTransfer& transfer) {
  if (transfer.abandon != nullptr && transfer.abandon->load(std::memory_order_relaxed)) {
    throw_failure(transfer, ECANCELED);
  }
}

void stamp_chunk(const FileTransfer& transfer, const std::vector<iovec>& pieces) {
  if (transfer.stamp != nullptr) {
    for (const iovec& piece : pieces) {
      transfer.stamp->add(piece.iov_base, piece.iov_len);
    }
  }
}

// What is short now may be there a little later; asking again at once only keeps a core busy.
void wait_if_short(int error_number) {
  if (error_number != EINTR) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void transfer_blocking(const FileTransfer& transfer, SystemCalls& calls, std::vector<iovec> left,
                       off_t at) {
  while (!left.empty()) {
    const int num_pieces = static_cast<int>(left.size());
    const ssize_t result = transfer.direction == FileTransfer::Direction::kRead
                               ? calls.preadv(transfer.file, left.data(), num_pieces, at)
                               : calls.pwritev(transfer.file, left.data(), num_pieces, at);
    if (result < 0) {
      const int error_number = static_cast<int>(-result);
      if (!is_transient(error_number)) {
        throw_failure(transfer, error_number);
      }
      throw_if_abandoned(transfer);
      wait_if_short(error_number);
      continue;
    }
    if (result == 0) {
      throw_end_of_file(transfer, at);
    }
    at += result;
    advance(left, static_cast<std::size_t>(result));
  }
}

void run_blocking(const FileTransfer& transfer, SystemCalls& calls) {
  Chunker chunker(transfer.pieces, transfer.at);
  Chunk chunk;
  while (chunker.next(chunk)) {
    throw_if_abandoned(transfer);
    transfer_blocking(transfer, calls, chunk.pieces, chunk.at);
    stamp_chunk(transfer, chunk.pieces);
  }
}

}  // namespace

#ifdef RESIDENCY_HAVE_LIBURING

struct FileIo::Ring {
  io_uring ring{};
  const int status = io_uring_queue_init(kNumInFlight, &ring, 0);
  bool broken = false;  // to be made anew before the next transfer

  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (status == 0) {
      io_uring_queue_exit(&ring);
    }
  }

  struct Slot {
    Chunk chunk;
    std::vector<iovec> left;
    off_t at = 0;
    bool in_flight = false;
    bool complete = false;
  };

  // The kernel reads and writes our memory while requests are in flight, so that every way out of
  // this function first waits for all of them.
  void run(const FileTransfer& transfer, SystemCalls& calls) {
    std::array<Slot, kNumInFlight> slots;
    std::deque<Slot*> order;  // chunks begun and not yet stamped, in the order of the file
    Chunker chunker(transfer.pieces, transfer.at);
    const bool reads = transfer.direction == FileTransfer::Direction::kRead;
    unsigned num_in_flight = 0;
    bool exhausted = false;
    bool blocking = false;  // the ring takes nothing any more
    std::exception_ptr failure;

    const auto queue = [&](Slot& slot) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring);
      if (entry == nullptr) {  // cannot be: no more slots than entries
        throw_failure(transfer, EBUSY);
      }
      const auto num_pieces = static_cast<unsigned>(slot.left.size());
      if (reads) {
        io_uring_prep_readv(entry, transfer.file, slot.left.data(), num_pieces,
                            static_cast<__u64>(slot.at));
      } else {
        io_uring_prep_writev(entry, transfer.file, slot.left.data(), num_pieces,
                             static_cast<__u64>(slot.at));
      }
      // Copies between page cache and memory run on the kernel's workers beside the stamping here.
      io_uring_sqe_set_flags(entry, IOSQE_ASYNC);
      io_uring_sqe_set_data(entry, &slot);
      slot.in_flight = true;
      ++num_in_flight;
    };
    // Carries out without the ring what waits in its queue, and nothing is in flight.
    const auto block = [&] {
      broken = true;
      blocking = true;
      num_in_flight = 0;
      for (Slot& slot : slots) {
        if (std::exchange(slot.in_flight, false) && failure == nullptr) {
          try {
            transfer_blocking(transfer, calls, slot.left, slot.at);
            slot.complete = true;
          } catch (...) {
            failure = std::current_exception();
          }
        }
      }
    };
    const auto submit = [&] {
      while (!blocking && io_uring_sq_ready(&ring) != 0) {
        int result = calls.ring_submit();
        if (result == 0) {
          result = io_uring_submit(&ring);
        }
        if (result > 0 || result == -EINTR) {
          continue;
        }
        if (result == 0 || result == -EAGAIN || result == -EBUSY) {
          // Short of memory, or of room for completions: the next completion makes some. With none
          // to come the kernel is not asked again and again.
          if (num_in_flight == io_uring_sq_ready(&ring)) {
            block();
          }
          return;
        }
        // What was queued has not been taken and never will be: this ring is given up.
        num_in_flight -= io_uring_sq_ready(&ring);
        broken = true;
        blocking = true;
        throw_failure(transfer, -result);
      }
    };
    const auto fail = [&](std::exception_ptr error) {
      if (failure == nullptr) {
        failure = std::move(error);
      }
    };

    for (;;) {
      try {
        if (failure == nullptr && !exhausted) {
          throw_if_abandoned(transfer);
          bool queued = false;
          for (Slot& slot : slots) {
            const bool free =
                !slot.in_flight && std::find(order.begin(), order.end(), &slot) == order.end();
            if (free && !exhausted) {
              if (!chunker.next(slot.chunk)) {
                exhausted = true;
                break;
              }
              slot.left = slot.chunk.pieces;
              slot.at = slot.chunk.at;
              slot.complete = false;
              order.push_back(&slot);
              if (blocking) {
                transfer_blocking(transfer, calls, slot.left, slot.at);
                slot.complete = true;
                break;  // to stamp it while it is in the caches
              }
              queue(slot);
              queued = true;
            }
          }
          if (queued) {
            submit();
          }
        }
      } catch (...) {
        fail(std::current_exception());
      }
      // Stamping overlaps what is in flight: writes may be stamped before they are done.
      if (failure == nullptr) {
        while (!order.empty() && (order.front()->complete || !reads)) {
          Slot* front = order.front();
          if (!reads && front->chunk.nbytes != 0) {
            stamp_chunk(transfer, front->chunk.pieces);
            front->chunk.nbytes = 0;
          }
          if (!front->complete) {
            break;
          }
          if (reads) {
            stamp_chunk(transfer, front->chunk.pieces);
          }
          order.pop_front();
        }
      }
      if (num_in_flight == 0) {
        if (failure != nullptr || (exhausted && order.empty())) {
          break;
        }
        continue;
      }
      io_uring_cqe* done = nullptr;
      if (const int waited = io_uring_wait_cqe(&ring, &done); waited < 0) {
        if (!is_transient(-waited)) {
          fail(std::make_exception_ptr(StorageError(*transfer.path, -waited, "wait for io_uring")));
          broken = true;
        }
        wait_if_short(-waited);
        continue;
      }
      Slot& slot = *static_cast<Slot*>(io_uring_cqe_get_data(done));
      const int result = calls.ring_result(done->res);
      io_uring_cqe_seen(&ring, done);
      slot.in_flight = false;
      --num_in_flight;
      try {
        if (result < 0 && !is_transient(-result)) {
          throw_failure(transfer, -result);
        }
        if (result == 0) {
          throw_end_of_file(transfer, slot.at);
        }
        if (result > 0) {
          slot.at += result;
          advance(slot.left, static_cast<std::size_t>(result));
        }
        if (slot.left.empty()) {
          slot.complete = true;
        } else if (failure == nullptr && (blocking || result == -EAGAIN)) {
          transfer_blocking(transfer, calls, slot.left, slot.at);
          slot.complete = true;
        } else if (failure == nullptr) {
          queue(slot);
        }
      } catch (...) {
        fail(std::current_exception());
      }
      try {
        submit();  // also what the kernel did not take before
      } catch (...) {
        fail(std::current_exception());
      }
    }
    if (failure != nullptr) {
      std::rethrow_exception(failure);
    }
  }
};

bool ring_is_usable() noexcept {
  io_uring ring{};
  if (io_uring_queue_init(1, &ring, 0) != 0) {
    return false;
  }
  io_uring_queue_exit(&ring);
  return true;
}

#else

struct FileIo::Ring {
  int status = -ENOSYS;
  bool broken = false;
  void run(const FileTransfer&, SystemCalls&) {}
};

bool ring_is_usable() noexcept {
  return false;
}

#endif

FileIo::FileIo() = default;
FileIo::~FileIo() = default;

void FileIo::run(const FileTransfer& transfer, SystemCalls& calls, bool allow_ring) {
  if (allow_ring && !ring_refused_ && ring_ == nullptr) {
    ring_ = std::make_unique<Ring>();
    if (ring_->status != 0) {
      ring_.reset();
      ring_refused_ = true;
    }
  }
  if (!allow_ring || ring_ == nullptr) {
    run_blocking(transfer, calls);
    return;
  }
  const auto give_up_broken = [this] {
    if (ring_->broken) {
      ring_.reset();
    }
  };
  try {
    ring_->run(transfer, calls);
  } catch (...) {
    give_up_broken();
    throw;
  }
  give_up_broken();
}

}  // namespace residency
