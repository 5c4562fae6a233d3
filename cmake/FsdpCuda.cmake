# Decides whether this is a CUDA build, and finds nvcc and NCCL for one.
#
# In:  FSDP_CUDA: AUTO (where libtorch is a CUDA build and nvcc is found), ON (it must be), OFF
# Out: FSDP_CUDA: ON or OFF from here on, which is what all other files read; FSDP_NO_CUDA, why it is OFF;
#      FSDP_HAS_NCCL, FSDP_NCCL_INCLUDE, FSDP_NCCL_LIBRARY; FSDP_NO_NCCL, why there is none

# CMake itself looks in PATH alone.
find_program(FSDP_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
mark_as_advanced(FSDP_NVCC)
set(FSDP_NO_CUDA "")
if(NOT FSDP_CUDA)
  set(FSDP_NO_CUDA "FSDP_CUDA is OFF")
elseif(NOT FSDP_TORCH_HAS_CUDA)
  set(FSDP_NO_CUDA "libtorch is a CPU build")
elseif(NOT FSDP_NVCC AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  set(FSDP_NO_CUDA "no nvcc was found in PATH, CUDA_HOME or /usr/local/cuda")
endif()
if(FSDP_NO_CUDA AND FSDP_CUDA AND NOT FSDP_CUDA STREQUAL "AUTO")
  message(FATAL_ERROR "FSDP_CUDA is ${FSDP_CUDA}, but ${FSDP_NO_CUDA} (FSDP_TORCH is '${FSDP_TORCH_DIR}'): "
                      "set FSDP_TORCH to a CUDA build, install CUDA's compiler, or set FSDP_CUDA to AUTO or OFF.")
endif()
if(FSDP_NO_CUDA)
  set(FSDP_CUDA OFF)
else()
  set(FSDP_CUDA ON)
endif()

if(FSDP_CUDA)
  # A100, H100 and, compiled when the program starts, whatever comes later.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
  endif()
  if(FSDP_NVCC AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER "${FSDP_NVCC}")
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

# The NCCL that this libtorch uses comes first: a process must not hold two.
set(FSDP_HAS_NCCL OFF)
set(FSDP_NO_NCCL "there is no CUDA")
if(FSDP_CUDA)
  set(_fsdp_nccl "${FSDP_TORCH_DIR}/../nvidia/nccl")
  find_path(FSDP_NCCL_INCLUDE nccl.h HINTS "${_fsdp_nccl}/include")
  find_library(FSDP_NCCL_LIBRARY NAMES libnccl.so.2 nccl HINTS "${_fsdp_nccl}/lib")
  mark_as_advanced(FSDP_NCCL_INCLUDE FSDP_NCCL_LIBRARY)
  if(FSDP_NCCL_INCLUDE AND FSDP_NCCL_LIBRARY)
    set(FSDP_HAS_NCCL ON)
    set(FSDP_NO_NCCL "")
  else()
    set(FSDP_NO_NCCL "nccl.h or libnccl was found neither beside torch nor in the system")
  endif()
endif()
