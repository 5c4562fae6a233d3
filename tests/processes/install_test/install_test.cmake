# Installs the build into a fresh folder, then configures, builds and runs examples/find_package
# against it. In: BUILD, SOURCE, VERSION, CXX, SANITIZE, TORCH.

cmake_policy(SET CMP0009 NEW)  # do not walk through the link to libtorch

set(folder "${BUILD}/install_test")
set(prefix "${folder}/prefix")
file(REMOVE_RECURSE "${folder}")

# step(what command...): runs it; on failure shows its output and stops.
function(step what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${what} failed (${status}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()
function(expect what pattern)
  if(NOT output MATCHES "${pattern}")
    message(FATAL_ERROR "${what} should print '${pattern}', but printed:\n${output}")
  endif()
endfunction()

step("cmake --install" ${CMAKE_COMMAND} --install "${BUILD}" --prefix "${prefix}")

step("the installed command" "${prefix}/bin/fsdp" --version)
expect("fsdp --version" "${VERSION}")

# It finds libtorch through a link, which can be pointed elsewhere.
set(link "${prefix}/lib/fsdp/torch")
file(READ_SYMLINK "${link}" target)
if(NOT target STREQUAL "${TORCH}/lib")
  message(FATAL_ERROR "${link} points to '${target}' and not to '${TORCH}/lib'.")
endif()
step("readelf" readelf -d "${prefix}/bin/fsdp")
expect("the installed command's search path" "R(UN)?PATH[^\n]*[$]ORIGIN/[.][.]/lib/fsdp/torch")

# The package must work without this source tree, after the build tree is gone, and with libtorch in another place.
file(GLOB_RECURSE package_files "${prefix}/*.cmake")
foreach(file IN LISTS package_files)
  file(STRINGS "${file}" lines)
  foreach(tree "${SOURCE}/src" "${BUILD}/" "${TORCH}")
    if("${lines}" MATCHES "${tree}")
      message(FATAL_ERROR "${file} mentions '${tree}', so the installed package would break without it.")
    endif()
  endforeach()
endforeach()

# One file that includes every installed header: a header whose own includes were not installed
# fails here.
file(GLOB_RECURSE headers RELATIVE "${prefix}/include" "${prefix}/include/*.h")
list(SORT headers)
set(text "")
foreach(header IN LISTS headers)
  string(APPEND text "#include <${header}>\n")
endforeach()
file(COPY "${SOURCE}/examples/find_package/" DESTINATION "${folder}/example")
file(WRITE "${folder}/example/every_header.cpp" "// Written by install_test.\n${text}")
file(APPEND "${folder}/example/CMakeLists.txt" "target_sources(example PRIVATE every_header.cpp)\n")

set(flags "")
if(SANITIZE)
  set(flags "-fsanitize=${SANITIZE}")
endif()
set(configure ${CMAKE_COMMAND} -S "${folder}/example" -G Ninja -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_CXX_FLAGS=${flags})
# configured(how option...): with libtorch found as the options say.
function(configured how)
  file(REMOVE_RECURSE "${folder}/build")
  step("configuring the outside project with libtorch of ${how}"
    ${CMAKE_COMMAND} -E env --unset=FSDP_TORCH --unset=VIRTUAL_ENV ${ARGN} -B "${folder}/build")
endfunction()
get_filename_component(packages "${TORCH}" DIRECTORY)
configured("the build" ${configure} -D "CMAKE_PREFIX_PATH=${prefix}")
file(WRITE "${folder}/python/torch/__init__.py" "")
file(WRITE "${folder}/python/torch/include/torch/headeronly/version.h"
  "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n#define TORCH_VERSION_PATCH 0\n")
configured("the build, where Python has another" "PYTHONPATH=${folder}/python" ${configure} -D "CMAKE_PREFIX_PATH=${prefix}")
file(GLOB link "${prefix}/lib*/fsdp/torch" "${prefix}/lib/*/fsdp/torch")
file(RENAME "${link}" "${folder}/gone")
configured("Python" "PYTHONPATH=${packages}" ${configure} -D "CMAKE_PREFIX_PATH=${prefix}")
file(RENAME "${folder}/gone" "${link}")
configured("FSDP_TORCH" "FSDP_TORCH=${TORCH}" ${configure} -D "CMAKE_PREFIX_PATH=${prefix}")
configured("torch.utils.cmake_prefix_path" "CMAKE_PREFIX_PATH=${TORCH}/share/cmake" ${configure} -D "CMAKE_PREFIX_PATH=${prefix}")
# Another version is refused in words: its headers would not fit the library.
file(WRITE "${folder}/other/include/torch/headeronly/version.h"
  "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 12\n#define TORCH_VERSION_PATCH 99\n")
execute_process(COMMAND ${configure} -B "${folder}/refused" -D CMAKE_PREFIX_PATH=${prefix} -D FSDP_TORCH=${folder}/other
  RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE output)
if(NOT TORCH_VERSION MATCHES "^2[.]12[.]")
  string(REGEX REPLACE "[ \n]+" " " output "${output}")  # CMake breaks lines by their length
  expect("configuring with another libtorch" "is 2[.]12[.]99, but this fsdp was built with ${TORCH_VERSION}")
endif()
step("building the outside project" ${CMAKE_COMMAND} --build "${folder}/build")
step("the outside project" "${folder}/build/example")
expect("the outside project" "ranks: 1, the sum of [(]rank [+] 1[)] over them: 1")
message(STATUS "${output}")
