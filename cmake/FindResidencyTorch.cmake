# Finds the libraries of an installed torch wheel.
#
# torch's own TorchConfig.cmake is not used: with a CUDA wheel it wants a CUDA compiler and probes
# architectures. This asks Python where the package is, without importing it, in a fraction of a
# second.
#
# Input:   RESIDENCY_TORCH_DIR  folder of the package torch; found when unset, from
#          RESIDENCY_PYTHON     the interpreter that has torch
# Output:  ResidencyTorch_FOUND, ResidencyTorch_VERSION (2.15.0), ResidencyTorch_MINOR (2.15),
#          ResidencyTorch_LIBRARY_DIR, ResidencyTorch_INCLUDE_DIRS
# Targets: ResidencyTorch::c10, ResidencyTorch::torch_cpu; their headers are system headers.

if(NOT RESIDENCY_TORCH_DIR)
  if(NOT RESIDENCY_PYTHON)
    if(EXISTS ${CMAKE_SOURCE_DIR}/.venv/bin/python)
      set(RESIDENCY_PYTHON ${CMAKE_SOURCE_DIR}/.venv/bin/python)
    else()
      find_program(RESIDENCY_PYTHON NAMES python3 python)
    endif()
  endif()
  execute_process(
    COMMAND ${RESIDENCY_PYTHON} -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s and s.origin else '')"
    OUTPUT_VARIABLE _torch_dir ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
else()
  set(_torch_dir ${RESIDENCY_TORCH_DIR})
endif()

unset(ResidencyTorch_VERSION)
unset(ResidencyTorch_LIBRARY_DIR)
unset(ResidencyTorch_INCLUDE_DIRS)
if(_torch_dir AND EXISTS ${_torch_dir}/version.py)
  file(STRINGS ${_torch_dir}/version.py _version_line REGEX "^__version__ = ")
  string(REGEX MATCH "([0-9]+\\.[0-9]+)\\.[0-9]+" ResidencyTorch_VERSION "${_version_line}")
  set(ResidencyTorch_MINOR ${CMAKE_MATCH_1})
  set(ResidencyTorch_LIBRARY_DIR ${_torch_dir}/lib)
  set(ResidencyTorch_INCLUDE_DIRS ${_torch_dir}/include ${_torch_dir}/include/torch/csrc/api/include)
endif()

set(_reason "")
if(NOT ResidencyTorch_VERSION)
  set(_reason "no torch in ${RESIDENCY_PYTHON}${RESIDENCY_TORCH_DIR}; say which Python has it with -DRESIDENCY_PYTHON=/path/to/python")
else()
  # Mixing the two string ABIs links some symbols and not others, so it is refused up front.
  file(STRINGS ${_torch_dir}/share/cmake/Torch/TorchConfig.cmake _old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(_old_abi)
    set(_reason "torch ${ResidencyTorch_VERSION} in ${_torch_dir} is built with the pre-C++11 ABI; use a wheel of torch 2.11 or newer")
  elseif(ResidencyTorch_VERSION VERSION_LESS 2.11)
    set(_reason "torch ${ResidencyTorch_VERSION} in ${_torch_dir} is older than the oldest supported version, 2.11")
  endif()
endif()

include(FindPackageHandleStandardArgs)
if(_reason)
  set(ResidencyTorch_FOUND OFF)
  set(ResidencyTorch_NOT_FOUND_MESSAGE "${_reason}")
  if(ResidencyTorch_FIND_REQUIRED)
    message(FATAL_ERROR "${_reason}")
  elseif(NOT ResidencyTorch_FIND_QUIETLY)
    message(STATUS "Could NOT find ResidencyTorch: ${_reason}")
  endif()
  return()
endif()
find_package_handle_standard_args(ResidencyTorch
  REQUIRED_VARS ResidencyTorch_LIBRARY_DIR ResidencyTorch_INCLUDE_DIRS
  VERSION_VAR ResidencyTorch_VERSION)

if(NOT TARGET ResidencyTorch::c10)
  foreach(_name c10 torch_cpu)
    add_library(ResidencyTorch::${_name} SHARED IMPORTED)
    set_target_properties(ResidencyTorch::${_name} PROPERTIES
      IMPORTED_LOCATION ${ResidencyTorch_LIBRARY_DIR}/lib${_name}.so
      INTERFACE_INCLUDE_DIRECTORIES "${ResidencyTorch_INCLUDE_DIRS}")
  endforeach()
  target_link_libraries(ResidencyTorch::torch_cpu INTERFACE ResidencyTorch::c10)
  # The CUDA wheel's libtorch_cpu needs libcudart and libcupti, which it finds by its own RPATH when
  # it is loaded; a linker need not look for them.
  target_link_options(ResidencyTorch::torch_cpu INTERFACE LINKER:--allow-shlib-undefined)
endif()
