# What the project stands on; docs/dependencies.md says why each is here.

include(FsdpTorch)

# fsdp_header_library(package version target header debian_package): a library that is headers alone,
# from its CMake package or, where only the headers were copied, from the include path.
function(fsdp_header_library package version target header debian_package)
  find_package(${package} ${version} QUIET)
  if(TARGET ${target})
    return()
  endif()
  find_path(FSDP_${package}_INCLUDE ${header})
  mark_as_advanced(FSDP_${package}_INCLUDE)
  if(NOT FSDP_${package}_INCLUDE)
    message(FATAL_ERROR "${package} ${version} was not found: run `make setup`, or install ${debian_package}.")
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} SYSTEM INTERFACE "${FSDP_${package}_INCLUDE}")
endfunction()
fsdp_header_library(nlohmann_json 3.10 nlohmann_json::nlohmann_json nlohmann/json.hpp nlohmann-json3-dev)
fsdp_header_library(CLI11 2.1 CLI11::CLI11 CLI/CLI.hpp libcli11-dev)

set(FSDP_HAS_MPI OFF)
if(NOT FSDP_MPI STREQUAL "OFF")
  set(MPI_CXX_SKIP_MPICXX ON)  # the C interface is all we use
  find_package(MPI COMPONENTS CXX QUIET)
  if(MPI_CXX_FOUND)
    set(FSDP_HAS_MPI ON)
  elseif(FSDP_MPI STREQUAL "ON")
    message(FATAL_ERROR "FSDP_MPI is ON, but no MPI was found: install libopenmpi-dev and openmpi-bin, or set FSDP_MPI=OFF.")
  endif()
endif()

if(FSDP_CUDA AND NOT FSDP_TORCH_HAS_CUDA)
  message(FATAL_ERROR "FSDP_CUDA is ON, but the libtorch at '${FSDP_TORCH_DIR}' is a CPU build: set FSDP_TORCH to a CUDA build.")
endif()
if(FSDP_CUDA)
  # A100, H100 and, compiled when the program starts, whatever comes later.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

# The NCCL that this libtorch uses comes first: a process must not hold two.
set(FSDP_HAS_NCCL OFF)
if(FSDP_CUDA)
  set(_fsdp_nccl "${FSDP_TORCH_DIR}/../nvidia/nccl")
  find_path(FSDP_NCCL_INCLUDE nccl.h HINTS "${_fsdp_nccl}/include")
  find_library(FSDP_NCCL_LIBRARY NAMES libnccl.so.2 nccl HINTS "${_fsdp_nccl}/lib")
  mark_as_advanced(FSDP_NCCL_INCLUDE FSDP_NCCL_LIBRARY)
  if(FSDP_NCCL_INCLUDE AND FSDP_NCCL_LIBRARY)
    set(FSDP_HAS_NCCL ON)
  endif()
endif()
