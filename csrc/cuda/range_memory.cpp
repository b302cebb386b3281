#include "csrc/cuda/range_memory.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <unordered_map>
#include <utility>

#include "csrc/core/fork.h"

namespace residency {
namespace {

bool contains(std::span<const FencePtr> fences, const FencePtr& fence) noexcept {
  return std::find(fences.begin(), fences.end(), fence) != fences.end();
}

}  // namespace

RangeMemory::RangeMemory(std::unique_ptr<SegmentSource> source, Bytes alignment)
    : source_(std::move(source)), generation_(device_generation()), ranges_(alignment) {}

RangeMemory::~RangeMemory() {
  if (generation_ == device_generation()) {
    free_what_is_set_aside();
    give_back(remove_empty_segments());  // every range held a reference: it is all of them
  }
}

RangeMemory::Allocation RangeMemory::allocate(Bytes nbytes, std::span<const FencePtr> pending) {
  free_what_is_set_aside();
  std::unique_ptr<Live> live;
  Allocation allocation;
  for (bool added = false;; added = true) {
    std::vector<FreedPieces::node_type> finished;
    std::vector<Departing> unneeded;
    void* data = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (live == nullptr && !spare_.empty()) {
        live = std::move(spare_.back());
        spare_.pop_back();
      } else if (live == nullptr) {
        live = std::make_unique<Live>();
      }
      if (const std::optional<Range> range = ranges_.allocate(nbytes); range.has_value()) {
        try {
          allocation.after = last_uses_in(*range, pending);
          // Until its user says otherwise: it may be freed before anything was done with it.
          live->uses.last_uses = allocation.after;
          finished = forget_last_uses_in(*range, allocation.after);
        } catch (...) {
          ranges_.free(*range);
          throw;
        }
        live->range = *range;
        live->memory = shared_from_this();
        data = static_cast<std::byte*>(segments_[range->segment].data) + range->begin.count();
        peak_live_ = std::max(peak_live_, ranges_.live_bytes());
      }
      // Another thread may have made room meanwhile, so that the new segment is not needed.
      if (added && data != nullptr && !source_->keeps_empty_segments()) {
        unneeded = remove_empty_segments();
      }
    }
    give_back(std::move(unneeded));
    if (data != nullptr) {
      allocation.memory = at::DataPtr(data, live.release(), &free_context, source_->device());
      return allocation;
    }
    const Bytes wanted = source_->segment_bytes(ranges_.rounded(nbytes), usage().segments);
    try {
      add_segment(wanted);
    } catch (...) {
      // Empty ones that are kept for later may be what is lacking.
      const Bytes before = usage().segments;
      (void)trim();
      if (usage().segments == before) {
        throw;
      }
      add_segment(wanted);
    }
  }
}

void RangeMemory::add_segment(Bytes nbytes) {
  SegmentSource::Segment made = source_->make(nbytes);
  std::vector<FencePtr> after;
  try {
    const std::lock_guard lock(mutex_);
    // What can fail comes first.
    segments_.reserve(segments_.size() + 1);
    if (made.ready != nullptr) {
      after.push_back(made.ready);
    }
    const std::uint32_t number = ranges_.add_segment(nbytes);
    try {
      if (made.ready != nullptr) {
        freed_.emplace(Place(number, Bytes()),
                       Freed{nbytes, std::make_shared<const std::vector<FencePtr>>(after)});
      }
    } catch (...) {
      ranges_.remove_segment(number);
      throw;
    }
    if (number >= segments_.size()) {
      segments_.resize(number + 1);
    }
    segments_[number] = {made.data, nbytes};
  } catch (...) {
    source_->give_back(made.data, nbytes, after);
    throw;
  }
}

namespace {

/// Calls on a RangeAllocator that are taken back at the end of the scope.
class Undone {
 public:
  explicit Undone(RangeAllocator& ranges) : ranges_(ranges) {}
  Undone(const Undone&) = delete;
  Undone& operator=(const Undone&) = delete;
  ~Undone() {
    for (auto each = done_.rbegin(); each != done_.rend(); ++each) {
      const Range& range = each->range;
      switch (each->call) {
        case Call::kAllocate: ranges_.free(range); break;
        case Call::kFree: ranges_.take(range); break;
        case Call::kAdd: ranges_.remove_segment(range.segment); break;
        case Call::kRemove: ranges_.put_back_segment(range.segment, range.nbytes); break;
      }
    }
  }

