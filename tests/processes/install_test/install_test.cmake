# Installs the build into a fresh folder, then configures, builds and runs examples/find_package
# against it. In: BUILD, SOURCE, VERSION, CXX, SANITIZE.

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

# The package must work without this source tree and after the build tree is gone.
file(GLOB_RECURSE package_files "${prefix}/*.cmake")
foreach(file IN LISTS package_files)
  file(STRINGS "${file}" lines)
  foreach(tree "${SOURCE}/src" "${BUILD}/")
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
step("configuring the outside project" ${CMAKE_COMMAND} -S "${folder}/example" -B "${folder}/build" -G Ninja
  -D CMAKE_PREFIX_PATH=${prefix} -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_CXX_FLAGS=${flags})
step("building the outside project" ${CMAKE_COMMAND} --build "${folder}/build")
step("the outside project" "${folder}/build/example")
expect("the outside project" "ranks: 1, the sum of [(]rank [+] 1[)] over them: 1")
message(STATUS "${output}")
