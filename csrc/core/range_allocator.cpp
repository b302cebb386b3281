#include "range_allocator.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include <fmt/format.h>

namespace residency {
namespace {

[[noreturn]] void throw_misuse(std::string_view call, const Range& range) {
  throw std::logic_error(fmt::format("RangeAllocator::{}: {} B at {} of segment {} cannot be given",
                                     call, range.nbytes.count(), range.begin.count(),
                                     range.segment));
}

}  // namespace

RangeAllocator::RangeAllocator(Bytes alignment) : alignment_(alignment) {
  static_cast<void>(rounded(Bytes()));  // refuses an alignment of zero
}

RangeAllocator::Segment& RangeAllocator::segment_at(std::uint32_t number) {
  if (number >= segments_.size() || segments_[number].nbytes == Bytes()) {
    throw std::logic_error(fmt::format("RangeAllocator: there is no segment {}", number));
  }
  return segments_[number];
}

/// Cuts [begin, begin + nbytes) out of a free piece.
void RangeAllocator::hand_out(std::uint32_t number, Pieces& pieces, Pieces::iterator piece,
                              Bytes begin, Bytes nbytes) {
  const Bytes piece_begin = piece->first;
  const Bytes before = begin - piece_begin;
  const Bytes after = piece->second.nbytes - before - nbytes;
  auto freed = free_.extract({piece->second.nbytes, number, piece_begin});
  if (before != Bytes()) {
    piece->second.nbytes = before;
    free_.insert({before, number, piece_begin});
    piece = pieces.emplace_hint(std::next(piece), begin, Piece());
  }
  piece->second = {nbytes, false};
  if (after != Bytes()) {
    pieces.emplace_hint(std::next(piece), begin + nbytes, Piece{after, true});
    freed.value() = {after, number, begin + nbytes};
    free_.insert(std::move(freed));
  }
  live_ += nbytes;
}

std::optional<Range> RangeAllocator::allocate(Bytes nbytes) {
  nbytes = rounded(nbytes);
  if (nbytes == Bytes()) {
    return Range();
  }
  const auto best = free_.lower_bound({nbytes, 0, Bytes()});
  if (best == free_.end()) {
    return std::nullopt;
  }
  const auto [size, number, begin] = *best;
  Pieces& pieces = segments_[number].pieces;
  hand_out(number, pieces, pieces.find(begin), begin, nbytes);
  return Range{number, begin, nbytes};
}

void RangeAllocator::free(const Range& range) {
  if (range.nbytes == Bytes()) {
    return;
  }
  Pieces& pieces = segment_at(range.segment).pieces;
  auto piece = pieces.find(range.begin);
  if (piece == pieces.end() || piece->second.is_free || piece->second.nbytes != range.nbytes) {
    throw_misuse("free", range);
  }
  live_ -= range.nbytes;
  piece->second.is_free = true;
  const auto absorb = [&](Pieces::iterator into, Pieces::iterator from) {
    into->second.nbytes += from->second.nbytes;
    pieces.erase(from);
  };
  if (const auto next = std::next(piece); next != pieces.end() && next->second.is_free) {
    free_.erase({next->second.nbytes, range.segment, next->first});
    absorb(piece, next);
  }
  if (piece != pieces.begin() && std::prev(piece)->second.is_free) {
    const auto previous = std::prev(piece);
    free_.erase({previous->second.nbytes, range.segment, previous->first});
    absorb(previous, piece);
    piece = previous;
  }
  free_.insert({piece->second.nbytes, range.segment, piece->first});
}

void RangeAllocator::take(const Range& range) {
  if (range.nbytes == Bytes()) {
    return;
  }
  Pieces& pieces = segment_at(range.segment).pieces;
  auto piece = pieces.upper_bound(range.begin);
  if (piece == pieces.begin()) {
    throw_misuse("take", range);
  }
  --piece;
  const bool fits = piece->second.is_free && range.nbytes == rounded(range.nbytes) &&
                    range.begin == rounded(range.begin) &&
                    range.begin + range.nbytes <= piece->first + piece->second.nbytes;
  if (!fits) {
    throw_misuse("take", range);
  }
  hand_out(range.segment, pieces, piece, range.begin, range.nbytes);
}

std::uint32_t RangeAllocator::add_segment(Bytes nbytes) {
  const auto unused = std::ranges::find(segments_, Bytes(), &Segment::nbytes);
  const auto number = static_cast<std::uint32_t>(unused - segments_.begin());
  put_back_segment(number, nbytes);
  return number;
}

void RangeAllocator::put_back_segment(std::uint32_t number, Bytes nbytes) {
  if (nbytes == Bytes() || nbytes != rounded(nbytes)) {
    throw std::logic_error(fmt::format("RangeAllocator: {} B are not a positive multiple of {}",
                                       nbytes.count(), alignment_.count()));
  }
  if (number < segments_.size() && segments_[number].nbytes != Bytes()) {
    throw std::logic_error(fmt::format("RangeAllocator: there is a segment {}", number));
  }
  segments_.resize(std::max<std::size_t>(segments_.size(), number + 1));
  Segment& segment = segments_[number];
  segment.nbytes = nbytes;
  segment.pieces.emplace(Bytes(), Piece{nbytes, true});
  free_.insert({nbytes, number, Bytes()});
  in_segments_ += nbytes;
}

void RangeAllocator::remove_segment(std::uint32_t number) {
  Segment& segment = segment_at(number);
  if (!is_empty(number)) {
    throw std::logic_error(
        fmt::format("RangeAllocator::remove_segment: segment {} is in use", number));
  }
  free_.erase({segment.nbytes, number, Bytes()});
  in_segments_ -= segment.nbytes;
  segment = Segment();
  while (!segments_.empty() && segments_.back().nbytes == Bytes()) {
    segments_.pop_back();
  }
}

bool RangeAllocator::is_empty(std::uint32_t number) const {
  const Segment& segment = segments_.at(number);
  return segment.pieces.size() == 1 && segment.pieces.begin()->second.is_free;
}

std::vector<std::uint32_t> RangeAllocator::empty_segments() const {
  std::vector<std::uint32_t> found;
  for (std::uint32_t number = 0; number < segments_.size(); ++number) {
    if (is_empty(number)) {
      found.push_back(number);
    }
  }
  return found;
}

Bytes RangeAllocator::largest_free() const noexcept {
  return free_.empty() ? Bytes() : std::get<0>(*free_.rbegin());
}

void RangeAllocator::audit() const {
  Bytes live;
  Bytes in_segments;
  std::set<FreeKey> free;
  for (std::uint32_t number = 0; number < segments_.size(); ++number) {
    const Segment& segment = segments_[number];
    Bytes end;
    bool previous_is_free = false;
    for (const auto& [begin, piece] : segment.pieces) {
      if (begin != end || piece.nbytes == Bytes() || (piece.is_free && previous_is_free)) {
        throw std::logic_error(
            fmt::format("segment {}: pieces leave a gap, overlap or should be "
                        "one at {}",
                        number, begin.count()));
      }
      end += piece.nbytes;
      previous_is_free = piece.is_free;
      if (piece.is_free) {
        free.insert({piece.nbytes, number, begin});
      } else {
        live += piece.nbytes;
      }
    }
    if (end != segment.nbytes) {
      throw std::logic_error(fmt::format("segment {}: pieces do not cover it", number));
    }
    in_segments += segment.nbytes;
  }
  if (free != free_ || live != live_ || in_segments != in_segments_) {
    throw std::logic_error("the free ranges or the sums are not those of the pieces");
  }
}

}  // namespace residency
