# cmake --install: headers, libraries, the command, and the package files for find_package(fsdp).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS fsdp fsdp_planning EXPORT fsdpTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET fsdp_command)
  # The command looks for libtorch where it was built with it (FsdpTorch.cmake), and then through a link beside it, which a
  # person can point elsewhere after libtorch has moved. NCCL and CUDA's runtime are beside it, as packages of PyPI.
  set(torch_link "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}/fsdp/torch")
  set(rpath ${torch_link})
  if(FSDP_CUDA)
    list(APPEND rpath "${torch_link}/../../nvidia/nccl/lib" "${torch_link}/../../nvidia/cu${CUDAToolkit_VERSION_MAJOR}/lib")
  endif()
  set_target_properties(fsdp_command PROPERTIES INSTALL_RPATH "${rpath}")
  install(TARGETS fsdp_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(CODE "
    set(folder \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/fsdp\")
    file(MAKE_DIRECTORY \"\${folder}\")
    file(CREATE_LINK \"${FSDP_TORCH_DIR}/lib\" \"\${folder}/torch\" SYMBOLIC)")
endif()
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)

configure_package_config_file(cmake/fsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdpConfig.cmake ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
  cmake/FsdpTorch.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
