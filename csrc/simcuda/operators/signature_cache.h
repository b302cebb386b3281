#ifndef RESIDENCY_SIMCUDA_OPERATORS_SIGNATURE_CACHE_H
#define RESIDENCY_SIMCUDA_OPERATORS_SIGNATURE_CACHE_H

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "csrc/simcuda/operators/cost.h"
#include "csrc/simcuda/operators/operator_traits.h"
#include "csrc/simcuda/operators/tensor_spec.h"

namespace residency::simcuda {

/// What the shape of a call's results depends on, as words: dtypes, sizes, strides and flags of the
/// tensors and the values of the other arguments, but not of numbers unless they shape the result.
class Signature {
 public:
  /// Not `cacheable()` when an argument is of a kind that it cannot express.
  Signature(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments);

  [[nodiscard]] bool cacheable() const { return cacheable_; }
  [[nodiscard]] c10::ArrayRef<uint64_t> words() const { return words_; }
  [[nodiscard]] uint64_t hash() const { return hash_; }

 private:
  void add(const OperatorTraits& traits, ArgumentKind kind, const c10::IValue& value);
  void add_tensor(const at::Tensor& tensor);
  void add_plain(const c10::IValue& value, bool with_numbers);

  c10::SmallVector<uint64_t, 96> words_;
  uint64_t hash_ = 0;
  bool cacheable_ = true;
};

/// How to run a call: made once for each signature, by the shape inference of PyTorch's meta
/// kernels. These are Python decompositions once torch has been imported and take 0.4 to 2.6 ms.
struct Plan {
  /// The host waits for the kernel before the results exist: their sizes depend on values, or the
  /// operator has no shape inference.
  bool synchronous = false;
  std::string why_synchronous;
  /// Half-precision arguments that the CPU's kernel refuses may be widened; not where the shape
  /// inference has refused the call.
  bool widens = true;

  std::vector<TensorSpec> inputs;   ///< of the device tensors, in the order of the arguments
  std::vector<TensorSpec> outputs;  ///< of new results; undefined where there is none
  /// For each result: how many of `outputs` it has; more than one, or none, for lists only.
  std::vector<size_t> num_outputs;
  /// New specs of out= arguments, undefined where they keep theirs; one for each result.
  std::vector<TensorSpec> resized;
  /// The out= variant can run on the outputs themselves; false once it was seen that it cannot.
  mutable std::atomic<bool> writes_outputs = false;
  Cost cost;
};

/// The plans of one operator by signature. Thread-safe. Bounded: when the plans' signatures have
/// grown past a limit, it starts anew, which costs a program with ever new shapes one inference
/// each anyway.
class SignatureCache {
 public:
  [[nodiscard]] std::shared_ptr<const Plan> find(const Signature& signature) const;
  void insert(const Signature& signature, std::shared_ptr<const Plan> plan);

 private:
  static constexpr size_t kMaxWords = 256 * 1024;

  struct Entry {
    std::vector<uint64_t> words;
    std::shared_ptr<const Plan> plan;
  };

  mutable std::mutex mutex_;
  std::unordered_multimap<uint64_t, Entry> entries_;
  size_t num_words_ = 0;
};

}  // namespace residency::simcuda

#endif
