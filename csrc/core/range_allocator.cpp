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

void RangeAllocator::check_segment(std::uint32_t number) const {
  if (number >= segments_.size() || segments_[number] == Bytes()) {
    throw std::logic_error(fmt::format("RangeAllocator: there is no segment {}", number));
  }
}

/// Cuts [begin, begin + nbytes) out of a free piece.
void RangeAllocator::hand_out(FreePieces::iterator free, Bytes begin, Bytes nbytes) {
  Pieces::iterator piece = free->piece;
  const auto [number, piece_begin] = piece->first;
  const Bytes before = begin - piece_begin;
  const Bytes after = piece->second.nbytes - before - nbytes;
  const std::size_t num_new = (before != Bytes() ? 2U : 0U) + (after != Bytes() ? 1U : 0U);
  const std::size_t num_unneeded = after != Bytes() ? 0 : 1;
  nodes_.make_room(num_live_ + 1 + num_new - num_unneeded);
  // From here on nothing allocates.
  const Pieces::iterator head = piece;
  if (before != Bytes()) {
    head->second.nbytes = before;
    piece = pieces_.emplace_hint(std::next(head), Place(number, begin), Piece());
  }
  piece->second = {nbytes, false};
  if (after == Bytes()) {
    free_.erase(free);
  } else {
    const FreePiece left{
        FreeKey(after, number, begin + nbytes),
        pieces_.emplace_hint(std::next(piece), Place(number, begin + nbytes), Piece{after, true})};
    // It is often the largest still.
    if (free == free_.begin() || *std::prev(free) < left) {
      free->key = left.key;
      free->piece = left.piece;
    } else {
      auto node = free_.extract(free);
      node.value() = left;
      free_.insert(std::move(node));
    }
  }
  if (before != Bytes()) {
    free_.insert({FreeKey(before, number, piece_begin), head});
  }
  ++num_live_;
  live_ += nbytes;
}

std::optional<Range> RangeAllocator::allocate(Bytes nbytes) {
  nbytes = rounded(nbytes);
  if (nbytes == Bytes()) {
    return Range();
  }
  const auto best = free_.lower_bound({FreeKey(nbytes, 0, Bytes())});
  if (best == free_.end()) {
    return std::nullopt;
  }
  const auto [size, number, begin] = best->key;
  hand_out(best, begin, nbytes);
  return Range{number, begin, nbytes};
}

void RangeAllocator::free(const Range& range) {
  if (range.nbytes == Bytes()) {
    return;
  }
  check_segment(range.segment);
  auto piece = pieces_.find(Place(range.segment, range.begin));
  if (piece == pieces_.end() || piece->second.is_free || piece->second.nbytes != range.nbytes) {
    throw_misuse("free", range);
  }
  --num_live_;
  live_ -= range.nbytes;
  piece->second.is_free = true;
  const auto absorb = [&](Pieces::iterator into, Pieces::iterator from) {
    into->second.nbytes += from->second.nbytes;
    pieces_.erase(from);
  };
  const auto is_free_here = [&](Pieces::iterator neighbour) {
    return neighbour->first.first == range.segment && neighbour->second.is_free;
  };
  if (const auto next = std::next(piece); next != pieces_.end() && is_free_here(next)) {
    free_.erase({FreeKey(next->second.nbytes, range.segment, next->first.second)});
    absorb(piece, next);
  }
  if (piece != pieces_.begin() && is_free_here(std::prev(piece))) {
    const auto previous = std::prev(piece);
    free_.erase({FreeKey(previous->second.nbytes, range.segment, previous->first.second)});
    absorb(previous, piece);
    piece = previous;
  }
  free_.insert({FreeKey(piece->second.nbytes, range.segment, piece->first.second), piece});
}

void RangeAllocator::take(const Range& range) {
  if (range.nbytes == Bytes()) {
    return;
  }
  check_segment(range.segment);
  const auto piece = std::prev(pieces_.upper_bound(Place(range.segment, range.begin)));
  const bool fits = piece->second.is_free && range.nbytes == rounded(range.nbytes) &&
                    range.begin == rounded(range.begin) &&
                    range.begin + range.nbytes <= piece->first.second + piece->second.nbytes;
  if (!fits) {
    throw_misuse("take", range);
  }
  hand_out(free_.find({FreeKey(piece->second.nbytes, range.segment, piece->first.second)}),
           range.begin, range.nbytes);
}

