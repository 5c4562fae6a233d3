# How this project's own files are compiled: language level, warnings, sanitizers, ccache.

add_library(fsdp_warnings INTERFACE)
target_compile_options(fsdp_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wold-style-cast -Wswitch-enum>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FSDP_WERROR}>>:-Werror>)

# GCC 12 sees overlapping copies in std::string that are not there (GCC bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(fsdp_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()

# GCC tells on aarch64 that it passes pairs otherwise than GCC 9 did; nothing here was compiled by that.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(fsdp_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-psabi>)
endif()

# GCC 13 and later see moves out of bounds in the vector<bool> of libtorch's custom functions that are
# not there.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(fsdp_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds -Wno-stringop-overflow>)
endif()

# Without contraction a*b+c is two roundings on every machine, so that results can be compared bit
# by bit between backends, compilers and architectures (aarch64 contracts by default).
add_library(fsdp_numerics INTERFACE)
target_compile_options(fsdp_numerics INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

# Headers of src/ are for this tree: its libraries, its command, its tests and benchmarks. Users, and the examples, see include/.
add_library(fsdp_internals INTERFACE)
target_include_directories(fsdp_internals INTERFACE ${PROJECT_SOURCE_DIR}/src)

if(FSDP_SANITIZE)
  add_compile_options(-fsanitize=${FSDP_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${FSDP_SANITIZE})
  # Instrumented code hides initialisations from GCC, which then warns of ones that are there (its
  # manual says so under -fsanitize). The other presets keep the warning.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(fsdp_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
  endif()
endif()

# PCH and ccache agree only with these sloppiness settings (ccache manual, "Precompiled headers").
find_program(FSDP_CCACHE ccache)
if(FSDP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${FSDP_CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()

# Lets a target use the headers that another one (the library, unless it is named) has precompiled. They are compiled as for
# libraries (-fPIC), and a compiler takes them only under equal flags; executables would say -fPIE.
function(fsdp_use_pch target)
  cmake_parse_arguments(arg "" "FROM" "" ${ARGN})
  if(NOT arg_FROM)
    set(arg_FROM fsdp)
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  target_precompile_headers(${target} REUSE_FROM ${arg_FROM})
endfunction()

# For code that runs once: reading options (CLI11 is headers alone), the bodies of tests. Not worth more than -O1; or -O2
# where GCC refuses a precompiled header of -O2 under -O1: on x86_64, since the version that has this option.
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-munroll-only-small-loops FSDP_HAS_SMALL_UNROLLING)
add_library(fsdp_light_optimisation INTERFACE)
target_compile_options(fsdp_light_optimisation INTERFACE
  $<$<CONFIG:Release>:-O$<IF:$<BOOL:${FSDP_HAS_SMALL_UNROLLING}>,2,1>>)

# Unity builds: a compiler reads the headers once for several source files instead of once for each, which is most of its work.
set(CMAKE_UNITY_BUILD ${FSDP_UNITY})
