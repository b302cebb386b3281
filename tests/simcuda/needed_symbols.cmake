# Checks the lists of symbols: what a torch needs is exported, and the list of a torch that is
# there is up to date.
#
# cmake -DRUNTIME=libcudart.so.13 -DCUPTI=libcupti.so.13 -DLIST=torch-2.11.txt [-DTOOL=needed_symbols -DTORCH_LIBRARIES=dir] -P ...
execute_process(COMMAND nm -D --defined-only ${RUNTIME} ${CUPTI} OUTPUT_VARIABLE exported COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${LIST} needed)
set(missing "")
foreach(name ${needed})
  if(NOT exported MATCHES "[TW] ${name}@@libcu(dart|pti).so.13")
    list(APPEND missing ${name})
  endif()
endforeach()
if(missing)
  message(FATAL_ERROR "The simulated libraries lack what ${LIST} needs: ${missing}. Write them, or add those of the runtime to symbols/cudart-13.txt (a stub).")
endif()
if(TORCH_LIBRARIES)
  execute_process(COMMAND ${TOOL} ${TORCH_LIBRARIES} OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${LIST} kept)
  if(NOT found STREQUAL kept)
    message(FATAL_ERROR "${LIST} is not what the libraries in ${TORCH_LIBRARIES} need. Update it with: ${TOOL} ${TORCH_LIBRARIES} > ${LIST}")
  endif()
endif()
