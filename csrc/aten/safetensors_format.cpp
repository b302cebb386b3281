#include "csrc/aten/safetensors_format.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "csrc/aten/content_stamp.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

struct DtypeName {
  std::string_view name;
  c10::ScalarType dtype;
  unsigned num_bits;
};

constexpr std::array kDtypes = {
    DtypeName{"BOOL", c10::ScalarType::Bool, 8},
    DtypeName{"U8", c10::ScalarType::Byte, 8},
    DtypeName{"I8", c10::ScalarType::Char, 8},
    DtypeName{"U16", c10::ScalarType::UInt16, 16},
    DtypeName{"I16", c10::ScalarType::Short, 16},
    DtypeName{"U32", c10::ScalarType::UInt32, 32},
    DtypeName{"I32", c10::ScalarType::Int, 32},
    DtypeName{"U64", c10::ScalarType::UInt64, 64},
    DtypeName{"I64", c10::ScalarType::Long, 64},
    DtypeName{"F16", c10::ScalarType::Half, 16},
    DtypeName{"BF16", c10::ScalarType::BFloat16, 16},
    DtypeName{"F32", c10::ScalarType::Float, 32},
    DtypeName{"F64", c10::ScalarType::Double, 64},
    DtypeName{"C64", c10::ScalarType::ComplexFloat, 64},
    DtypeName{"F8_E4M3", c10::ScalarType::Float8_e4m3fn, 8},
    DtypeName{"F8_E5M2", c10::ScalarType::Float8_e5m2, 8},
    DtypeName{"F8_E4M3FNUZ", c10::ScalarType::Float8_e4m3fnuz, 8},
    DtypeName{"F8_E5M2FNUZ", c10::ScalarType::Float8_e5m2fnuz, 8},
    DtypeName{"F8_E8M0", c10::ScalarType::Float8_e8m0fnu, 8},
    // Two elements a byte; torch counts pairs, the file counts elements.
    DtypeName{"F4", c10::ScalarType::Float4_e2m1fn_x2, 4},
};

const DtypeName* find_dtype(c10::ScalarType dtype) noexcept {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(),
                                  [&](const DtypeName& entry) { return entry.dtype == dtype; });
  return found == kDtypes.end() ? nullptr : &*found;
}

void append_json_string(std::string& text, std::string_view value) {
  text += '"';
  for (const char character : value) {
    if (character == '"' || character == '\\') {
      text += '\\';
      text += character;
    } else if (static_cast<unsigned char>(character) < 0x20) {
      fmt::format_to(std::back_inserter(text), "\\u{:04x}", static_cast<unsigned>(character));
    } else {
      text += character;
    }
  }
  text += '"';
}

bool is_contiguous(const FieldLayout& field) noexcept {
  std::int64_t expected = 1;
  for (std::size_t i = field.sizes.size(); i-- > 0;) {
    if (field.sizes[i] != 1 && field.strides[i] != expected) {
      return false;
    }
    expected *= field.sizes[i];
  }
  return true;
}

bool is_plain(const FieldLayout& field, Bytes storage) {
  const DtypeName* dtype = find_dtype(field.dtype);
  // F4 is left out: which files may hold it, and how it is counted, differs between readers.
  return dtype != nullptr && dtype->num_bits >= 8 && !field.name.starts_with("__") &&
         !field.conjugate && !field.negative && field.storage_offset == 0 &&
         num_elements(field) * (dtype->num_bits / 8) == storage.count() &&
         (storage.count() == 0 || is_contiguous(field));
}

}  // namespace

std::string_view safetensors_dtype(c10::ScalarType dtype) noexcept {
  const DtypeName* found = find_dtype(dtype);
  return found == nullptr ? std::string_view() : found->name;
}

bool is_utf8(std::string_view text) noexcept {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xc2 ? 0
                               : lead < 0xe0 ? 2
                               : lead < 0xf0 ? 3
                               : lead < 0xf5 ? 4
                                             : 0;
    if (length == 0 || i + length > text.size()) {
      return false;
    }
    for (std::size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      const bool second = k == 1;
      const unsigned low = second && lead == 0xe0 ? 0xa0U : second && lead == 0xf0 ? 0x90U : 0x80U;
      const unsigned high = second && lead == 0xed ? 0x9fU : second && lead == 0xf4 ? 0x8fU : 0xbfU;
      if (next < low || next > high) {
        return false;
      }
    }
    i += length;
  }
  return true;
}

