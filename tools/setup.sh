#!/usr/bin/env bash
# Makes this machine ready to build fsdp.cpp, and says what it found: one line per part.
#
#   tools/setup.sh            install what is missing, print every part
#   tools/setup.sh --quiet    the same, but silent when nothing was missing
#   tools/setup.sh --torch    of the Python packages torch alone: what the library and the command need
#   tools/setup.sh --fuzz     also clang and its fuzzer runtime, without which tests/fuzz is skipped
#   tools/setup.sh --report   also Chromium, without which the test that opens a report in it is skipped
#
# Idempotent: a part that is there, from wherever it came, is left alone, so a second run only looks.
# Debian packages are installed as root or through sudo; Python packages go to .venv.
# FSDP_TORCH=<dir> uses an installed libtorch (2.11 to 2.13) and makes no .venv: nothing is downloaded
# when the other parts are there.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

min_cmake=3.24
torch_first=2.11  # the oldest libtorch the code is compiled against
torch_last=2.13
# CPU wheels of torch. PyPI's own Linux wheels bring several GB of CUDA packages along; a wheel from
# here has the same version with "+cpu" behind it, which pip prefers.
torch_cpu_index=https://download.pytorch.org/whl/cpu

quiet=no
python_packages=all
required=(compiler cmake ninja json cli11 gtest python)
for argument in "$@"; do
  case "$argument" in
    --quiet) quiet=yes ;;
    --torch) python_packages=torch ;;
    --fuzz) required+=(clang) ;;
    --report) required+=(chromium) ;;
    *) echo "setup: argument '$argument' is unknown: use --quiet, --torch, --fuzz, --report or nothing." >&2; exit 2 ;;
  esac
done
if [[ $python_packages == all ]]; then required+=(headers); fi

