# One line per part: what this build is made of.
message(STATUS "fsdp.cpp  ${PROJECT_VERSION}  ${CMAKE_BUILD_TYPE}  ${CMAKE_SYSTEM_PROCESSOR}  ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
message(STATUS "  libtorch   ${FSDP_TORCH_VERSION}  ${FSDP_TORCH_DIR}  (CUDA in it: ${FSDP_TORCH_HAS_CUDA})")
message(STATUS "  MPI        ${FSDP_HAS_MPI}  ${MPI_CXX_LIBRARIES}")
message(STATUS "  CUDA       ${FSDP_CUDA}")
message(STATUS "  ccache     ${FSDP_CCACHE}")
message(STATUS "  sanitizer  ${FSDP_SANITIZE}")
