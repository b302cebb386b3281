#pragma once

#include <filesystem>
#include <optional>

#include "residency/core/bytes.h"

namespace residency {

/// What more this process may lock, of which this library has locked so much: the least of
/// `ulimit -l`, where the process has no CAP_IPC_LOCK, and of the memory limits of its cgroups
/// (version 2), where the page cache makes room. None where neither limits it. Reads what the
/// kernel says under `root`.
[[nodiscard]] std::optional<Bytes> lockable_bytes(Bytes locked,
                                                  const std::filesystem::path& root = "/");

}  // namespace residency