lines=()     # the report
problems=()  # one sentence each; any of them is a failure
fail() { problems+=("$1"); }
report() { lines+=("$(printf '  %-14s %-12s %s' "$1" "$2" "$3")"); }
finish() {
  if [[ $quiet == no || ${#problems[@]} -gt 0 ]]; then
    echo "setup:"
    if [[ ${#lines[@]} -gt 0 ]]; then printf '%s\n' "${lines[@]}"; fi
  fi
  if [[ ${#problems[@]} -gt 0 ]]; then
    printf 'setup: %s\n' "${problems[@]}" >&2
    exit 1
  fi
  exit 0
}

# version_at_least 3.25.1 3.24
version_at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }
first_version() { grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1; }

# --- where things are -----------------------------------------------------------------------------
# Prints the full name of the first file that exists among the usual places and CMAKE_PREFIX_PATH.
find_file() {
  local prefix name
  local -a prefixes=()
  IFS=: read -r -a prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in ${prefixes[@]+"${prefixes[@]}"} /usr/local /usr; do
    for name in "$@"; do
      if [[ -e $prefix/$name ]]; then echo "$prefix/$name"; return 0; fi
    done
  done
  return 1
}

find_compiler() { command -v "${CXX:-c++}"; }
find_cmake() { command -v cmake; }
find_ninja() { command -v ninja || command -v ninja-build; }
find_json() { find_file include/nlohmann/json.hpp; }
find_cli11() { find_file include/CLI/CLI.hpp; }
find_clang() {
  command -v clang++ && compgen -G "$(clang++ -print-resource-dir)/lib/linux/libclang_rt.fuzzer-*.a" >/dev/null
}
find_chromium() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
find_mpi() { command -v mpirun >/dev/null && command -v mpicxx; }
find_gtest() {
  # Either the built package (headers and both libraries) or the sources, which CMake then builds.
  if find_file include/gmock/gmock.h >/dev/null &&
     find_file "lib/$(uname -m)-linux-gnu/libgmock.a" lib/libgmock.a lib64/libgmock.a >/dev/null; then
    find_file include/gtest/gtest.h
  else
    find_file src/googletest/CMakeLists.txt
  fi
}
# The first Python that can make a virtual environment and that torch has wheels for. A version
# manager's python3 comes first in PATH; Debian's own is the second choice.
find_python() {
  local python
  if [[ -n ${FSDP_TORCH:-} ]]; then command -v python3; return; fi
  if [[ -x .venv/bin/python ]]; then echo .venv/bin/python; return; fi
  for python in "$(command -v python3 || true)" /usr/bin/python3; do
    if [[ -n $python ]] && "$python" - 2>/dev/null <<'PY'
import sys, venv, ensurepip
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))
PY
    then echo "$python"; return; fi
  done
  return 1
}

find_headers() {
  local python
  python=$(find_python) && "$python" -c 'import os, sysconfig
print(next(filter(os.path.exists, [os.path.join(sysconfig.get_path("include"), "Python.h")])))' 2>/dev/null
}

# --- system parts ------------------------------------------------------------------------------------
# A part is looked for by its command or file (find_<part>), never by the name of its package.
declare -A packages=(
  [compiler]="g++" [cmake]="cmake" [ninja]="ninja-build" [json]="nlohmann-json3-dev"
  [cli11]="libcli11-dev" [gtest]="libgtest-dev libgmock-dev" [mpi]="libopenmpi-dev openmpi-bin"
  [python]="python3 python3-venv" [headers]="python3-dev" [clang]="clang libclang-rt-dev" [chromium]="chromium")
no_mpi=.cache/no-mpi  # exists when MPI alone could not be installed; delete it to try again

# Prints the packages of the parts that are not there.
missing_packages() {
  local part
  for part in "$@"; do
    "find_$part" >/dev/null 2>&1 || echo "${packages[$part]}"
  done | xargs
}

install_packages() {
  local wanted=$1 log
  local -a as_root=(env DEBIAN_FRONTEND=noninteractive)
  local -a options=(-qq -o DPkg::Lock::Timeout=300)
  local line="apt-get update && apt-get install -y --no-install-recommends $wanted"
  if ! command -v apt-get >/dev/null; then
    fail "These Debian packages are missing and this system has no apt-get: $wanted; install their like by hand."
    return
  fi
  if [[ $(id -u) -ne 0 ]]; then
    if ! command -v sudo >/dev/null; then
      fail "Packages are missing and neither root nor sudo is at hand; as root run: $line"
      return
    fi
    as_root=(sudo "${as_root[@]}")
  fi
  echo "setup: installing Debian packages: $wanted"
  log=$(mktemp)  # shown only when it matters
  # One source that does not answer fails the update, though the others may have all that is needed.
  # shellcheck disable=SC2086  # the list is meant to be split
  if ! { "${as_root[@]}" apt-get "${options[@]}" update || true
         "${as_root[@]}" apt-get "${options[@]}" -y install --no-install-recommends $wanted
       } >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    fail "Debian packages could not be installed (see above); when the network is there run: $line"
  fi
  rm -f "$log"
  hash -r
}

install_system_parts() {
  local missing
  missing=$(missing_packages "${required[@]}")
  if [[ ! -e $no_mpi ]]; then missing=$(xargs <<<"$missing $(missing_packages mpi)"); fi
  if [[ -z $missing ]]; then return; fi
  install_packages "$missing"
  missing=$(missing_packages "${required[@]}")
  if [[ -z $missing ]]; then
    # Everything but the mpi communicator works without MPI: its absence is reported, and is no failure.
    problems=()
    find_mpi >/dev/null || { mkdir -p "${no_mpi%/*}"; touch "$no_mpi"; }
  elif [[ ${#problems[@]} -eq 0 ]]; then
    fail "These packages were installed, but their files are not where they are looked for: $missing."
  fi
}

# --- what was found ---------------------------------------------------------------------------------
# A missing part has been complained about already, with the command that installs it.
report_missing() { report "$1" "missing" "package ${packages[$2]}"; }

check_compiler() {
  local place version
  place=$(find_compiler) || { report_missing "C++ compiler" compiler; return; }
  version=$("$place" -dumpfullversion -dumpversion 2>/dev/null | head -n 1)
  report "C++ compiler" "$version" "$place"
  if "$place" --version | grep -qi clang; then
    version_at_least "$version" 14 || fail "The compiler $place is clang $version: fsdp.cpp needs clang 14 or newer."
  elif ! version_at_least "$version" 12; then
    fail "The compiler $place is GCC $version: fsdp.cpp needs GCC 12 or newer (Debian 12, Ubuntu 24.04)."
  fi
}
check_cmake() {
  local place version
  place=$(find_cmake) || { report_missing "CMake" cmake; return; }
  version=$(cmake --version | first_version)
  report "CMake" "$version" "$place"
  version_at_least "$version" "$min_cmake" || fail "CMake at $place is $version: fsdp.cpp needs $min_cmake or newer."
}
# header_version FILE MACRO... joins the values of version macros with dots
header_version() {
  local file=$1 macro; shift
  for macro in "$@"; do
    sed -nE "s/^#define +$macro +\"?([0-9.]+)\"?.*/\1/p" "$file" 2>/dev/null | head -n 1
  done | paste -sd . -
}
gtest_version() {
  local file
  file=$(find_file "lib/$(uname -m)-linux-gnu/pkgconfig/gmock.pc" lib/pkgconfig/gmock.pc lib64/pkgconfig/gmock.pc \
    src/googletest/CMakeLists.txt) && sed -nE 's/^(Version: |set\(GOOGLETEST_VERSION )([0-9.]+).*/\2/p' "$file"
}
check_system_parts() {
  local place ccache
  check_compiler
  check_cmake
  if place=$(find_ninja); then report "Ninja" "$("$place" --version | first_version)" "$place"
  else report_missing "Ninja" ninja; fi
  if place=$(find_json); then
    report "nlohmann-json" "$(header_version "$(dirname "$place")/detail/abi_macros.hpp" \
      NLOHMANN_JSON_VERSION_MAJOR NLOHMANN_JSON_VERSION_MINOR NLOHMANN_JSON_VERSION_PATCH)" "$place"
  else report_missing "nlohmann-json" json; fi
  if place=$(find_cli11); then
    report "CLI11" "$(header_version "$(dirname "$place")/Version.hpp" CLI11_VERSION)" "$place"
  else report_missing "CLI11" cli11; fi
  if place=$(find_gtest); then report "GoogleTest" "$(gtest_version)" "$place"
  else report_missing "GoogleTest" gtest; fi
  if place=$(find_headers); then report "Python headers" "" "$place"
  else report "Python headers" "none" "package ${packages[headers]}; without them there is no Python module fsdp_cpp"; fi
  if place=$(find_mpi); then report "MPI" "$(mpirun --version 2>/dev/null | first_version)" "$place"
  else report "MPI" "none" "no mpi communicator then; to try again: rm -f $no_mpi && make setup"; fi
  if place=$(find_clang); then report "clang" "$(clang++ --version | first_version)" "$place (for tests/fuzz)"
  else report "clang" "none" "optional; without it tests/fuzz is skipped (to install it: tools/setup.sh --fuzz)"; fi
  if place=$(find_chromium); then
    report "Chromium" "$("$place" --version 2>/dev/null | first_version)" "$place (for the test of the report)"
  else report "Chromium" "none" "optional; without it report_test is skipped (to install it: tools/setup.sh --report)"; fi
  if ccache=$(command -v ccache); then report "ccache" "$(ccache --version | first_version)" "$ccache"
  else report "ccache" "none" "optional; makes the second clean build fast"; fi
}

# --- Python packages and libtorch -------------------------------------------------------------------
install_python_packages() {
  local stamp=.venv/requirements.sha256 wanted python torch
  local -a index=() wheels=(-r requirements.txt)
  wanted=$(sha256sum requirements.txt tools/setup.sh | sha256sum | cut -d ' ' -f 1)
  if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]] && torch_folder >/dev/null; then return; fi
  if [[ $python_packages == torch ]]; then
    torch=$(grep -oE '^torch==[0-9.]+' requirements.txt)
    wheels=("$torch")
    if compgen -G ".venv/lib/python3.*/site-packages/${torch/==/-}[.+]*dist-info" >/dev/null; then return; fi
  fi
  if [[ ! -x .venv/bin/python ]] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    rm -rf .venv
    python=$(find_python) || return 0  # complained about already
    "$python" -m venv .venv
  fi
  if .venv/bin/python - "$torch_cpu_index/torch/" 2>/dev/null <<'PY'
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
PY
  then index=(--extra-index-url "$torch_cpu_index")
  else echo "setup: $torch_cpu_index does not answer: torch comes from pip's own indexes"; fi
  echo "setup: installing Python packages into .venv (torch is large; this takes a minute or more)"
  if ! .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check ${index[@]+"${index[@]}"} \
      "${wheels[@]}"; then
    fail "Python packages could not be installed into .venv (see above); with a libtorch of your own set FSDP_TORCH=<dir>."
    return
  fi
  if [[ $python_packages == torch ]]; then return; fi
  # pip would compile ten thousand files on one core. Some packages hold files that are not for this Python, and of the models
  # of transformers few are used.
  .venv/bin/python -m compileall -qq -j 0 -x 'transformers/models/|/pip/|/setuptools/' .venv/lib || true
  echo "$wanted" >"$stamp"
}
torch_folder() {
  local header
  for header in .venv/lib/python3.*/site-packages/torch/include/torch/headeronly/version.h; do
    if [[ -f $header ]]; then echo "$PWD/${header%/include/torch/headeronly/version.h}"; return 0; fi
  done
  return 1
}
check_torch() {
  local folder=$1 header version kind="CPU"
  header=$folder/include/torch/headeronly/version.h
  if [[ ! -f $header ]]; then
    fail "FSDP_TORCH is '$folder', which holds no libtorch (include/torch/headeronly/version.h): name an unpacked libtorch or the torch folder of a Python package."
    return
  fi
  version=$(header_version "$header" TORCH_VERSION_MAJOR TORCH_VERSION_MINOR TORCH_VERSION_PATCH)
  if [[ -e $folder/lib/libtorch_cuda.so ]]; then kind="CUDA"; fi
  report "libtorch" "$version" "$folder ($kind build)"
  if ! version_at_least "$version" "$torch_first" || version_at_least "${version%.*}" "2.$((${torch_last#2.} + 1))"; then
    fail "FSDP_TORCH is '$folder' with version $version: fsdp.cpp supports libtorch $torch_first to $torch_last."
  fi
}

check_python() {
  local python
  if ! python=$(find_python); then report_missing "Python" python; return; fi
  report "Python" "$("$python" -c 'import platform; print(platform.python_version())')" "$python"
}

install_system_parts
check_system_parts
if [[ -n ${FSDP_TORCH:-} ]]; then
  check_python
  check_torch "$FSDP_TORCH"
else
  install_python_packages
  check_python
  if [[ ${#problems[@]} -eq 0 ]]; then check_torch "$(torch_folder || echo .venv)"; fi
fi
finish
