// A real checkpoint, run layer by layer in less host memory than its weights need.
//
//   layers_under_budget silero_vad_16k.safetensors [directory for the disk tier]
//
// The model is Silero VAD, which tells speech from silence in audio of 16 kHz. Each of its layers
// is one value. A plan per layer brings the layer's weights into host memory, and puts them away
// after use; before anything moves, `explain` says what the plans will do and what peak memory they
// will reach. Afterwards the measured peaks are compared with the predicted ones, and the speech
// probabilities with those of a run without any management. Both must be equal to the last byte;
// the exit status is 1 when they are not.

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <numbers>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/lstm_cell.h>
#include <ATen/ops/reflection_pad1d.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include "residency/aten/manager.h"
#include "residency/aten/tensor_block.h"

namespace {

using namespace residency;
using namespace residency::literals;

// --- The model: plain arithmetic that knows nothing of residency ---------------------------------

constexpr std::int64_t kChunk = 512;   // new samples per step, 32 ms
constexpr std::int64_t kContext = 64;  // samples of the previous step that come before them
constexpr std::int64_t kPadding = 64;  // reflected samples behind them
constexpr std::int64_t kHop = 128;     // of the short-time Fourier transform
constexpr std::int64_t kBins = 129;    // frequencies that it gives
constexpr std::int64_t kHidden = 128;  // width of the recurrent layer
constexpr double kSampleRate = 16'000;

using Weights = std::map<std::string, at::Tensor, std::less<>>;

/// What the recurrent layer remembers from one chunk to the next.
struct Memory {
  at::Tensor hidden = at::zeros({1, kHidden});
  at::Tensor cell = at::zeros({1, kHidden});
};

at::Tensor spectrum(const Weights& weights, const at::Tensor& samples, Memory&) {
  const at::Tensor padded = at::reflection_pad1d(samples, {0, kPadding}).unsqueeze(1);
  const at::Tensor both = at::conv1d(padded, weights.at("weight"), {}, kHop);
  const at::Tensor real = both.narrow(1, 0, kBins);
  const at::Tensor imaginary = both.narrow(1, kBins, kBins);
  return real.square().add(imaginary.square()).sqrt();
}

template <std::int64_t kStride>
at::Tensor convolve(const Weights& weights, const at::Tensor& input, Memory&) {
  return at::conv1d(input, weights.at("weight"), weights.at("bias"), kStride, /*padding=*/1).relu();
}

at::Tensor remember(const Weights& weights, const at::Tensor& input, Memory& memory) {
  std::tie(memory.hidden, memory.cell) =
      at::lstm_cell(input.squeeze(-1), {memory.hidden, memory.cell}, weights.at("weight_ih"),
                    weights.at("weight_hh"), weights.at("bias_ih"), weights.at("bias_hh"));
  return memory.hidden;
}

at::Tensor judge(const Weights& weights, const at::Tensor& input, Memory&) {
  return at::conv1d(input.unsqueeze(-1).relu(), weights.at("weight"), weights.at("bias"))
      .sigmoid()
      .squeeze(1)
      .mean(1, /*keepdim=*/true);
}

/// How a layer's weights are kept while they are not in use.
enum class Keeping {
  kReload,  // nowhere: the checkpoint can give them again
  kMove,    // in a file of the disk tier, written each time they leave host memory
  kCopy,    // in a file of the disk tier, written once, since they never change
};

struct Layer {
  std::string_view name;
  std::string_view prefix;  // of its tensors' names in the checkpoint
  Keeping keeping;
  at::Tensor (*run)(const Weights&, const at::Tensor&, Memory&);
};

constexpr std::array<Layer, 7> kLayers = {{
    {"spectrum", "stft_conv.", Keeping::kReload, spectrum},
    {"conv1", "conv1.", Keeping::kReload, convolve<1>},
    {"conv2", "conv2.", Keeping::kMove, convolve<2>},
    {"conv3", "conv3.", Keeping::kMove, convolve<2>},
    {"conv4", "conv4.", Keeping::kCopy, convolve<1>},
    {"lstm", "lstm_cell.", Keeping::kReload, remember},
    {"final", "final_conv.", Keeping::kCopy, judge},
}};

const char* describe(Keeping keeping) {
  switch (keeping) {
    case Keeping::kReload: return "dropped after use, loaded from the checkpoint again";
    case Keeping::kMove: return "moved to disk after use and back before";
    case Keeping::kCopy: return "kept on disk, copied to host before use";
  }
  return "";
}

/// A voice-like sound between silences: harmonics of a gliding pitch around 120 Hz, loud where a
/// vowel is, in three syllables a second.
at::Tensor synthesize(std::int64_t num_chunks) {
  at::Tensor wave = at::zeros({1, num_chunks * kChunk});
  float* samples = wave.mutable_data_ptr<float>();
  const auto wave_of = [](double hertz, double time) {
    return std::sin(2 * std::numbers::pi * hertz * time);
  };
  for (std::int64_t i = wave.numel() / 6; i < wave.numel() * 5 / 6; ++i) {
    const double time = static_cast<double>(i) / kSampleRate;
    const double phase = 2 * std::numbers::pi * 120 * time + 4 * wave_of(2.5, time);
    double sum = 0;
    for (int harmonic = 1; harmonic < 30; ++harmonic) {
      const auto formant = [harmonic](double center, double width) {
        return std::exp(-std::pow((120 * harmonic - center) / width, 2));
      };
      const double loudness = formant(600 + 200 * wave_of(2, time), 300) +
                              0.6 * formant(1200, 300) + 0.3 * formant(2500, 400) + 0.02;
      sum += loudness * std::sin(harmonic * phase);
    }
    samples[i] = static_cast<float>(0.1 * sum * std::abs(wave_of(1.5, time)));
  }
  return wave;
}

using RunLayer = std::function<at::Tensor(std::size_t layer, const at::Tensor&, Memory&)>;

/// The speech probability of every chunk.
std::vector<float> detect_speech(const at::Tensor& wave, const RunLayer& run_layer) {
  std::vector<float> probabilities;
  Memory memory;
  at::Tensor context = at::zeros({1, kContext});
  for (std::int64_t begin = 0; begin < wave.size(1); begin += kChunk) {
    at::Tensor data = at::cat({context, wave.narrow(1, begin, kChunk)}, 1);
    context = data.narrow(1, kChunk, kContext);
    for (std::size_t layer = 0; layer < kLayers.size(); ++layer) {
      data = run_layer(layer, data, memory);
    }
    probabilities.push_back(data.item<float>());
  }
  return probabilities;
}

// --- The same layers as managed values -----------------------------------------------------------

// The weights need 1.2 MB, and the largest layer 516 KiB.
constexpr Bytes kHostBudget = 640_KiB;
constexpr Bytes kDiskBudget = 512_KiB;
constexpr Bytes kActivations = 64_KiB;
constexpr std::int64_t kNumChunks = 32;

constexpr Location kHost = Location::pageable_host();

Location disk() {
  return Location::disk("spill");
}

/// The layer's tensors in the checkpoint, and what the layer calls them.
std::vector<SafetensorsField> fields_of(const Layer& layer, const SafetensorsFile& checkpoint) {
  std::vector<SafetensorsField> fields;
  for (const std::string& tensor : checkpoint.names()) {
    if (tensor.starts_with(layer.prefix)) {
      fields.push_back(SafetensorsField(tensor).as(tensor.substr(layer.prefix.size())));
    }
  }
  return fields;
}

/// The layer's tensors in memory of their own.
TensorResident load(const Layer& layer, const SafetensorsFile& checkpoint) {
  const BlockPtr block = checkpoint.source(fields_of(layer, checkpoint))->load();
  return dynamic_cast<TensorBlock&>(*block).tensors();
}

Weights weights_of(const TensorResident& value) {
  Weights weights;
  for (std::size_t i = 0; i < value.size(); ++i) {
    weights.emplace(value.name(i), value[i]);
  }
  return weights;
}

/// What the layer's scope does before and after its body.
ResidencyPlan plan_for(const Layer& layer, const Handle& handle) {
  ActionList enter;
  ActionList exit;
  switch (layer.keeping) {
    case Keeping::kReload:
    case Keeping::kCopy:
      enter = {EnsureResident{handle, kHost}};
      exit = {DropResident{handle, kHost}};
      break;
    case Keeping::kMove:
      enter = {MoveResident{handle, kHost}};
      exit = {MoveResident{handle, disk()}};
      break;
  }
  return ResidencyPlan({.name = std::string(layer.name),
                        .reservations = {{kHost, kActivations, "activations"}},
                        .enter = std::move(enter),
                        .exit = std::move(exit)});
}

struct Peak {
  std::optional<Bytes> budget;
  Bytes predicted;
  Bytes measured;
};

struct PathTotals {
  std::int64_t num_transfers = 0;
  Bytes bytes;
  std::int64_t host_ns = 0;
  std::int64_t worker_ns = 0;
};

/// The model in the hands of a manager, and what its scopes did so far.
class ManagedModel {
 public:
  ManagedModel(const SafetensorsFile& checkpoint, const std::filesystem::path& directory) {
    ManagerOptions options;
    options.budgets = {{kHost, kHostBudget}};
    options.disks = {{.name = "spill", .directory = directory, .budget = kDiskBudget}};
    manager_ = create_manager(std::move(options));
    for (const Layer& layer : kLayers) {
      handles_.push_back(hand_over(layer, checkpoint));
      plans_.push_back(plan_for(layer, handles_.back()));
    }
    manager_->synchronize();
  }

