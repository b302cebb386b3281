// Which of the machine's cards a process sees: CUDA_VISIBLE_DEVICES.
#ifndef RESIDENCY_CSRC_SIMCUDA_VISIBILITY_H
#define RESIDENCY_CSRC_SIMCUDA_VISIBILITY_H

#include <string>
#include <vector>

namespace simcuda {

// A card's UUID as NVML writes it. `card` is its place in the machine.
std::string uuid_text(int card);

// The cards that `list`, the value of CUDA_VISIBLE_DEVICES (null: not set), names: the first of
// them is device 0. As CUDA's own rules, and torch's copy of them: the list ends before the first
// entry that names no card, and is empty when one is named twice. Entries are numbers (what follows
// the digits is not looked at) or beginnings of UUIDs.
std::vector<int> visible_cards(const char* list, int num_cards);

// The value in force: of a runtime that is in use the one that it began with.
std::vector<int> visible_cards();

}  // namespace simcuda

#endif
