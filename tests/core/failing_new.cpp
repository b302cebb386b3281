// Replaces the process's operator new and delete in all their forms: a form left out would be the
// sanitizer's, and its memory may not come to our operator delete.

#include "failing_new.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include <link.h>

namespace residency::test {
namespace {

thread_local std::uint64_t t_left = 0;
thread_local bool t_has_failed = false;

struct Code {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

/// The addresses of the library's code.
Code code_of_core() {
  Code code;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* found) {
        for (int i = 0;
             std::strstr(info->dlpi_name, "libresidency_core") != nullptr && i < info->dlpi_phnum;
             ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type == PT_LOAD && (header.p_flags & PF_X) != 0) {
            const std::uintptr_t begin = info->dlpi_addr + header.p_vaddr;
            *static_cast<Code*>(found) = {begin, begin + header.p_memsz};
          }
        }
        return 0;
      },
      &code);
  return code;
}

void* allocate_or_null(std::size_t nbytes, std::size_t alignment, const void* caller) noexcept {
  if (t_left != 0) {
    static const Code core = code_of_core();
    const auto address = reinterpret_cast<std::uintptr_t>(caller);
    if (address >= core.begin && address < core.end && --t_left == 0) {
      t_has_failed = true;
      return nullptr;
    }
  }
  return alignment != 0
             ? std::aligned_alloc(alignment, (nbytes + alignment - 1) / alignment * alignment)
             : std::malloc(nbytes != 0 ? nbytes : 1);
}

void* allocate(std::size_t nbytes, std::size_t alignment, const void* caller) {
  void* const made = allocate_or_null(nbytes, alignment, caller);
  if (made == nullptr) {
    throw std::bad_alloc();
  }
  return made;
}

}  // namespace

void fail_allocation(std::uint64_t n) noexcept {
  t_left = n;
  t_has_failed = false;
}

bool allocation_has_failed() noexcept {
  return t_has_failed;
}

AllocationsPass::AllocationsPass() noexcept : left_(std::exchange(t_left, 0)) {}

AllocationsPass::~AllocationsPass() {
  t_left = left_;
}

}  // namespace residency::test

using residency::test::allocate;
using residency::test::allocate_or_null;

void* operator new(std::size_t nbytes) {
  return allocate(nbytes, 0, __builtin_return_address(0));
}
void* operator new[](std::size_t nbytes) {
  return allocate(nbytes, 0, __builtin_return_address(0));
}
void* operator new(std::size_t nbytes, std::align_val_t alignment) {
  return allocate(nbytes, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void* operator new[](std::size_t nbytes, std::align_val_t alignment) {
  return allocate(nbytes, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void* operator new(std::size_t nbytes, const std::nothrow_t& /*tag*/) noexcept {
  return allocate_or_null(nbytes, 0, __builtin_return_address(0));
}
void* operator new[](std::size_t nbytes, const std::nothrow_t& /*tag*/) noexcept {
  return allocate_or_null(nbytes, 0, __builtin_return_address(0));
}
void* operator new(std::size_t nbytes, std::align_val_t alignment,
                   const std::nothrow_t& /*tag*/) noexcept {
  return allocate_or_null(nbytes, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void* operator new[](std::size_t nbytes, std::align_val_t alignment,
                     const std::nothrow_t& /*tag*/) noexcept {
  return allocate_or_null(nbytes, static_cast<std::size_t>(alignment), __builtin_return_address(0));
}
void operator delete(void* made) noexcept {
  std::free(made);
}
void operator delete[](void* made) noexcept {
  std::free(made);
}
void operator delete(void* made, std::size_t) noexcept {
  std::free(made);
}
void operator delete[](void* made, std::size_t) noexcept {
  std::free(made);
}
void operator delete(void* made, std::align_val_t) noexcept {
  std::free(made);
}
void operator delete[](void* made, std::align_val_t) noexcept {
  std::free(made);
}
void operator delete(void* made, std::size_t, std::align_val_t) noexcept {
  std::free(made);
}
void operator delete[](void* made, std::size_t, std::align_val_t) noexcept {
  std::free(made);
}
