#include "csrc/simcuda/visibility.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string_view>

#include "csrc/simcuda/runtime.h"
#include "csrc/simcuda/settings.h"

namespace simcuda {
namespace {

constexpr std::string_view kUuidPrefix = "GPU-";

std::string_view without_spaces(std::string_view text) {
  size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

std::optional<int> card_of_number(std::string_view entry, int num_cards) {
  if (entry.starts_with('+')) entry.remove_prefix(1);
  int card = -1;
  for (char c : entry) {
    if (c < '0' || c > '9') break;
    card = std::max(card, 0) * 10 + (c - '0');
    if (card >= num_cards) return std::nullopt;
  }
  return card < 0 ? std::nullopt : std::optional(card);
}

std::optional<int> card_of_uuid(std::string_view beginning, int num_cards) {
  std::optional<int> found;
  for (int card = 0; card < num_cards; ++card) {
    if (!std::string_view(uuid_text(card)).starts_with(beginning)) continue;
    if (found) return std::nullopt;  // not one card's
    found = card;
  }
  return found;
}

}  // namespace

std::string uuid_text(int card) {
  char text[64];
  snprintf(text, sizeof text, "GPU-51c00000-0000-0000-0000-%012x", static_cast<unsigned>(card));
  return text;
}

std::vector<int> visible_cards(const char* list, int num_cards) {
  std::vector<int> cards;
  if (!list) {
    cards.resize(static_cast<size_t>(num_cards));
    std::iota(cards.begin(), cards.end(), 0);
    return cards;
  }
  std::string_view rest = list;
  bool by_uuid = rest.starts_with(kUuidPrefix);
  for (bool more = true; more;) {
    size_t comma = rest.find(',');
    more = comma != std::string_view::npos;
    std::string_view entry = without_spaces(rest.substr(0, comma));
    rest.remove_prefix(more ? comma + 1 : rest.size());
    std::optional<int> card =
        by_uuid ? card_of_uuid(entry, num_cards) : card_of_number(entry, num_cards);
    if (!card) break;
    if (std::find(cards.begin(), cards.end(), *card) != cards.end()) return {};
    cards.push_back(*card);
  }
  return cards;
}

std::vector<int> visible_cards() {
  if (!runtime_in_use()) {
    return visible_cards(getenv("CUDA_VISIBLE_DEVICES"), settings().num_devices);
  }
  std::vector<int> cards;
  for (const auto& device : runtime().devices) cards.push_back(device->card);
  return cards;
}

}  // namespace simcuda
