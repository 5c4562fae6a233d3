#!/usr/bin/env bash
# Checks what a compiler does not: formatting, ASCII, rooms, sizes, scripts, links. --fix rewrites formatting.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fix=no
case "${1:-}" in
  --fix) fix=yes ;;
  "") ;;
  *) echo "lint: argument '$1' is unknown: use --fix or nothing." >&2; exit 2 ;;
esac

# A file that was deleted but not yet committed is still in git's list.
tracked() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [[ -f $f ]] && echo "$f"; done; }

failed=()
num_checks=0
check() {  # check NAME COMMAND...: runs it, one line when it is fine
  local name=$1
  shift
  num_checks=$((num_checks + 1))
  if "$@"; then echo "lint: $name: ok"; else echo "lint: $name: FAILED" >&2; failed+=("$name"); fi
}

format() {
  # Another major version of clang-format formats differently.
  local candidate tool=""
  for candidate in .venv/bin/clang-format clang-format-14 clang-format; do
    if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then tool=$candidate; break; fi
  done
  if [[ -z $tool ]]; then
    echo "clang-format 14 is missing: run make setup without FSDP_TORCH, or install clang-format-14."
    return 1
  fi
  local -a files
  mapfile -t files < <(tracked '*.h' '*.cpp' '*.cu' '*.cuh')
  if [[ $fix == yes ]]; then "$tool" -i "${files[@]}"; else "$tool" --dry-run --Werror "${files[@]}"; fi
}

ascii() {
  local hits
  hits=$(tracked | LC_ALL=C xargs -d '\n' grep -nIP '[^\x00-\x7F]' || true)
  if [[ -n $hits ]]; then echo "$hits" | cut -c 1-160; return 1; fi
}

scripts() {
  local script status=0
  while read -r script; do
    bash -n "$script" || status=1
    if command -v shellcheck >/dev/null; then shellcheck "$script" || status=1; fi
  done < <(tracked '*.sh' .ci/run)
  return $status
}

# Tables and code are as wide as they are, and no line is broken inside a span of code.
columns() {
  awk 'FNR == 1 {code = 0}
       /^ *(```|~~~)/ {code = !code; next}
       code || /^ *[|>]/ || /^    / || length <= 120 {next}
       {text = $0; gsub(/`[^`]*`/, "", text)}
       length(text) > 60 {print FILENAME ":" FNR ": " length " columns"; bad = 1}
       END {exit bad}' "$@"
}

# A comment begins with its subject, so that it is understood without the code around it.
subjects() {
  ! tracked '*.h' '*.cpp' '*.cu' '*.cuh' '*.py' '*.sh' | xargs -d '\n' grep -nE '^ *(//|#|""") ?(Of|The same|As|What) ' >&2
}

check "format (clang-format 14)" format
check "ASCII only" ascii
check "rooms" python3 tools/check_rooms.py
mapfile -t sources < <(tracked '*.h' '*.cpp' '*.cu' '*.cuh' '*.py')
check "sizes of files and functions" python3 tools/check_sizes.py "${sources[@]}"
check "shell scripts" scripts
mapfile -t pages < <(tracked '*.md')
check "links in the documentation" python3 tools/check_links.py "${pages[@]}"
check "pages within 120 columns" columns "${pages[@]}"
check "comments with subjects" subjects

if [[ ${#failed[@]} -gt 0 ]]; then
  echo "lint: ${#failed[@]} of $num_checks checks failed; \`make format\` repairs formatting." >&2
  exit 1
fi
