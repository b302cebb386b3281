#include "residency/aten/manager.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <span>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <fmt/format.h>

#include "residency/aten/tensor_block.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

// Equal but for requires_grad, which belongs to the managed value and not to what is assigned.
bool holds_same_bytes(const TensorLayout& left, const TensorLayout& right) {
  return left.storages() == right.storages() &&
         std::equal(left.fields().begin(), left.fields().end(), right.fields().begin(),
                    right.fields().end(), [](FieldLayout one, const FieldLayout& other) {
                      one.requires_grad = other.requires_grad;
                      one.inference = other.inference;
                      return one == other;
                    });
}

TensorBlock& as_tensors(const BlockPtr& block) {
  auto* tensors = dynamic_cast<TensorBlock*>(block.get());
  if (tensors == nullptr) {
    throw MaterializationError("the value is not one of tensors in memory");
  }
  return *tensors;
}

Verdict verdict_on(const Manager& manager, const ResidencyAction& action) {
  const Explanation explanation = manager.explain(std::span(&action, 1));
  return explanation.actions.empty() ? Verdict() : explanation.actions.front().verdict;
}

void throw_unless_mutable_can_be_seen(const TensorLayout& layout, Mutability mutability) {
  if (mutability == Mutability::kMutable && !layout.detects_writes()) {
    throw MaterializationError(
        "a mutable value cannot have inference tensors, whose writes nobody could see; clone them "
        "outside of inference mode");
  }
}

}  // namespace

std::shared_ptr<Manager> create_manager(ManagerOptions options, TorchBackendOptions backend) {
  return Manager::create(std::move(options), std::make_shared<TorchBackend>(std::move(backend)));
}

Handle adopt(Manager& manager, TensorResident value, const AdoptOptions& options) {
  const auto block = TensorBlock::adopt(value);
  if (options.at.has_value() && block->location() != *options.at) {
    throw MaterializationError(fmt::format("adopt: expected tensors at {}, they are at {}",
                                           to_string(*options.at), to_string(block->location())));
  }
  if (!block->owns_memory()) {
    throw MaterializationError(
        "adopt: a tensor lies in memory that it does not own (from_blob without a deleter), so "
        "that nobody could say when it is gone; clone it first");
  }
  throw_unless_mutable_can_be_seen(*block->tensor_layout(), options.mutability);
  const Location at = block->location();
  if (options.stream.has_value() && options.stream->device != at) {
    throw std::invalid_argument(
        fmt::format("adopt: the stream belongs to {}, the tensors are at {}",
                    to_string(options.stream->device), to_string(at)));
  }
  Backend& backend = manager.backend();
  std::optional<Stream> stream = options.stream;
  FencePtr ready;
  if (at.is_cuda() && backend.why_unavailable(at).empty()) {
    stream = stream.has_value() ? stream : backend.current_stream(at);
    ready = backend.record_use(*stream);
  }
  const ValueSpec spec = spec_of(block->tensor_layout(), options.mode,
                                 Recoverability::kMustPreserve, options.mutability);
  if (!options.rehome) {
    return manager.adopt(block, spec, options.type, std::move(ready));
  }
  const auto make_copy = [&] {
    CopyRequest request;
    request.spec = &spec;
    request.source = block;
    request.from = request.to = at;
    request.stream = stream;
    CopyResult copied = backend.copy(request);
    if (!at.is_cuda() && copied.ready != nullptr) {
      copied.ready->wait();  // memory of the host is its owner's again when the call returns
      if (const auto error = copied.ready->error(); error != nullptr) {
        std::rethrow_exception(error);
      }
    }
    return copied;
  };
  return manager.adopt(make_copy, at, spec, options.type);
}

Handle register_source(Manager& manager, std::shared_ptr<Source> source,
                       std::shared_ptr<const TensorLayout> layout, const SourceOptions& options) {
  const ValueSpec spec = spec_of(std::move(layout), options.mode, Recoverability::kReconstructible,
                                 options.mutability);
  if (options.at.is_disk()) {
    throw std::invalid_argument(fmt::format(
        "register_source: a source makes tensors, which cannot lie at {}", to_string(options.at)));
  }
  throw_unless_mutable_can_be_seen(static_cast<const TensorLayout&>(*spec.layout),
                                   options.mutability);
  return manager.register_source(std::move(source), spec, options.at, options.type);
}

Handle register_source(Manager& manager, const SafetensorsFile& file,
                       const std::vector<SafetensorsField>& fields, const SourceOptions& options) {
  auto source = file.source(fields);
  auto layout = source->layout();
  return register_source(manager, std::move(source), std::move(layout), options);
}

TensorResident take(Manager& manager, const Handle& handle, std::optional<Location> at) {
  const BlockPtr block = manager.take(handle, at);
  return as_tensors(block).tensors();
}

void assign(Manager& manager, const Handle& handle, const TensorResident& value) {
  if (!value.location().is_host()) {
    throw MaterializationError(fmt::format(
        "assign: expected tensors in host memory, they are at {}", to_string(value.location())));
  }
  // Before the lease, whose end makes every other materialization stale.
  const ValueSpec spec = manager.spec(handle);
  const auto layout = std::dynamic_pointer_cast<const TensorLayout>(spec.layout);
  if (layout == nullptr || !holds_same_bytes(*layout, *value.layout())) {
    throw MaterializationError(fmt::format("assign: expected the layout ({}), got ({})",
                                           layout != nullptr ? layout->describe() : "none",
                                           value.layout()->describe()));
  }
  if (spec.mutability == Mutability::kImmutable) {
    throw std::invalid_argument(
        fmt::format("assign: {} is immutable; register it as mutable", to_string(handle)));
  }
  const Location at = Location::pageable_host();
  const std::vector<Handle> handles = {handle};
  const AcquireOptions write{.access = Access::kWrite};
  const auto lease_there = [&] {
    try {
      return manager.acquire(handles, at, write);
    } catch (const UnavailableError&) {
      if (verdict_on(manager, EnsureResident{handle, at}).reason == Reason::kExclusiveElsewhere) {
        manager.move(handle, at);
        return manager.acquire(handles, at, write);
      }
      return manager.borrow(handles, at, write);
    }
  };
  Lease lease = lease_there();
  const TensorResident& managed = tensors(lease, handle);
  std::vector<bool> done(managed.layout()->storages().size(), false);
  for (std::size_t i = 0; i < managed.size(); ++i) {
    const std::uint32_t storage = managed.layout()->fields()[i].storage;
    if (!done[storage]) {
      done[storage] = true;
      c10::StorageImpl* to = managed[i].storage().unsafeGetStorageImpl();
      if (to->nbytes() != 0) {
        std::memmove(to->mutable_data(), value[i].storage().data(), to->nbytes());
      }
    }
    c10::TensorImpl* impl = managed[i].unsafeGetTensorImpl();
    if (impl->version_counter().enabled()) {
      impl->bump_version();
    }
  }
  lease.release();
}

const TensorResident& tensors(const Lease& lease, const Handle& handle) {
  View& view = lease.view(handle);
  if (typeid(view) != typeid(TensorView)) {
    throw MaterializationError("tensors: the lease was not given out by a manager of tensors");
  }
  return static_cast<TensorView&>(view).tensors();
}

}  // namespace residency
