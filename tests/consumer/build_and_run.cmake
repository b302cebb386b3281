# Builds the consumer against an installed residency and runs it.
#   cmake -DPREFIX=... -DWORK_DIR=... -DCOMPONENTS=core [-DBUILD_DIR=...] [-DOPTIONS=...] -P build_and_run.cmake
# With BUILD_DIR that build is installed into PREFIX first.

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
