# Fails when core could see torch or CUDA: by the directories its target is given, by an include in
# its own files, or by a library that the built one asks for.

set(foreign "(^|[^a-z])(torch|ATen|c10|cuda)(/|$|[^a-z_])")

file(STRINGS ${SEEN} lines)
foreach(line IN LISTS lines)
  # The checkout may lie in a folder named after torch.
  string(REPLACE "${SOURCE_DIR}" "" line "${line}")
  if(line MATCHES "${foreign}")
    message(SEND_ERROR "the target residency_core is given: ${line}")
  endif()
endforeach()

file(GLOB_RECURSE files ${SOURCE_DIR}/include/residency/core/* ${SOURCE_DIR}/csrc/core/*.h ${SOURCE_DIR}/csrc/core/*.cpp)
list(LENGTH files num_files)
if(num_files LESS 2)
  message(SEND_ERROR "found no sources of core under ${SOURCE_DIR}")
endif()
foreach(file IN LISTS files)
  file(STRINGS ${file} includes REGEX "^[ \t]*#[ \t]*include")
  foreach(include IN LISTS includes)
    if(include MATCHES "[<\"](torch|ATen|c10|cuda|caffe2)" OR include MATCHES "residency/(aten|cuda|nn)/")
      message(SEND_ERROR "${file}: ${include}")
    endif()
  endforeach()
endforeach()

execute_process(COMMAND readelf -d ${LIBRARY} OUTPUT_VARIABLE dynamic RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(SEND_ERROR "readelf could not read ${LIBRARY}")
endif()
if(dynamic MATCHES "NEEDED[^\n]*(torch|c10|cuda)")
  message(SEND_ERROR "${LIBRARY} needs ${CMAKE_MATCH_0}")
endif()