  [[nodiscard]] const Manager& manager() const noexcept { return *manager_; }
  [[nodiscard]] const Handle& handle(std::size_t layer) const { return handles_.at(layer); }
  [[nodiscard]] Explanation explain(std::size_t layer) const {
    return manager_->explain(plans_.at(layer));
  }

  /// Runs one layer in its scope.
  at::Tensor run(std::size_t layer, const at::Tensor& input, Memory& memory) {
    manager_->reset_peaks();
    const Explanation predicted = explain(layer);
    at::Tensor output;
    const PlanReport report = manager_->with(plans_[layer], [&](Scope&) {
      Lease lease = manager_->acquire({&handles_[layer], 1}, kHost);
      output = kLayers[layer].run(weights_of(tensors(lease, handles_[layer])), input, memory);
      lease.release();
    });
    // What was moved to disk is under way. Let it arrive, so that the next prediction does not
    // depend on how far it has come.
    report.wait();
    compare_peaks(predicted, manager_->snapshot());
    count(report);
    return output;
  }

  [[nodiscard]] std::int64_t num_scopes() const noexcept { return num_scopes_; }
  [[nodiscard]] std::int64_t num_wrong_peaks() const noexcept { return num_wrong_peaks_; }
  [[nodiscard]] Bytes moved_bytes() const noexcept { return moved_; }
  [[nodiscard]] const std::map<Location, Peak>& peaks() const noexcept { return peaks_; }
  [[nodiscard]] const std::map<TransferPath, PathTotals>& paths() const noexcept { return paths_; }

