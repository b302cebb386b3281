#include "csrc/simcuda/settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

#include <unistd.h>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/visibility.h"

namespace simcuda {
namespace {

// With less not even torch's first segments fit: a unit was forgotten.
constexpr uint64_t kLeastMemoryBytes = uint64_t{64} << 20;
constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Order of the FLOP rates: FP64, FP32, TF32, FP16 (and bfloat16), FP8, dense. Order of the rates:
// h2d, d2h, d2d, peer, pageable h2d, pageable d2h. Order of the times: copy_latency, launch,
// host_call, page_lock.
//
// Sources. H200: NVIDIA H200 datasheet (SXM; FP64 is that of the tensor cores; sparse figures
// halved), 4.8 TB/s HBM3e, NVLink 900 GB/s both ways together, PCIe 5 x16. A100: NVIDIA A100 80 GB
// SXM datasheet, NVLink 600 GB/s, PCIe 4 x16. RTX 4090: NVIDIA Ada architecture whitepaper, FP32
// accumulation, no peer link besides PCIe. Clocks are the boost clocks of these. A copy within the
// device reads and writes, so its rate is half the memory's. PCIe rates are what bandwidthTest
// reports on such machines (about 55 and 25 GB/s), pageable ones 10 to 12 GB/s; a launch takes
// about 5 us to start and a call about 2 us of the host; page-locking fresh memory runs at about 4
// GiB/s.
constexpr CardModel kCards[] = {
    {"h200",
     "NVIDIA H200 (simulated)",
     9,
     0,
     132,
     50,
     1.98e9,
     {67e12, 67e12, 494.7e12, 989.5e12, 1979e12},
     4.8e12,
     {55e9, 55e9, 2.4e12, 450e9, 12e9, 10e9},
     {2000, 5000, 2000, 250000}},
    {"a100",
     "NVIDIA A100-SXM4-80GB (simulated)",
     8,
     0,
     108,
     40,
     1.41e9,
     {19.5e12, 19.5e12, 156e12, 312e12, 312e12},
     2.039e12,
     {25e9, 25e9, 1.02e12, 300e9, 11e9, 10e9},
     {2000, 5000, 2000, 250000}},
    {"rtx4090",
     "NVIDIA GeForce RTX 4090 (simulated)",
     8,
     9,
     128,
     72,
     2.52e9,
     {1.29e12, 82.6e12, 82.6e12, 165.2e12, 330.3e12},
     1.008e12,
     {25e9, 25e9, 504e9, 22e9, 11e9, 10e9},
     {2000, 5000, 2000, 250000}},
    {"none",
     "Simulated device",
     9,
     0,
     132,
     50,
     kInfinite,
     {kInfinite, kInfinite, kInfinite, kInfinite, kInfinite},
     kInfinite,
     {kInfinite, kInfinite, kInfinite, kInfinite, kInfinite, kInfinite},
     {0, 0, 0, 0}},
};

// EPYC 9654: 96 cores at the all-core boost of 3.55 GHz, two 256-bit FMA pipes (AVX-512 BF16 twice
// that of FP32), twelve channels of DDR5-4800 (AMD EPYC 9004 datasheet).
constexpr HostModel kHosts[] = {
    {"epyc9654", {5.45e12, 10.9e12, 10.9e12, 21.8e12, 21.8e12}, 460.8e9},
    {"none", {kInfinite, kInfinite, kInfinite, kInfinite, kInfinite}, kInfinite},
};

struct Unit {
  std::string_view suffix;
  double factor;
};

constexpr Unit kSizeUnits[] = {{"", 1},         {"B", 1},       {"kB", 1e3},     {"MB", 1e6},
                               {"GB", 1e9},     {"TB", 1e12},   {"KiB", 0x1p10}, {"MiB", 0x1p20},
                               {"GiB", 0x1p30}, {"TiB", 0x1p40}};
constexpr Unit kTimeUnits[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};

template <size_t N>
std::optional<double> parse_quantity(std::string_view text, const Unit (&units)[N]) {
  double number = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc() || !(number >= 0)) return std::nullopt;
  std::string_view suffix(stop, static_cast<size_t>(end - stop));
  for (const Unit& unit : units) {
    if (unit.suffix == suffix) return number * unit.factor;
  }
  return std::nullopt;
}

std::optional<uint64_t> whole(std::optional<double> quantity) {
  if (!quantity || *quantity >= 0x1p63) return std::nullopt;
  return static_cast<uint64_t>(std::llround(*quantity));
}

std::optional<uint64_t> parse_integer(std::string_view text, uint64_t least, uint64_t most) {
  uint64_t number = 0;
  auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  if (number < least || number > most) return std::nullopt;
  return number;
}

std::string rate_text(double rate) {
  if (std::isinf(rate)) return "none";
  char text[64];
  snprintf(text, sizeof text, "%.0fB/s", rate);
  return text;
}

struct Key {
  const char* expected;
  bool before_first_use = false;
  std::function<bool(std::string_view)> set;  // false: not such a value
  std::function<std::string()> get;
};

class Keys {
 public:
  Keys();
  std::map<std::string, Key, std::less<>> by_name;
  std::mutex mutex;  // held while a setting changes, as a card changes many

