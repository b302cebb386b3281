#include "csrc/simcuda/clock.h"

#include <algorithm>

#include "csrc/simcuda/activity.h"
#include "csrc/simcuda/device.h"
#include "csrc/simcuda/runtime.h"
#include "csrc/simcuda/stream.h"

namespace simcuda {
namespace {

// For the heap of an engine: true when `a` is served after `b`.
bool served_later(const OperationPtr& a, const OperationPtr& b) {
  return std::pair(a->model.ready_ns, a->sequence) > std::pair(b->model.ready_ns, b->sequence);
}

// The part of [start, end) that lies before `other_end` and not before `covered_until`.
uint64_t overlap(uint64_t start_ns, uint64_t end_ns, uint64_t other_end, uint64_t covered_until) {
  uint64_t from = std::max(start_ns, covered_until);
  uint64_t to = std::min(end_ns, other_end);
  return to > from ? to - from : 0;
}

}  // namespace

void Clock::raise_to(uint64_t at_ns) {
  uint64_t present = now();
  while (present < at_ns && !now_ns_.compare_exchange_weak(present, at_ns)) {
  }
}

void Clock::add(Lock&, const OperationPtr& operation,
                const std::vector<OperationPtr>& dependencies) {
  operation->sequence = next_sequence_++;
  ModelState& model = operation->model;
  model.ready_ns = now() + operation->spec.launch_ns;
  // One more than is true, so that it cannot become ready in the loop.
  model.num_unresolved = 1;
  for (const OperationPtr& dependency : dependencies) {
    if (!dependency) continue;
    if (dependency->model.resolved) {
      model.ready_ns = std::max(model.ready_ns, dependency->model.end_ns);
    } else {
      dependency->dependents.push_back(operation);
      ++model.num_unresolved;
    }
  }
  if (operation->gated) {
    ++model.num_unresolved;
    ++num_gated_;
  }
  settle(operation, 0);
}

// Satisfies one dependency from outside the simulation.
void Clock::settle(const OperationPtr& operation, uint64_t at_ns) {
  std::vector<OperationPtr> resolved;
  satisfy(operation, at_ns, resolved);
  for (const OperationPtr& ready : resolved) resolve(ready, ready->model.ready_ns);
}

void Clock::close_gate(Lock&, Operation& operation) {
  if (operation.gated || operation.model.resolved) return;
  operation.gated = true;
  ++num_gated_;
  bool was_ready = operation.model.num_unresolved++ == 0;
  if (!was_ready) return;
  Engine* engine = operation.spec.engine;
  std::erase_if(engine->ready,
                [&](const OperationPtr& ready) { return ready.get() == &operation; });
  std::make_heap(engine->ready.begin(), engine->ready.end(), served_later);
  if (engine->ready.empty()) std::erase(busy_, engine);
}

void Clock::open_gate(Lock&, const OperationPtr& operation) {
  if (!operation->gated) return;
  operation->gated = false;
  --num_gated_;
  settle(operation, now());
  gate_opened_.notify_all();
}

void Clock::remember(const OperationPtr& operation) {
  if (trial_) trial_->emplace_back(operation, operation->model);
}

// One of what the operation waits for is settled at `at_ns`. It goes to its engine, or, having
// none, to `resolved`, when it was the last.
void Clock::satisfy(const OperationPtr& operation, uint64_t at_ns,
                    std::vector<OperationPtr>& resolved) {
  remember(operation);
  ModelState& model = operation->model;
  model.ready_ns = std::max(model.ready_ns, at_ns);
  if (--model.num_unresolved > 0) return;
  Engine* engine = operation->spec.engine;
  if (!engine) {
    resolved.push_back(operation);
    return;
  }
  if (engine->ready.empty()) busy_.push_back(engine);
  engine->ready.push_back(operation);
  std::push_heap(engine->ready.begin(), engine->ready.end(), served_later);
}

void Clock::resolve(const OperationPtr& first, uint64_t start_ns) {
  // A list instead of recursion: behind a held operation there may be thousands of records.
  std::vector<OperationPtr> to_resolve{first};
  for (size_t next = 0; next < to_resolve.size(); ++next) {
    OperationPtr operation = to_resolve[next];
    remember(operation);
    ModelState& model = operation->model;
    model.start_ns = next == 0 ? start_ns : model.ready_ns;
    model.end_ns = model.start_ns + operation->spec.duration_ns;
    model.resolved = true;
    account(*operation);
    for (const OperationPtr& dependent : operation->dependents) {
      satisfy(dependent, model.end_ns, to_resolve);
    }
    if (!trial_) operation->dependents = {};
  }
}

// Adds what is now known of the operation to the counters and the timeline.
//
// Starts are decided in the order of time, so that of what an engine did before, only the last
// stretch can reach past this start; it ends at free_ns.
void Clock::account(Operation& operation) {
  if (trial_) return;
  const OperationSpec& spec = operation.spec;
  timeline.add(operation);
  observe_settled(operation);
  if (!spec.engine) return;
  Device& device = *spec.engine->device;
  uint64_t start = operation.model.start_ns;
  uint64_t end = operation.model.end_ns;
  uint64_t h2d_end = device.engines[kEngineH2D].free_ns;
  uint64_t d2h_end = device.engines[kEngineD2H].free_ns;
  uint64_t compute_end = device.engines[kEngineCompute].free_ns;
  if (spec.kind == OperationKind::kKernel) {
    device.counters.kernel_time += spec.duration_ns;
    device.counters.overlap_time += overlap(start, end, std::max(h2d_end, d2h_end), start);
  }
  if (spec.direction >= 0) device.counters.copy_time[spec.direction] += spec.duration_ns;
  if (spec.engine == &device.engines[kEngineH2D]) {
    device.counters.overlap_time += overlap(start, end, compute_end, d2h_end);
  }
  if (spec.engine == &device.engines[kEngineD2H]) {
    device.counters.overlap_time += overlap(start, end, compute_end, h2d_end);
  }
}

// Starts what starts next, if that is not after the limit.
bool Clock::start_next(uint64_t limit_ns) {
  Engine* chosen = nullptr;
  std::pair<uint64_t, uint64_t> earliest{limit_ns, UINT64_MAX};
  for (Engine* engine : busy_) {
    const OperationPtr& front = engine->ready.front();
    std::pair candidate(std::max(engine->free_ns, front->model.ready_ns), front->sequence);
    if (candidate >= earliest) continue;
    earliest = candidate;
    chosen = engine;
  }
  if (!chosen) return false;
  std::pop_heap(chosen->ready.begin(), chosen->ready.end(), served_later);
  OperationPtr operation = std::move(chosen->ready.back());
  chosen->ready.pop_back();
  if (chosen->ready.empty()) std::erase(busy_, chosen);
  uint64_t start = earliest.first;
  resolve(operation, start);
  chosen->free_ns = std::max(chosen->free_ns, start + operation->spec.duration_ns);
  return true;
}

void Clock::advance(Lock&) {
  uint64_t present = now();
  while (start_next(present)) {
  }
}

bool Clock::is_done(Lock& lock, const OperationPtr& operation) {
  if (!operation) return true;
  advance(lock);
  return operation->model.resolved && operation->model.end_ns <= now();
}

uint64_t Clock::wait(Lock& lock, const std::vector<OperationPtr>& operations) {
  uint64_t entered = now();
  advance(lock);
  for (const OperationPtr& operation : operations) {
    if (!operation) continue;
    gate_opened_.wait(lock, [&] { return abandoned_ || would_end(lock, *operation); });
    if (abandoned_) break;
    while (!operation->model.resolved) start_next(UINT64_MAX);
    raise_to(operation->model.end_ns);
    advance(lock);
  }
  uint64_t left = now();
  if (left > entered) timeline.add_wait(entered, left);
  return left - entered;
}

void Clock::abandon() {
  Lock lock(mutex);
  abandoned_ = true;
  gate_opened_.notify_all();
}

template <class Look>
void Clock::try_out(Look look) {
  Trial trial;
  trial_ = &trial;
  std::vector<Engine*> busy = busy_;
  // An engine that has nothing ready now may get something, so all are kept.
  std::vector<std::pair<Engine*, Engine>> engines;
  for (Engine* engine : runtime().engines()) engines.emplace_back(engine, *engine);
  while (start_next(UINT64_MAX)) {
  }
  look();
  trial_ = nullptr;
  busy_ = std::move(busy);
  for (auto& [engine, before] : engines) *engine = std::move(before);
  for (auto entry = trial.rbegin(); entry != trial.rend(); ++entry) {
    entry->first->model = entry->second;
  }
}

uint64_t Clock::end_of(Lock& lock, const Device* device) {
  advance(lock);
  uint64_t end = now();
  try_out([&] {
    for (const auto& each : runtime().devices) {
      if (device && each.get() != device) continue;
      for (const OperationPtr& last : last_operations(*each)) {
        if (last && last->model.resolved) end = std::max(end, last->model.end_ns);
      }
      for (const Engine& engine : each->engines) end = std::max(end, engine.free_ns);
    }
  });
  return end;
}

bool Clock::would_end(Lock&, const Operation& operation) {
  if (operation.model.resolved || num_gated_ == 0) return true;
  bool ends = false;
  try_out([&] { ends = operation.model.resolved; });
  return ends;
}

}  // namespace simcuda
