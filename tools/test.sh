#!/usr/bin/env bash
# Runs a preset's tests and says how far it is: tools/test.sh <preset> [ctest options]
#
# ctest itself prints a line when a test starts and one when it ends, with its number and how many there are; this adds how long
# all of them took the last time, which on a slow machine is what one wants to know.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=$1
shift
took=build/$preset-test-seconds$(tr -dc 'A-Za-z0-9' <<<"$*")

minutes() { printf '%d:%02d min' $(($1 / 60)) $(($1 % 60)); }
count=$(ctest --preset "$preset" "$@" -N | sed -n 's/^Total Tests: //p')
echo "test: $count tests$([[ -f $took ]] && echo "; the last time they took $(minutes "$(<"$took")")")"
start=$SECONDS status=0
ctest --preset "$preset" "$@" || status=$?
echo "test: took $(minutes $((SECONDS - start)))"
if [[ $status -eq 0 ]]; then echo $((SECONDS - start)) >"$took"; fi
exit $status