 private:
  void add_limits();
  void add_models();
  void add_rates();
  void add_times();
  void use_card(const CardModel& card);

  // Rates and times that were set, which a card does not change.
  std::array<bool, kNumRates> own_rate_{};
  std::array<bool, kNumTimes> own_time_{};
};

Keys& keys() {
  static Keys* keys = new Keys;
  return *keys;
}

template <class Model, size_t N>
const Model* find_model(const Model (&models)[N], std::string_view key) {
  auto found = std::find_if(std::begin(models), std::end(models),
                            [&](const Model& model) { return model.key == key; });
  return found == std::end(models) ? nullptr : found;
}

void Keys::use_card(const CardModel& card) {
  settings().card = &card;
  for (size_t rate = 0; rate < card.rates.size(); ++rate) {
    if (!own_rate_[rate]) settings().rates[rate] = card.rates[rate];
  }
  for (size_t time = 0; time < card.times_ns.size(); ++time) {
    if (!own_time_[time]) settings().times_ns[time] = card.times_ns[time];
  }
}

void Keys::add_models() {
  by_name["card"] = {.expected = "h200, a100, rtx4090 or none",
                     .set =
                         [this](std::string_view text) {
                           const CardModel* card = find_model(kCards, text);
                           if (card) use_card(*card);
                           return card != nullptr;
                         },
                     .get = [] { return std::string(settings().card.load()->key); }};
  by_name["host"] = {.expected = "epyc9654 or none",
                     .set =
                         [](std::string_view text) {
                           const HostModel* host = find_model(kHosts, text);
                           if (host) settings().host = host;
                           return host != nullptr;
                         },
                     .get = [] { return std::string(settings().host.load()->key); }};
}

void Keys::add_rates() {
  constexpr const char* kNames[kNumRates] = {"h2d",  "d2h",          "d2d",
                                             "peer", "pageable_h2d", "pageable_d2h"};
  for (size_t rate = 0; rate < kNumRates; ++rate) {
    by_name[kNames[rate]] = {.expected = "a rate such as 55GB/s, or none when bytes take no time",
                             .set =
                                 [this, rate](std::string_view text) {
                                   std::optional<double> value = parse_rate(text);
                                   if (!value) return false;
                                   settings().rates[rate] = *value;
                                   own_rate_[rate] = true;
                                   return true;
                                 },
                             .get = [rate] { return rate_text(settings().rates[rate]); }};
  }
}

void Keys::add_times() {
  constexpr const char* kNames[kNumTimes] = {"copy_latency", "launch", "host_call", "page_lock",
                                             "jitter"};
  for (size_t time = 0; time < kNumTimes; ++time) {
    by_name[kNames[time]] = {
        .expected = "a time such as 10us, 1.5ms or 0",
        .set =
            [this, time](std::string_view text) {
              std::optional<uint64_t> value = parse_time_ns(text);
              if (!value) return false;
              settings().times_ns[time] = *value;
              own_time_[time] = true;
              return true;
            },
        .get = [time] { return std::to_string(settings().times_ns[time].load()) + "ns"; }};
  }
}

void Keys::add_limits() {
  by_name["devices"] = {.expected = "a number from 1 to 16",
                        .before_first_use = true,
                        .set =
                            [](std::string_view text) {
                              auto number = parse_integer(text, 1, kMaxDevices);
                              if (number) settings().num_devices = static_cast<int>(*number);
                              return number.has_value();
                            },
                        .get = [] { return std::to_string(settings().num_devices.load()); }};
  by_name["visible_devices"] = {
      .expected = "nothing: the variable CUDA_VISIBLE_DEVICES is what sets it",
      .set = [](std::string_view) { return false; },
      .get =
          [] {
            std::string text;
            for (int card : visible_cards()) {
              text += (text.empty() ? "" : ",") + std::to_string(card);
            }
            return text;
          }};
  by_name["memory"] = {.expected = "a size of at least 64MiB with its unit, such as 24GiB",
                       .before_first_use = true,
                       .set =
                           [](std::string_view text) {
                             auto bytes = parse_size(text);
                             if (!bytes || *bytes < kLeastMemoryBytes) return false;
                             settings().memory_bytes = *bytes;
                             return true;
                           },
                       .get = [] { return std::to_string(settings().memory_bytes.load()); }};
  by_name["mode"] = {.expected = "computing or dry",
                     .before_first_use = true,
                     .set =
                         [](std::string_view text) {
                           if (text != "computing" && text != "dry") return false;
                           settings().dry = text == "dry";
                           return true;
                         },
                     .get = [] { return std::string(settings().dry ? "dry" : "computing"); }};
  by_name["pinned_limit"] = {.expected = "a size such as 8GiB, or none",
                             .set =
                                 [](std::string_view text) {
                                   std::optional<uint64_t> bytes = parse_size(text);
                                   if (text == "none") bytes = UINT64_MAX;
                                   if (bytes) settings().pinned_limit_bytes = *bytes;
                                   return bytes.has_value();
                                 },
                             .get =
                                 [] {
                                   uint64_t bytes = settings().pinned_limit_bytes;
                                   return bytes == UINT64_MAX ? "none" : std::to_string(bytes);
                                 }};
  by_name["peer_access"] = {
      .expected = "on or off",
      .set =
          [](std::string_view text) {
            if (text != "on" && text != "off") return false;
            settings().peer_access = text == "on";
            return true;
          },
      .get = [] { return std::string(settings().peer_access ? "on" : "off"); }};
  by_name["poison"] = {.expected = "a byte from 0 to 255, or none",
                       .set =
                           [](std::string_view text) {
                             if (text == "none") {
                               settings().poison = -1;
                               return true;
                             }
                             auto byte = parse_integer(text, 0, 255);
                             if (byte) settings().poison = static_cast<int>(*byte);
                             return byte.has_value();
                           },
                       .get =
                           [] {
                             int byte = settings().poison;
                             return byte < 0 ? "none" : std::to_string(byte);
                           }};
  by_name["seed"] = {.expected = "a whole number",
                     .set =
                         [](std::string_view text) {
                           auto number = parse_integer(text, 0, UINT64_MAX);
                           if (number) settings().seed = *number;
                           return number.has_value();
                         },
                     .get = [] { return std::to_string(settings().seed.load()); }};
}

Keys::Keys() {
  add_models();
  add_rates();
  add_times();
  add_limits();
}

std::string known_keys() {
  std::string names;
  for (const auto& [name, key] : keys().by_name) {
    names += names.empty() ? name : ", " + name;
  }
  return names;
}

// Reads SIMCUDA_ variables when the library is loaded, so that a wrong one is told of before
// anything ran.
__attribute__((constructor)) void read_environment() {
  Hidden hidden;
  constexpr std::string_view kPrefix = "SIMCUDA_";
  for (char** entry = environ; entry && *entry; ++entry) {
    std::string_view variable = *entry;
    if (!variable.starts_with(kPrefix)) continue;
    size_t equals = variable.find('=');
    std::string key(variable.substr(kPrefix.size(), equals - kPrefix.size()));
    std::transform(key.begin(), key.end(), key.begin(), [](char c) {
      return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    });
    std::string reason = set_setting(key, variable.substr(equals + 1), false);
    if (!reason.empty()) stop_process(std::string(variable).append(": ").append(reason));
  }
}

}  // namespace