  // As RangeMemory does them.
  Range allocate(Bytes nbytes, const SegmentSource& source) {
    done_.reserve(done_.size() + 2);
    std::optional<Range> range = ranges_.allocate(nbytes);
    if (!range.has_value()) {
      const Bytes added = source.segment_bytes(ranges_.rounded(nbytes), ranges_.segment_bytes());
      done_.push_back({Call::kAdd, {ranges_.add_segment(added), Bytes(), added}});
      range = ranges_.allocate(nbytes);
    }
    done_.push_back({Call::kAllocate, range.value()});
    return *range;
  }
  void free(const Range& range, const SegmentSource& source) {
    done_.reserve(done_.size() + 1);
    ranges_.free(range);
    done_.push_back({Call::kFree, range});
    if (source.keeps_empty_segments() || !ranges_.is_empty(range.segment)) {
      return;
    }
    for (const std::uint32_t number : ranges_.empty_segments()) {
      done_.reserve(done_.size() + 1);
      done_.push_back({Call::kRemove, {number, Bytes(), ranges_.bytes_of(number)}});
      ranges_.remove_segment(number);
    }
  }

 private:
  enum class Call : std::uint8_t { kAllocate, kFree, kAdd, kRemove };
  struct Done {
    Call call;
    Range range;
  };
  RangeAllocator& ranges_;
  std::vector<Done> done_;
};

}  // namespace

SegmentBytes RangeMemory::predict(std::span<const MemoryStep> steps) {
  const std::lock_guard lock(mutex_);
  SegmentBytes bytes;
  bytes.before = bytes.peak = ranges_.segment_bytes();
  {
    Undone books(ranges_);
    std::vector<Range> taken(steps.size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const MemoryStep& step = steps[i];
      if (step.takes) {
        taken[i] = books.allocate(step.nbytes, *source_);
        bytes.peak = std::max(bytes.peak, ranges_.segment_bytes());
        continue;
      }
      Range given_back;
      if (step.block == nullptr) {
        given_back = taken.at(step.taken_by);
      } else if (const Live* live = live_of(*step.block);
                 live != nullptr && live->memory.get() == this) {
        given_back = live->range;
      } else {
        bytes.outside += step.nbytes;
        continue;
      }
      books.free(given_back, *source_);
    }
    bytes.after = ranges_.segment_bytes();
  }
  return bytes;
}

RangeMemory::Live* RangeMemory::live_of(const Block& block) noexcept {
  const auto* tensors = dynamic_cast<const TensorBlock*>(&block);
  return tensors != nullptr ? static_cast<Live*>(tensors->pack_context(&free_context)) : nullptr;
}

bool RangeMemory::end_use(const TensorBlock& block, DeviceLayer::LastUses uses) {
  Live* live = live_of(block);
  if (live == nullptr) {
    return false;
  }
  if (live->memory->generation_ != device_generation()) {
    return true;  // nothing is freed in a child
  }
  const std::lock_guard lock(live->memory->mutex_);
  std::swap(live->uses, uses);  // what it was dies after the lock
  return true;
}

void RangeMemory::free_context(void* context) noexcept {
  std::unique_ptr<Live> live(static_cast<Live*>(context));
  if (live->memory->generation_ == device_generation()) {
    const std::shared_ptr<RangeMemory> memory = std::move(live->memory);
    memory->free(std::move(live));
  } else {
    // A forked child: the memory is the parent's, and mutexes may be held for ever.
    (void)live.release();
  }
}