  void close() { manager_->close({.force = true}); }

 private:
  Handle hand_over(const Layer& layer, const SafetensorsFile& checkpoint) {
    if (layer.keeping == Keeping::kReload) {
      return register_source(*manager_, checkpoint, fields_of(layer, checkpoint));
    }
    // As if these had been trained here: nobody can make them again, so they must be preserved.
    const bool keeps_copy = layer.keeping == Keeping::kCopy;
    const Handle handle =
        adopt(*manager_, load(layer, checkpoint),
              {.mode = keeps_copy ? ReplicaMode::kReplicable : ReplicaMode::kExclusive});
    manager_->move(handle, disk()).wait();
    return handle;
  }

  void compare_peaks(const Explanation& predicted, const Snapshot& measured) {
    ++num_scopes_;
    for (const PredictedLocation& each : predicted.locations) {
      const LocationSnapshot* after = measured.find(each.location);
      const Bytes used = after != nullptr ? after->peak_used : Bytes();
      const Bytes charged = after != nullptr ? after->peak_charged : Bytes();
      num_wrong_peaks_ += used != each.peak_used || charged != each.peak_charged ? 1 : 0;
      Peak& highest = peaks_[each.location];
      highest.budget = each.budget;
      highest.predicted = std::max(highest.predicted, each.peak_charged);
      highest.measured = std::max(highest.measured, charged);
    }
  }

