#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "node_pool.h"
#include "residency/core/bytes.h"
#include "residency/core/export.h"

namespace residency {

/// A piece of a segment. Ranges of no bytes lie at the beginning of segment 0, which need not
/// exist.
struct Range {
  std::uint32_t segment = 0;
  Bytes begin;
  Bytes nbytes;
  friend bool operator==(const Range&, const Range&) = default;
};

/// Divides segments of memory into ranges: the bookkeeping of an arena, without the memory.
///
/// Best fit: the smallest free range that is large enough, of equals the one in the lowest segment
/// at the lowest address; neighbours that are free are one range. So what lies where follows from
/// the order of the calls alone, and a dry run can go through the same calls and take them back:
/// `free` undoes `allocate`, `take` undoes `free`, `remove_segment` undoes `add_segment` and
/// `put_back_segment` undoes `remove_segment`, and when all are undone in reverse everything is as
/// it was. A call costs O(log free ranges).
///
/// Not thread-safe. Misuse (a range that was not handed out, a segment that is in use) is a
/// `std::logic_error`. `allocate`, `take`, `add_segment` and `put_back_segment` may throw
/// `std::bad_alloc`, with nothing changed; but not where they undo another call. `free` and
/// `remove_segment` need no memory.
class RESIDENCY_API RangeAllocator {
 public:
  /// Ranges begin at multiples of `alignment` and are rounded up to them.
  explicit RangeAllocator(Bytes alignment);

  /// None where no free range is large enough: then a segment has to be added.
  [[nodiscard]] std::optional<Range> allocate(Bytes nbytes);
  void free(const Range& range);
  /// Hands out exactly this range, which must be free.
  void take(const Range& range);

  /// Returns its number: the lowest that no segment has.
  std::uint32_t add_segment(Bytes nbytes);
  /// Removes a segment that is wholly free.
  void remove_segment(std::uint32_t segment);
  /// Adds a segment of a number that no segment has.
  void put_back_segment(std::uint32_t segment, Bytes nbytes);
  [[nodiscard]] bool is_empty(std::uint32_t segment) const;
  [[nodiscard]] Bytes bytes_of(std::uint32_t segment) const { return segments_.at(segment); }
  /// Those handed out of a segment, by address. O(pieces of the segment).
  [[nodiscard]] std::vector<Range> live_ranges(std::uint32_t segment) const;
  /// Those that are wholly free, by number.
  [[nodiscard]] std::vector<std::uint32_t> empty_segments() const;
  [[nodiscard]] bool has_empty_segment() const;

  /// What a request takes: a multiple of the alignment.
  [[nodiscard]] Bytes rounded(Bytes nbytes) const { return nbytes.rounded_up(alignment_.count()); }
  [[nodiscard]] Bytes live_bytes() const noexcept { return live_; }
  [[nodiscard]] Bytes segment_bytes() const noexcept { return in_segments_; }
  /// The largest request that fits without another segment.
  [[nodiscard]] Bytes largest_free() const noexcept;
  /// Throws `std::logic_error` when its parts contradict each other. For tests: O(ranges).
  void audit() const;

 private:
  struct Piece {
    Bytes nbytes;
    bool is_free = true;
  };
  using Place = std::pair<std::uint32_t, Bytes>;            // segment, begin
  using Pieces = std::pmr::map<Place, Piece>;               // they cover the segments
  using FreeKey = std::tuple<Bytes, std::uint32_t, Bytes>;  // size, segment, begin
  /// Mutable, as most requests leave a piece where it was in the order.
  struct FreePiece {
    mutable FreeKey key;
    mutable Pieces::iterator piece = {};
    friend bool operator<(const FreePiece& a, const FreePiece& b) noexcept { return a.key < b.key; }
  };
  using FreePieces = std::pmr::set<FreePiece>;

  void check_segment(std::uint32_t number) const;
  void hand_out(FreePieces::iterator free, Bytes begin, Bytes nbytes);

  const Bytes alignment_;
  std::vector<Bytes> segments_;  // by number; zero: no segment has it
  NodePool nodes_;               // there is always room to free every range
  Pieces pieces_{&nodes_};
  FreePieces free_{&nodes_};
  std::size_t num_live_ = 0;
  Bytes live_;
  Bytes in_segments_;
};

}  // namespace residency
