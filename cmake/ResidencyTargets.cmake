# How this project's own targets are compiled, and installed. Included once, by the top CMakeLists.txt.

find_program(RESIDENCY_CCACHE ccache)
mark_as_advanced(RESIDENCY_CCACHE)
if(RESIDENCY_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Relative paths and no working directory in the hash let build trees (one per torch version, the
  # wheel's, the benchmarks') share objects.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
    ${RESIDENCY_CCACHE})
endif()

# Compile flags every target of ours has. Third-party targets are imported, so their headers are
# system headers and exempt.
function(residency_own_target target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wsign-conversion)
  # Where we build it. A user's compiler may warn of other things.
  if(RESIDENCY_BUILD_TESTS)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  # GCC 12 sees an overlap that is not there where text is put together at -O3 (GCC bug 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)
  endif()
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  if(RESIDENCY_SANITIZE)
    list(JOIN RESIDENCY_SANITIZE "," kinds)
    # PUBLIC, as whatever links an instrumented library needs the same run-time library.
    target_compile_options(${target} PUBLIC
      $<BUILD_INTERFACE:-fsanitize=${kinds}> $<BUILD_INTERFACE:-fno-sanitize-recover=all>
      $<BUILD_INTERFACE:-fno-omit-frame-pointer>)
    target_link_options(${target} PUBLIC $<BUILD_INTERFACE:-fsanitize=${kinds}>)
  endif()
endfunction()

# A library of ours: residency_<name>, alias residency::<name>, installed as that component.
# NAME says the layer (core, aten); SOURCES may be empty while a layer has not been written.
function(residency_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  set(target residency_${name})
  add_library(${target} ${arg_SOURCES})
  add_library(residency::${name} ALIAS ${target})
  residency_own_target(${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  if(NOT BUILD_SHARED_LIBS)
    target_compile_definitions(${target} PUBLIC RESIDENCY_STATIC)
  endif()
  set(rpath $ORIGIN)
  if(NOT name STREQUAL core)
    if(RESIDENCY_WHEEL)
      # torch_residency/lib and torch/lib are neighbours in site-packages.
      list(APPEND rpath $ORIGIN/../../torch/lib)
    else()
      list(APPEND rpath ${ResidencyTorch_LIBRARY_DIR})
    endif()
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name} INSTALL_RPATH "${rpath}")
  if(NOT RESIDENCY_WHEEL)
    # A wheel cannot hold the symbolic links that versioned names need.
    set_target_properties(${target} PROPERTIES
      VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  endif()

  install(TARGETS ${target} EXPORT residency-${name}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/residency/${name}
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/residency)
  install(EXPORT residency-${name} FILE residency-${name}.cmake NAMESPACE residency::
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/residency)
endfunction()

# Lets a program of ours use residency_cuda and torch's CUDA code on the simulated runtime, or on the
# GPU where there is one. The same program serves both; which libcudart.so.13 it gets is decided when
# it starts.
function(residency_cuda_program target)
  target_include_directories(${target} SYSTEM PRIVATE ${RESIDENCY_CUDA_TOOLKIT_INCLUDE_DIR})
  # Before torch, so that the loader meets this libcudart first. A linker need not look for what
  # torch's libraries themselves need.
  target_link_libraries(${target} PRIVATE simcuda_cudart ${CMAKE_DL_LIBS} residency::cuda
    ${ResidencyTorch_LIBRARY_DIR}/libtorch_cuda.so ${ResidencyTorch_LIBRARY_DIR}/libc10_cuda.so)
  target_link_options(${target} PRIVATE -Wl,--no-as-needed)
  add_dependencies(${target} simcuda_cuda simcuda_nvml)
endfunction()

# One test program of GoogleTest cases, each a ctest of its own under LABEL. The cases are asked of
# the program when ctest starts, not when it is linked, so that a crash at start is a failed test
# and not a failed build. FILTER chooses among them as GoogleTest's own does.
function(residency_gtest target label)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "TIMEOUT;FILTER" "SOURCES;LIBRARIES;ENVIRONMENT")
  if(NOT arg_SOURCES)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${target} ${arg_SOURCES})
  residency_own_target(${target})
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES} GTest::gmock GTest::gtest_main)
  if(arg_ENVIRONMENT)
    # Of the property only the first variable would get through the generated scripts.
    set_target_properties(${target} PROPERTIES CROSSCOMPILING_EMULATOR "env;${arg_ENVIRONMENT}")
  endif()
  if(NOT arg_FILTER)
    set(arg_FILTER *)
  endif()
  gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 TEST_FILTER ${arg_FILTER}
    PROPERTIES LABELS ${label} TIMEOUT ${arg_TIMEOUT}
      ENVIRONMENT RESIDENCY_PYTHON=${RESIDENCY_PYTHON})
endfunction()