  void count(const PlanReport& report) {
    moved_ += report.moved_bytes();
    for (const TransitionRecord& record : report.entries()) {
      PathTotals& path = paths_[record.path];
      ++path.num_transfers;
      path.bytes += record.bytes;
      path.host_ns += record.host_end_ns - record.host_start_ns;
      path.worker_ns += record.device_elapsed_ns.value_or(0);
    }
  }

  std::shared_ptr<Manager> manager_;
  std::vector<Handle> handles_;
  std::vector<ResidencyPlan> plans_;
  std::int64_t num_scopes_ = 0;
  std::int64_t num_wrong_peaks_ = 0;
  Bytes moved_;
  std::map<Location, Peak> peaks_;
  std::map<TransferPath, PathTotals> paths_;
};

// --- What is printed -----------------------------------------------------------------------------

std::string text(std::optional<Location> location) {
  return location ? to_string(*location) : "-";
}
std::string text(std::optional<Bytes> bytes) {
  return bytes ? std::to_string(bytes->count()) : "none";
}
std::string text(std::string_view word) {
  return std::string(word);
}

void print_layers(const ManagedModel& model, const SafetensorsFile& checkpoint) {
  Bytes total;
  std::printf("  %-9s %7s %9s  %s\n", "layer", "tensors", "bytes", "its weights are");
  for (const Layer& layer : kLayers) {
    const std::vector<SafetensorsField> fields = fields_of(layer, checkpoint);
    const Bytes bytes = checkpoint.layout(fields)->storage_bytes();
    total += bytes;
    std::printf("  %-9s %7zu %9s  %s\n", text(layer.name).c_str(), fields.size(),
                text(bytes).c_str(), describe(layer.keeping));
  }
  std::printf("  %-9s %7zu %9s\n\n", "all", checkpoint.names().size(), text(total).c_str());
  for (const LocationSnapshot& location : model.manager().snapshot().locations) {
    std::printf("  %-14s budget %s B\n", text(location.location).c_str(),
                text(location.budget).c_str());
  }
}

void print_explanations(const ManagedModel& model) {
  std::printf("  %-9s %-6s %-7s %-9s %-14s %-14s %8s\n", "plan", "phase", "action", "reason",
              "from", "to", "bytes");
  for (std::size_t layer = 0; layer < kLayers.size(); ++layer) {
    const Explanation explanation = model.explain(layer);
    for (const ExplainedAction& each : explanation.actions) {
      const Verdict& verdict = each.verdict;
      std::printf("  %-9s %-6s %-7s %-9s %-14s %-14s %8s\n", explanation.plan.c_str(),
                  text(to_string(each.phase)).c_str(),
                  text(to_string(kind_of(each.action))).c_str(),
                  text(to_string(verdict.reason)).c_str(), text(verdict.source).c_str(),
                  text(verdict.destination).c_str(), text(verdict.bytes).c_str());
    }
    std::printf("  %-9s %s", "", explanation.feasible ? "peak:" : "cannot be done:");
    for (const PredictedLocation& location : explanation.locations) {
      std::printf(" %s at %s,", text(location.peak_charged).c_str(),
                  text(location.location).c_str());
    }
    std::printf(" %s\n", explanation.feasible ? "reservation included"
                                              : explanation.infeasible_because.c_str());
  }
}

/// A line of levels, from 0 to 9 tenths.
void print_probabilities(const std::vector<float>& probabilities) {
  std::printf("  ");
  for (const float probability : probabilities) {
    std::printf("%d", std::min(9, static_cast<int>(10 * probability)));
  }
  std::printf("\n");
}

void print_report(const ManagedModel& model) {
  std::printf("  scopes run     %lld\n  bytes moved    %s\n\n",
              static_cast<long long>(model.num_scopes()), text(model.moved_bytes()).c_str());
  std::printf("  %-14s %10s %15s %14s\n", "location", "budget", "predicted peak", "measured peak");
  for (const auto& [location, peak] : model.peaks()) {
    std::printf("  %-14s %10s %15s %14s\n", text(location).c_str(), text(peak.budget).c_str(),
                text(peak.predicted).c_str(), text(peak.measured).c_str());
  }
  std::printf("\n  %-8s %9s %11s %12s %12s\n", "path", "count", "bytes", "host ms", "worker ms");
  for (const auto& [path, totals] : model.paths()) {
    std::printf("  %-8s %9lld %11s %12.3f %12.3f\n", text(to_string(path)).c_str(),
                static_cast<long long>(totals.num_transfers), text(totals.bytes).c_str(),
                static_cast<double>(totals.host_ns) / 1e6,
                static_cast<double>(totals.worker_ns) / 1e6);
  }
}

class Stopwatch {
 public:
  [[nodiscard]] double milliseconds() const {
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// True when all is as promised.
bool run(const std::filesystem::path& path, const std::filesystem::path& directory) {
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);  // as the model's own package does: its layers are small
  const std::shared_ptr<const SafetensorsFile> checkpoint = SafetensorsFile::open(path);
  const at::Tensor wave = synthesize(kNumChunks);

  std::printf("Layers under a budget: %s\n", path.filename().c_str());
  std::printf(
      "Tells speech from silence, with less host memory than its weights need. All figures "
      "are bytes.\n\n");
  ManagedModel model(*checkpoint, directory);
  print_layers(model, *checkpoint);

  std::printf("\nWhat one pass will do, before anything has moved\n\n");
  print_explanations(model);

  std::vector<Weights> weights;
  for (const Layer& layer : kLayers) {
    weights.push_back(weights_of(load(layer, *checkpoint)));
  }
  const RunLayer run_in_memory = [&](std::size_t layer, const at::Tensor& input, Memory& memory) {
    return kLayers[layer].run(weights[layer], input, memory);
  };
  // The first pass through any operator sets it up, which is not what is timed here.
  (void)detect_speech(wave.narrow(1, 0, kChunk), run_in_memory);

  const Stopwatch unmanaged_time;
  const std::vector<float> unmanaged = detect_speech(wave, run_in_memory);
  const double unmanaged_ms = unmanaged_time.milliseconds();

  const Stopwatch managed_time;
  const std::vector<float> managed =
      detect_speech(wave, [&](std::size_t layer, const at::Tensor& input, Memory& memory) {
        return model.run(layer, input, memory);
      });
  const double managed_ms = managed_time.milliseconds();

  std::printf("\nSpeech probability in tenths, one digit for each of %lld chunks of 32 ms\n\n",
              static_cast<long long>(kNumChunks));
  print_probabilities(managed);

  std::printf("\nWhat was done\n\n");
  print_report(model);
  std::printf("\n  time for all chunks: %.1f ms managed, %.1f ms with all weights in memory\n",
              managed_ms, unmanaged_ms);

  const bool same =
      managed.size() == unmanaged.size() &&
      std::memcmp(managed.data(), unmanaged.data(), managed.size() * sizeof(float)) == 0;
  const bool exact = model.num_wrong_peaks() == 0;
  std::printf("\n  peaks   %s\n", exact ? "measured = predicted, in every scope, at every location"
                                        : "DIFFER from what was predicted");
  std::printf("  results %s\n", same ? "equal those of the run without management, bit for bit"
                                     : "DIFFER from those of the run without management");
  model.close();
  return same && exact;
}

/// A new directory for the disk tier, removed at the end.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::filesystem::path& parent)
      : path_(parent / ("layers_under_budget." + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: %s silero_vad_16k.safetensors [directory for the disk tier]\n",
                 argv[0]);
    return 2;
  }
  try {
    const TemporaryDirectory directory(argc == 3 ? std::filesystem::path(argv[2])
                                                 : std::filesystem::temp_directory_path());
    return run(argv[1], directory.path()) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "layers_under_budget: %s\n", error.what());
    return 2;
  }
}
