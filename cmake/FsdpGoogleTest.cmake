# GoogleTest as GTest::gtest_main and GTest::gmock: the installed package, or else the sources that
# distributions put into /usr/src/googletest. Nothing is downloaded.
find_package(GTest QUIET)
if(NOT TARGET GTest::gmock)
  find_path(FSDP_GOOGLETEST_SOURCES googletest/include/gtest/gtest.h PATHS /usr/src/googletest NO_DEFAULT_PATH)
  mark_as_advanced(FSDP_GOOGLETEST_SOURCES)
  if(NOT FSDP_GOOGLETEST_SOURCES)
    message(FATAL_ERROR "GoogleTest was not found: run `make setup`, or install libgtest-dev and libgmock-dev, or set FSDP_TESTS=OFF.")
  endif()
  set(INSTALL_GTEST OFF CACHE INTERNAL "")
  set(CMAKE_POLICY_VERSION_MINIMUM 3.5)  # older GoogleTest releases ask for a CMake that CMake 4 dropped
  add_subdirectory("${FSDP_GOOGLETEST_SOURCES}" "${PROJECT_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL)
  foreach(library gtest gtest_main gmock gmock_main)
    # SYSTEM: our warnings are not for its headers.
    get_target_property(folders ${library} INTERFACE_INCLUDE_DIRECTORIES)
    set_target_properties(${library} PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${folders}")
    if(NOT TARGET GTest::${library})
      add_library(GTest::${library} ALIAS ${library})
    endif()
  endforeach()
endif()
