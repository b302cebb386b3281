// The settings of control.h: parsed from the environment when the library starts, and by
// simcuda_set. Readers take no lock.
#ifndef RESIDENCY_CSRC_SIMCUDA_SETTINGS_H
#define RESIDENCY_CSRC_SIMCUDA_SETTINGS_H

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "include/residency/simcuda/control.h"

namespace simcuda {

inline constexpr int kMaxDevices = 16;

enum Rate { kH2D, kD2H, kD2D, kPeer, kPageableH2D, kPageableD2H, kNumRates };
enum Time { kCopyLatency, kLaunch, kHostCall, kPageLock, kJitter, kNumTimes };

// A card's figures: what it computes with, and the link it is reached by.
struct CardModel {
  std::string_view key;
  const char* title;
  int compute_major;
  int compute_minor;
  int num_multiprocessors;
  int l2_mib;
  double cycles_a_second;                            // boost clock of the multiprocessors
  std::array<double, SIMCUDA_NUM_PRECISIONS> flops;  // a second
  double memory_rate;                                // bytes a second
  std::array<double, kNumRates> rates;               // bytes a second
  std::array<uint64_t, kJitter> times_ns;
};

struct HostModel {
  std::string_view key;
  std::array<double, SIMCUDA_NUM_PRECISIONS> flops;
  double memory_rate;
};

struct Settings {
  Settings();

  std::atomic<int> num_devices{1};
  std::atomic<uint64_t> memory_bytes{uint64_t{1} << 30};
  std::atomic<bool> dry{false};
  std::atomic<const CardModel*> card;
  std::atomic<const HostModel*> host;
  // Bytes a second; infinite when the bytes take no time.
  std::array<std::atomic<double>, kNumRates> rates;
  std::array<std::atomic<uint64_t>, kNumTimes> times_ns{};
  std::atomic<uint64_t> pinned_limit_bytes{UINT64_MAX};
  std::atomic<bool> peer_access{true};
  std::atomic<int> poison{-1};
  std::atomic<uint64_t> seed{1};
};

Settings& settings();

inline uint64_t time_ns(Time time) {
  return settings().times_ns[time].load(std::memory_order_relaxed);
}

// How long so many bytes take at a rate.
uint64_t transfer_ns(double num_bytes, Rate rate);

// Duration of work that is bound by arithmetic or by memory.
uint64_t roofline_ns(const simcuda_work& work,
                     const std::array<double, SIMCUDA_NUM_PRECISIONS>& flops, double memory_rate);

// Texts with units. Nothing when the text is not one.
std::optional<uint64_t> parse_size(std::string_view text);     // 24GiB, 512MiB, 1000000
std::optional<double> parse_rate(std::string_view text);       // 55GB/s, none
std::optional<uint64_t> parse_time_ns(std::string_view text);  // 10us, 1.5ms, 0

// Keep the key's value; the answer is empty, or says why not. `in_use` refuses what must be set
// before the first use.
std::string set_setting(std::string_view key, std::string_view value, bool in_use);
std::optional<std::string> get_setting(std::string_view key);

}  // namespace simcuda

#endif