void RangeMemory::free(std::unique_ptr<Live> live) noexcept {
  const Range range = live->range;
  DeviceLayer::LastUses uses;
  {
    const std::lock_guard lock(mutex_);
    uses = std::exchange(live->uses, Live().uses);
  }
  std::vector<FencePtr>& last_uses = uses.last_uses;
  if (uses.used_by_others && !add_uses_by_others(*live, last_uses)) {
    live->uses = std::move(uses);
    set_aside(std::move(live));
    return;
  }
  live->streams.clear();
  std::vector<FreedPieces::node_type> finished;
  try {
    if (any_pending(last_uses)) {
      const auto shared = std::make_shared<const std::vector<FencePtr>>(last_uses);
      const std::lock_guard lock(mutex_);
      freed_.emplace(Place(range.segment, range.begin), Freed{range.begin + range.nbytes, shared});
      last_uses.clear();
    }
    const std::lock_guard lock(mutex_);
    finished = take_finished();
    spare_.push_back(std::move(live));
  } catch (...) {
    // No memory. What is not remembered must be over.
    wait_all(last_uses);
  }
  std::vector<Departing> departing;
  {
    const std::lock_guard lock(mutex_);
    ranges_.free(range);
    if (!source_->keeps_empty_segments() && ranges_.is_empty(range.segment)) {
      departing = remove_empty_segments();
    }
  }
  give_back(std::move(departing));
}

bool RangeMemory::add_uses_by_others(Live& live, std::vector<FencePtr>& fences) noexcept {
  try {
    if (live.streams.empty()) {
      live.streams = source_->current_streams();
    }
    for (const Stream& stream : live.streams) {
      FencePtr fence = source_->record(stream);
      if (fence == nullptr) {
        return false;
      }
      fences.push_back(std::move(fence));
    }
  } catch (...) {
    return source_->wait_for_others();
  }
  return true;
}

void RangeMemory::set_aside(std::unique_ptr<Live> live) noexcept {
  const std::lock_guard lock(mutex_);
  live->next = std::move(aside_);
  aside_ = std::move(live);
  any_aside_ = true;
}

void RangeMemory::free_what_is_set_aside() noexcept {
  if (!any_aside_.load() || !any_aside_.exchange(false)) {
    return;
  }
  std::unique_ptr<Live> aside;
  {
    const std::lock_guard lock(mutex_);
    aside = std::move(aside_);
  }
  while (aside != nullptr) {
    std::unique_ptr<Live> next = std::move(aside->next);
    free(std::move(aside));
    aside = std::move(next);
  }
}

RangeMemory::Pieces RangeMemory::pieces_in(const Range& range) {
  const Place begin(range.segment, range.begin);
  const Place end(range.segment, range.begin + range.nbytes);
  auto first = freed_.lower_bound(begin);
  if (first != freed_.begin()) {
    const auto before = std::prev(first);
    if (before->first.first == range.segment && before->second.end > range.begin) {
      first = before;
    }
  }
  return {first, freed_.lower_bound(end)};
}

std::vector<FencePtr> RangeMemory::last_uses_in(const Range& range,
                                                std::span<const FencePtr> pending) {
  std::vector<FencePtr> fences;
  if (freed_.empty()) {
    return fences;
  }
  const auto [first, last] = pieces_in(range);
  for (auto piece = first; piece != last; ++piece) {
    for (const FencePtr& fence : *piece->second.last_uses) {
      if (!contains(fences, fence) && (contains(pending, fence) || is_pending(fence))) {
        fences.push_back(fence);
      }
    }
  }
  return fences;
}

std::vector<RangeMemory::FreedPieces::node_type> RangeMemory::forget_last_uses_in(
    const Range& range, std::span<const FencePtr> pending) {
  std::vector<FreedPieces::node_type> forgotten;
  if (freed_.empty()) {
    return forgotten;
  }
  auto [first, last] = pieces_in(range);
  if (first == last) {
    return forgotten;
  }
  const auto is_over = [&](const Freed& freed) {
    return std::none_of(freed.last_uses->begin(), freed.last_uses->end(),
                        [&](const FencePtr& fence) { return contains(pending, fence); });
  };
  const Bytes end = range.begin + range.nbytes;
  if (first->first.second == range.begin && first->second.end > end && !is_over(first->second)) {
    auto shortened = freed_.extract(first);  // its beginning, as is usual: it needs no memory
    shortened.key().second = end;
    freed_.insert(last, std::move(shortened));
    return forgotten;
  }
  forgotten.reserve(static_cast<std::size_t>(std::distance(first, last)));
  // What sticks out of the range stays, unless it is over.
  const Freed& tail = std::prev(last)->second;
  if (tail.end > end && !is_over(tail)) {
    last = freed_.emplace(Place(range.segment, end), tail).first;
  }
  if (first->first.second < range.begin && !is_over(first->second)) {
    first->second.end = range.begin;
    ++first;
  }
  while (first != last) {
    forgotten.push_back(freed_.extract(first++));
  }
  return forgotten;
}

