# What the project stands on; docs/dependencies.md says why each is here.

include(FsdpTorch)
find_package(nlohmann_json 3.10 REQUIRED)
find_package(CLI11 2.1 REQUIRED)

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
