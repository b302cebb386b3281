# Builds the consumer against an installed residency and runs it.
#   cmake -DPREFIX=... -DWORK_DIR=... -DCOMPONENTS=core [-DBUILD_DIR=...] [-DOPTIONS=...] [-DPRELOAD=...]
#     -P build_and_run.cmake
# With BUILD_DIR that build is installed into PREFIX first; with PRELOAD what uses devices runs a second
# time, with these libraries (of the simulated card), and must find one.

cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK_DIR})
if(BUILD_DIR)
  execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${PREFIX}
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endif()
execute_process(COMMAND ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK_DIR} -G Ninja
  -DCMAKE_PREFIX_PATH=${PREFIX} -DCOMPONENTS=${COMPONENTS} ${OPTIONS} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK_DIR} COMMAND_ERROR_IS_FATAL ANY)
foreach(component IN LISTS COMPONENTS)
  execute_process(COMMAND ${WORK_DIR}/use_${component} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
if(PRELOAD AND cuda IN_LIST COMPONENTS)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env LD_PRELOAD=${PRELOAD} ${WORK_DIR}/use_cuda
    OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  if(NOT output MATCHES "is there")
    message(FATAL_ERROR "on the simulated card: ${output}")
  endif()
endif()