std::uint32_t RangeAllocator::add_segment(Bytes nbytes) {
  const auto unused = std::ranges::find(segments_, Bytes());
  const auto number = static_cast<std::uint32_t>(unused - segments_.begin());
  put_back_segment(number, nbytes);
  return number;
}

void RangeAllocator::put_back_segment(std::uint32_t number, Bytes nbytes) {
  if (nbytes == Bytes() || nbytes != rounded(nbytes)) {
    throw std::logic_error(fmt::format("RangeAllocator: {} B are not a positive multiple of {}",
                                       nbytes.count(), alignment_.count()));
  }
  if (number < segments_.size() && segments_[number] != Bytes()) {
    throw std::logic_error(fmt::format("RangeAllocator: there is a segment {}", number));
  }
  nodes_.make_room(num_live_ + 2);
  segments_.resize(std::max<std::size_t>(segments_.size(), number + 1));
  // From here on nothing allocates.
  segments_[number] = nbytes;
  const auto piece = pieces_.emplace(Place(number, Bytes()), Piece{nbytes, true}).first;
  free_.insert({FreeKey(nbytes, number, Bytes()), piece});
  in_segments_ += nbytes;
}

void RangeAllocator::remove_segment(std::uint32_t number) {
  check_segment(number);
  if (!is_empty(number)) {
    throw std::logic_error(
        fmt::format("RangeAllocator::remove_segment: segment {} is in use", number));
  }
  pieces_.erase(Place(number, Bytes()));
  free_.erase({FreeKey(segments_[number], number, Bytes())});
  in_segments_ -= segments_[number];
  segments_[number] = Bytes();
  while (!segments_.empty() && segments_.back() == Bytes()) {
    segments_.pop_back();
  }
}

bool RangeAllocator::is_empty(std::uint32_t number) const {
  const Bytes nbytes = segments_.at(number);
  return nbytes != Bytes() && free_.contains({FreeKey(nbytes, number, Bytes())});
}

std::vector<Range> RangeAllocator::live_ranges(std::uint32_t segment) const {
  check_segment(segment);
  std::vector<Range> live;
  for (auto piece = pieces_.lower_bound(Place(segment, Bytes()));
       piece != pieces_.end() && piece->first.first == segment; ++piece) {
    if (!piece->second.is_free) {
      live.push_back({segment, piece->first.second, piece->second.nbytes});
    }
  }
  return live;
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

bool RangeAllocator::has_empty_segment() const {
  std::uint32_t number = 0;
  while (number < segments_.size() && !is_empty(number)) {
    ++number;
  }
  return number < segments_.size();
}

Bytes RangeAllocator::largest_free() const noexcept {
  return free_.empty() ? Bytes() : std::get<0>(free_.rbegin()->key);
}

void RangeAllocator::audit() const {
  Bytes live;
  std::size_t num_live = 0;
  std::vector<Bytes> ends(segments_.size());
  std::vector<FreeKey> free;
  std::optional<std::uint32_t> free_until_here;  // the piece before is free, in this segment
  for (auto each = pieces_.begin(); each != pieces_.end(); ++each) {
    const Piece& piece = each->second;
    const auto [number, begin] = each->first;
    const bool joins = piece.is_free && free_until_here == number;
    if (begin != ends.at(number) || piece.nbytes == Bytes() || joins) {
      throw std::logic_error(fmt::format(
          "segment {}: pieces leave a gap, overlap or should be one at {}", number, begin.count()));
    }
    ends[number] += piece.nbytes;
    free_until_here = piece.is_free ? std::optional(number) : std::nullopt;
    if (piece.is_free) {
      free.emplace_back(piece.nbytes, number, begin);
    } else {
      live += piece.nbytes;
      ++num_live;
    }
  }
  Bytes in_segments;
  for (const Bytes each : segments_) {
    in_segments += each;
  }
  if (ends != segments_) {
    throw std::logic_error("pieces do not cover their segments");
  }
  std::ranges::sort(free);
  const auto same = [](const FreeKey& key, const FreePiece& listed) {
    return key == listed.key && listed.piece->first == Place(std::get<1>(key), std::get<2>(key));
  };
  if (!std::ranges::equal(free, free_, same) || live != live_ || num_live != num_live_ ||
      in_segments != in_segments_) {
    throw std::logic_error("the free ranges or the sums are not those of the pieces");
  }
}

}  // namespace residency
