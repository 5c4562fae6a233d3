# The project stands on these; docs/dependencies.md says why each is here.

include(FsdpTorch)

# fsdp_header_library(package version target header debian_package): a library that is headers alone,
# from its CMake package or, where only the headers were copied, from the include path.
function(fsdp_header_library package version target header debian_package)
  find_package(${package} ${version} QUIET)
  if(TARGET ${target})
    return()
  endif()
  find_path(FSDP_${package}_INCLUDE ${header} HINTS ${CMAKE_PREFIX_PATH} PATH_SUFFIXES ${package}/include)  # or a Python package
  mark_as_advanced(FSDP_${package}_INCLUDE)
  if(NOT FSDP_${package}_INCLUDE)
    message(FATAL_ERROR "${package} ${version} was not found: run `make setup`, or install ${debian_package}.")
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} SYSTEM INTERFACE "${FSDP_${package}_INCLUDE}")
endfunction()
fsdp_header_library(nlohmann_json 3.10 nlohmann_json::nlohmann_json nlohmann/json.hpp nlohmann-json3-dev)
if(NOT SKBUILD OR FSDP_TESTS OR FSDP_BENCH)  # a wheel is without the command
  fsdp_header_library(CLI11 2.1 CLI11::CLI11 CLI/CLI.hpp libcli11-dev)
endif()

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

include(FsdpCuda)