Settings::Settings() : card(&kCards[0]), host(&kHosts[0]) {
  const CardModel& defaults = kCards[0];
  for (size_t rate = 0; rate < defaults.rates.size(); ++rate) rates[rate] = defaults.rates[rate];
  for (size_t time = 0; time < defaults.times_ns.size(); ++time) {
    times_ns[time] = defaults.times_ns[time];
  }
}

Settings& settings() {
  static Settings* settings = new Settings;
  return *settings;
}

uint64_t transfer_ns(double num_bytes, Rate rate) {
  double bytes_a_second = settings().rates[rate].load(std::memory_order_relaxed);
  return static_cast<uint64_t>(std::llround(num_bytes * 1e9 / bytes_a_second));
}

uint64_t roofline_ns(const simcuda_work& work,
                     const std::array<double, SIMCUDA_NUM_PRECISIONS>& flops, double memory_rate) {
  bool known = work.precision >= 0 && work.precision < SIMCUDA_NUM_PRECISIONS;
  double flops_a_second = flops[static_cast<size_t>(known ? work.precision : +SIMCUDA_FP32)];
  double seconds = std::max(work.flops / flops_a_second, work.bytes / memory_rate);
  return static_cast<uint64_t>(std::llround(std::max(seconds, 0.0) * 1e9));
}

