# cmake --install: headers, libraries, the command, and the package files for find_package(fsdp).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS fsdp fsdp_planning EXPORT fsdpTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS fsdp_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)

configure_package_config_file(cmake/fsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdpConfig.cmake ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
  cmake/FsdpTorch.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
