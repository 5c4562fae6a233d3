# Finds the Python whose torch this is, for the module fsdp_cpp._C.
#
# In:  FSDP_PYTHON: AUTO (where it can be built), ON (it must be), OFF
# Out: FSDP_HAS_PYTHON, Python_* of FindPython, FSDP_TORCH_PYTHON (libtorch_python.so)

set(FSDP_HAS_PYTHON OFF)
set(FSDP_TORCH_PYTHON "${FSDP_TORCH_DIR}/lib/libtorch_python.so")
set(_fsdp_why_not "")
if(FSDP_PYTHON STREQUAL "OFF")
  set(_fsdp_why_not "FSDP_PYTHON is OFF")
elseif(NOT EXISTS "${FSDP_TORCH_PYTHON}")
  set(_fsdp_why_not "the libtorch at '${FSDP_TORCH_DIR}' is without Python")
else()
  # torch lies in <prefix>/lib/python3.X/site-packages of its interpreter.
  file(GLOB _fsdp_interpreter "${FSDP_TORCH_DIR}/../../../../bin/python3")
  if(_fsdp_interpreter AND NOT Python_EXECUTABLE)
    list(GET _fsdp_interpreter 0 Python_EXECUTABLE)
  endif()
  find_package(Python 3.10 COMPONENTS Interpreter Development.Module QUIET)
  if(Python_FOUND)
    set(FSDP_HAS_PYTHON ON)
  else()
    set(_fsdp_why_not "no Python with its headers was found (Debian: python3-dev)")
  endif()
endif()
if(FSDP_PYTHON STREQUAL "ON" AND NOT FSDP_HAS_PYTHON)
  message(FATAL_ERROR "FSDP_PYTHON is ON, but ${_fsdp_why_not}: install what is missing, or set FSDP_PYTHON=OFF.")
endif()