std::string file_header(const TensorLayout& layout, const FileIdentity& identity) {
  const auto& fields = layout.fields();
  const auto& storages = layout.storages();

  std::vector<const FieldLayout*> plain(storages.size(), nullptr);
  for (const FieldLayout& field : fields) {
    if (plain[field.storage] == nullptr && is_plain(field, storages[field.storage])) {
      plain[field.storage] = &field;
    }
  }
  const auto name_of = [&](std::uint32_t storage) {
    return plain[storage] != nullptr ? plain[storage]->name : fmt::format("__storage_{}", storage);
  };

  std::string views;
  for (const FieldLayout& field : fields) {
    if (plain[field.storage] == &field) {
      continue;
    }
    views += views.empty() ? "[{\"name\":" : ",{\"name\":";
    append_json_string(views, field.name);
    views += ",\"storage\":";
    append_json_string(views, name_of(field.storage));
    const std::string_view dtype = safetensors_dtype(field.dtype);
    fmt::format_to(std::back_inserter(views),
                   ",\"dtype\":\"{}\",\"shape\":[{}],\"strides\":[{}],\"storage_offset\":{}",
                   dtype.empty() ? std::string_view(c10::toString(field.dtype)) : dtype,
                   fmt::join(field.sizes, ","), fmt::join(field.strides, ","),
                   field.storage_offset);
    views += field.conjugate ? ",\"conjugate\":true" : "";
    views += field.negative ? ",\"negative\":true}" : "}";
  }

  std::string json = fmt::format(
      "{{\"__metadata__\":{{\"residency.stamp\":\"xxh64:{}\",\"residency.writer\":\"{}-{}\"",
      fixed_width_hex(identity.stamp), fixed_width_hex(identity.writer),
      fixed_width_hex(identity.serial));
  if (!views.empty()) {
    json += ",\"residency.views\":";
    append_json_string(json, views + "]");
  }
  json += '}';
  std::int64_t begin = 0;
  for (const std::uint32_t storage : layout.order()) {
    json += ',';
    append_json_string(json, name_of(storage));
    const std::int64_t end = begin + storages[storage].count();
    if (const FieldLayout* field = plain[storage]; field != nullptr) {
      fmt::format_to(std::back_inserter(json), ":{{\"dtype\":\"{}\",\"shape\":[{}]",
                     safetensors_dtype(field->dtype), fmt::join(field->sizes, ","));
    } else {
      fmt::format_to(std::back_inserter(json), ":{{\"dtype\":\"U8\",\"shape\":[{}]",
                     storages[storage].count());
    }
    fmt::format_to(std::back_inserter(json), ",\"data_offsets\":[{},{}]}}", begin, end);
    begin = end;
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');

  std::string header(8, '\0');
  const std::uint64_t length = json.size();
  for (std::size_t i = 0; i < 8; ++i) {
    header[i] = static_cast<char>((length >> (8 * i)) & 0xffU);
  }
  return header + json;
}

std::vector<SafetensorsEntry> parse_safetensors(const std::string& path, const std::byte* data,
                                                std::size_t nbytes) {
  using nlohmann::json;
  const auto refuse = [&](const std::string& what) -> MaterializationError {
    return MaterializationError(fmt::format("{}: not a valid safetensors file: {}", path, what));
  };
  constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference reader

  if (nbytes < 8) {
    throw refuse(fmt::format("expected at least 8 bytes, the file has {}", nbytes));
  }
  std::uint64_t header_bytes = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    header_bytes |= std::to_integer<std::uint64_t>(data[i]) << (8 * i);
  }
  if (header_bytes > kMaxHeaderBytes) {
    throw refuse(fmt::format("it claims a header of {} bytes, the limit is {}", header_bytes,
                             kMaxHeaderBytes));
  }
  if (header_bytes > nbytes - 8) {
    throw refuse(fmt::format("it is truncated: a header of {} bytes in a file of {} bytes",
                             header_bytes, nbytes));
  }
  const std::uint64_t data_begin = 8 + header_bytes;
  const std::uint64_t data_bytes = nbytes - data_begin;

  json header;
  std::set<std::string> names;
  std::string twice;
  try {
    const auto* text = reinterpret_cast<const char*>(data) + 8;
    header = json::parse(text, text + header_bytes,
                         [&](int depth, json::parse_event_t event, json& parsed) {
                           if (depth == 1 && event == json::parse_event_t::key) {
                             const auto& name = parsed.get_ref<const std::string&>();
                             if (!names.insert(name).second && twice.empty()) {
                               twice = name;
                             }
                           }
                           return true;
                         });
  } catch (const json::exception& error) {
    throw refuse(fmt::format("its header is not JSON: {}", error.what()));
  }
  if (!header.is_object()) {
    throw refuse("its header is not a JSON object");
  }
  if (!twice.empty()) {
    throw refuse(fmt::format("the name '{}' appears twice", twice));
  }

  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, fields] : header.items()) {
    if (name == "__metadata__") {
      continue;
    }
    const auto refuse_tensor = [&, &name = name](const std::string& what) {
      return refuse(fmt::format("tensor '{}' {}", name, what));
    };
    if (!fields.is_object()) {
      throw refuse_tensor("is not described by an object");
    }
    const auto dtype_text = fields.find("dtype");
    const auto shape = fields.find("shape");
    const auto offsets = fields.find("data_offsets");
    if (dtype_text == fields.end() || !dtype_text->is_string() || shape == fields.end() ||
        !shape->is_array() || offsets == fields.end() || !offsets->is_array() ||
        offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
        !(*offsets)[1].is_number_unsigned()) {
      throw refuse_tensor("lacks a dtype, a shape or two data_offsets");
    }
    const auto& dtype_name = dtype_text->get_ref<const std::string&>();
    const auto dtype = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& entry) {
      return entry.name == dtype_name;
    });
    if (dtype == kDtypes.end()) {
      throw refuse_tensor(fmt::format("has the dtype '{}', which torch does not have", dtype_name));
    }
    SafetensorsEntry entry{name, dtype->dtype, {}, 0, 0};
    std::uint64_t num_bits = dtype->num_bits;
    for (const json& size : *shape) {
      if (!size.is_number_unsigned() ||
          size.get<std::uint64_t>() > static_cast<std::uint64_t>(Bytes::max().count()) ||
          __builtin_mul_overflow(num_bits, size.get<std::uint64_t>(), &num_bits)) {
        throw refuse_tensor("has an impossible shape");
      }
      entry.sizes.push_back(size.get<std::int64_t>());
    }
    if (dtype->num_bits < 8) {
      if (entry.sizes.empty() || entry.sizes.back() % 2 != 0) {
        throw refuse_tensor("packs two elements a byte, but its last dimension is not even");
      }
      entry.sizes.back() /= 2;
    }
    const auto begin = (*offsets)[0].get<std::uint64_t>();
    const auto end = (*offsets)[1].get<std::uint64_t>();
    if (begin > end || end > data_bytes) {
      throw refuse_tensor(fmt::format("claims bytes {} to {} of {}", begin, end, data_bytes));
    }
    if (num_bits / 8 != end - begin) {
      throw refuse_tensor(
          fmt::format("has {} bytes, its shape and dtype need {}", end - begin, num_bits / 8));
    }
    entry.begin = data_begin + begin;
    entry.nbytes = end - begin;
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const auto& left, const auto& right) {
    return std::pair(left.begin, left.nbytes) < std::pair(right.begin, right.nbytes);
  });
  std::uint64_t at = data_begin;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != at) {
      throw refuse(fmt::format("tensor '{}' {} the one before it", entry.name,
                               entry.begin < at ? "overlaps" : "leaves a gap to"));
    }
    at += entry.nbytes;
  }
  if (at != nbytes) {
    throw refuse(fmt::format("its tensors end at byte {}, the file at byte {}", at, nbytes));
  }
  return entries;
}

}  // namespace residency
