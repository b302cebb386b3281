#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "residency/aten/tensor_layout.h"

namespace residency {

/// The name that safetensors gives to a dtype, or empty when it has none.
[[nodiscard]] std::string_view safetensors_dtype(c10::ScalarType dtype) noexcept;

/// Note [Disk files]
/// ~~~~~~~~~~~~~~~~~
/// A file holds the unique storages of a value, without gaps, in the layout's order. A storage that
/// one plain field (contiguous, covering it, of a dtype that safetensors knows) describes appears
/// under that field's name; any other as bytes named `__storage_K`. The remaining fields are
/// described as views in the metadata (`residency.views`, JSON), from which any tool can rebuild
/// them. The metadata carries the content stamp (XXH64 of everything behind the header) and the
/// writer, an id that no other file ever had. Both have a fixed width, so that the size of a
/// header, and with it the charge of a file, follows from the layout alone.
///
/// Reading does not parse the header: given layout, stamp and writer there is exactly one right
/// header, and the file either begins with it or is not ours.
struct FileIdentity {
  std::uint64_t stamp = 0;
  std::uint64_t writer = 0;
  std::uint64_t serial = 0;
};

/// Everything that precedes the storages: length, JSON, padding to 8 bytes.
[[nodiscard]] std::string file_header(const TensorLayout& layout, const FileIdentity& identity);

/// One named tensor of a safetensors file.
struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<std::int64_t> sizes;
  std::uint64_t begin = 0;  ///< offset in the file
  std::uint64_t nbytes = 0;
};

/// Reads a header and checks that every tensor is where it can be: dtypes, sizes, bounds, no
/// overlap, no gap, no name twice. Throws `MaterializationError` naming the file.
[[nodiscard]] std::vector<SafetensorsEntry> parse_safetensors(const std::string& path,
                                                              const std::byte* data,
                                                              std::size_t nbytes);

/// Whether the text is well-formed UTF-8.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

}  // namespace residency
