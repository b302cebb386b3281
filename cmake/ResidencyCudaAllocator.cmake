# Compares the interface of torch's CUDA caching allocator with what our decorator forwards. What a
# torch release adds would otherwise end in a base class's default without a word, and what it lacks
# cannot be overridden.

# Stops when the source `decorator` does not forward one of the virtual functions of torch's
# CUDAAllocator. Of those for which it says `#ifdef RESIDENCY_CUDA_ALLOCATOR_HAS_<function>`, since
# not all supported releases have them, that is defined.
function(residency_check_cuda_allocator decorator)
  list(GET ResidencyTorch_INCLUDE_DIRS 0 include_dir)
  set(headers ${include_dir}/c10/core/Allocator.h ${include_dir}/c10/core/CachingDeviceAllocator.h
    ${include_dir}/c10/cuda/CUDACachingAllocator.h)
  set(classes Allocator DeviceAllocator CUDAAllocator)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${headers} ${decorator})
  set(functions "")
  foreach(header class IN ZIP_LISTS headers classes)
    file(READ ${header} text)
    string(REGEX REPLACE "//[^\n]*" "" text "${text}")
    string(REPLACE ";" " " text "${text}")
    string(REGEX MATCH "(struct|class) ([A-Z0-9_]+ )?${class} [^\n]*{.*" text "${text}")
    string(REGEX REPLACE "\n}.*" "" text "${text}")
    string(REGEX MATCHALL "virtual [^(]*[^(A-Za-z_]([A-Za-z_]+)\\(" found "${text}")
    foreach(declaration IN LISTS found)
      string(REGEX REPLACE ".*[^A-Za-z_]([A-Za-z_]+)\\($" "\\1" function "${declaration}")
      if(NOT declaration MATCHES "~")
        list(APPEND functions ${function})
      endif()
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES functions)
  list(LENGTH functions num_functions)
  if(num_functions LESS 40)  # 2.11 has 47
    message(FATAL_ERROR "only ${num_functions} functions found in torch's CUDAAllocator (${headers}): its headers look different now")
  endif()

  file(READ ${decorator} ours)
  set(missing "")
  foreach(function IN LISTS functions)
    if(NOT ours MATCHES "[^A-Za-z_]${function}\\([^{]*\\)[ const]* override")
      list(APPEND missing ${function})
    endif()
  endforeach()
  if(missing)
    list(JOIN missing ", " missing)
    message(FATAL_ERROR "torch ${ResidencyTorch_VERSION} has functions of CUDAAllocator that ${decorator} does not forward: ${missing}")
  endif()
  list(TRANSFORM functions PREPEND RESIDENCY_CUDA_ALLOCATOR_HAS_)
  foreach(definition IN LISTS functions)
    if(ours MATCHES "#ifdef ${definition}\n")
      set_property(SOURCE ${decorator} APPEND PROPERTY COMPILE_DEFINITIONS ${definition})
    endif()
  endforeach()
endfunction()