std::vector<RangeMemory::FreedPieces::node_type> RangeMemory::take_finished() {
  std::vector<FreedPieces::node_type> finished;
  if (freed_.size() < look_at_) {
    return finished;
  }
  finished.reserve(freed_.size());
  for (auto piece = freed_.begin(); piece != freed_.end();) {
    const auto each = piece++;
    if (!any_pending(*each->second.last_uses)) {
      finished.push_back(freed_.extract(each));
    }
  }
  look_at_ = std::max<std::size_t>(64, 2 * freed_.size());
  return finished;
}

std::vector<FencePtr> RangeMemory::last_uses_in_segment(std::uint32_t number) const {
  std::vector<FencePtr> fences;
  const auto last = freed_.lower_bound(Place(number + 1, Bytes()));
  for (auto piece = freed_.lower_bound(Place(number, Bytes())); piece != last; ++piece) {
    fences.insert(fences.end(), piece->second.last_uses->begin(), piece->second.last_uses->end());
  }
  return fences;
}

std::vector<RangeMemory::Departing> RangeMemory::remove_empty_segments(bool also_pending) noexcept {
  std::vector<Departing> departing;
  try {
    const std::vector<std::uint32_t> numbers = ranges_.empty_segments();
    departing.reserve(numbers.size());
    for (const std::uint32_t number : numbers) {
      Departing each{segments_[number], last_uses_in_segment(number)};
      if (!also_pending && any_pending(each.after)) {
        continue;
      }
      ranges_.remove_segment(number);
      freed_.erase(freed_.lower_bound(Place(number, Bytes())),
                   freed_.lower_bound(Place(number + 1, Bytes())));
      segments_[number] = {};
      departing.push_back(std::move(each));
    }
  } catch (...) {
    // No memory to do it now; the next occasion will.
  }
  return departing;
}

void RangeMemory::give_back(std::vector<Departing> departing) noexcept {
  for (const Departing& each : departing) {
    source_->give_back(each.segment.data, each.segment.nbytes, each.after);
  }
}

std::vector<RangeMemory::Emptiable> RangeMemory::emptiable(
    std::span<const std::uintptr_t> beginnings) const {
  std::unordered_map<std::uintptr_t, std::size_t> positions;
  for (std::size_t i = 0; i < beginnings.size(); ++i) {
    positions.emplace(beginnings[i], i);
  }
  std::vector<Emptiable> found;
  const std::lock_guard lock(mutex_);
  for (std::uint32_t number = 0; number < segments_.size(); ++number) {
    const Segment& segment = segments_[number];
    if (segment.data == nullptr) {
      continue;
    }
    Emptiable emptiable{segment.nbytes, {}};
    const std::vector<Range> live = ranges_.live_ranges(number);
    for (const Range& range : live) {
      const auto begin = reinterpret_cast<std::uintptr_t>(segment.data) +
                         static_cast<std::uintptr_t>(range.begin.count());
      if (const auto position = positions.find(begin); position != positions.end()) {
        emptiable.leaving.push_back(position->second);
      }
    }
    if (emptiable.leaving.size() == live.size()) {
      found.push_back(std::move(emptiable));
    }
  }
  return found;
}

bool RangeMemory::trim() noexcept {
  if (generation_ != device_generation()) {
    return true;
  }
  free_what_is_set_aside();
  std::vector<Departing> departing;
  std::vector<std::unique_ptr<Live>> unneeded;
  bool is_trimmed = false;
  {
    const std::lock_guard lock(mutex_);
    departing = remove_empty_segments(/*also_pending=*/!source_->keeps_empty_segments());
    unneeded.swap(spare_);
    is_trimmed = !ranges_.has_empty_segment();
  }
  give_back(std::move(departing));
  return is_trimmed;
}

DeviceLayer::Usage RangeMemory::usage() const {
  const std::lock_guard lock(mutex_);
  return {ranges_.live_bytes(), peak_live_, ranges_.segment_bytes()};
}

void RangeMemory::reset_peak() {
  const std::lock_guard lock(mutex_);
  peak_live_ = ranges_.live_bytes();
}

}  // namespace residency