std::optional<uint64_t> parse_size(std::string_view text) {
  return whole(parse_quantity(text, kSizeUnits));
}

std::optional<double> parse_rate(std::string_view text) {
  if (text == "none") return kInfinite;
  constexpr std::string_view kSuffix = "/s";
  if (!text.ends_with(kSuffix)) return std::nullopt;
  text.remove_suffix(kSuffix.size());
  std::optional<double> rate = parse_quantity(text, kSizeUnits);
  // Without a unit of bytes "55/s" would be 55 bytes a second, which nobody means.
  bool has_unit = !text.empty() && text.back() == 'B';
  if (!rate || !has_unit || *rate <= 0) return std::nullopt;
  return rate;
}

std::optional<uint64_t> parse_time_ns(std::string_view text) {
  if (text == "0") return 0;
  return whole(parse_quantity(text, kTimeUnits));
}

std::string set_setting(std::string_view name, std::string_view value, bool in_use) {
  auto found = keys().by_name.find(name);
  std::string quoted = "'";
  quoted.append(name).append("'");
  if (found == keys().by_name.end()) {
    return "unknown setting " + quoted + "; known are " + known_keys();
  }
  Key& key = found->second;
  if (in_use && key.before_first_use) {
    return quoted + " can be set only before the first use of the runtime";
  }
  std::lock_guard<std::mutex> lock(keys().mutex);
  if (key.set(value)) return "";
  return quoted.append(" is '").append(value).append("', expected ").append(key.expected);
}

std::optional<std::string> get_setting(std::string_view name) {
  auto found = keys().by_name.find(name);
  if (found == keys().by_name.end()) return std::nullopt;
  return found->second.get();
}

}  // namespace simcuda
