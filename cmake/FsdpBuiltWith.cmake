# This build's parts and the missing ones, in words: for the end of configuring and for the Python package.
#
# Out: FSDP_BUILT_WITH, "MPI, CUDA 13.0.48, NCCL; without Python (FSDP_PYTHON is OFF)"

set(_fsdp_parts "")
set(_fsdp_missing "")
# fsdp_part(has name version why_not)
function(fsdp_part has name version why_not)
  if(has)
    string(STRIP "${name} ${version}" part)
    set(_fsdp_parts ${_fsdp_parts} "${part}" PARENT_SCOPE)
  else()
    set(_fsdp_missing ${_fsdp_missing} "${name} (${why_not})" PARENT_SCOPE)
  endif()
endfunction()

set(_fsdp_no_mpi "none was found")
if(FSDP_MPI STREQUAL "OFF")
  set(_fsdp_no_mpi "FSDP_MPI is OFF")
endif()
fsdp_part("${FSDP_HAS_MPI}" MPI "" "${_fsdp_no_mpi}")
fsdp_part("${FSDP_CUDA}" CUDA "${CUDAToolkit_VERSION}" "${FSDP_NO_CUDA}")
fsdp_part("${FSDP_HAS_NCCL}" NCCL "" "${FSDP_NO_NCCL}")
fsdp_part("${FSDP_HAS_PYTHON}" Python "${Python_VERSION}" "${_fsdp_why_not}")

string(JOIN ", " FSDP_BUILT_WITH ${_fsdp_parts})
string(JOIN ", " _fsdp_missing ${_fsdp_missing})
if(NOT FSDP_BUILT_WITH)
  set(FSDP_BUILT_WITH "nothing optional")
endif()
if(_fsdp_missing)
  string(APPEND FSDP_BUILT_WITH "; without ${_fsdp_missing}")
endif()
