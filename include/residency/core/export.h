#pragma once

/// @file
/// What the shared libraries of this project export.

/// Marks a class, function or variable as part of the public interface.
///
/// The libraries are compiled with hidden visibility: what lacks the mark cannot be linked against.
/// Exception types and types used with `dynamic_cast` across libraries need it as well, so that
/// every library sees one type_info. Header-only templates and inline functions do not need it.
///
/// In the head of a class GCC 12 takes no `[[nodiscard]]` beside it, in either order; say that at
/// an earlier declaration: `class [[nodiscard]] Lease;`.
#if defined(RESIDENCY_STATIC)
#define RESIDENCY_API
#else
#define RESIDENCY_API __attribute__((visibility("default")))
#endif
