# Shared by the scripts here: which torch versions there are, where each one's things lie, and
# where the time goes. To be sourced; the caller has `set -euo pipefail`.
# shellcheck shell=bash disable=SC2034

# Every minor version from the oldest to the newest is supported; the ends are built and tested.
readonly OLDEST_TORCH=2.11
readonly NEWEST_TORCH=2.15

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
JOBS=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
# For what runs CMake by itself, as building the wheel does: Ninja's own default is two jobs more.
export CMAKE_BUILD_PARALLEL_LEVEL=$JOBS

say() { printf '%s\n' "$*" >&2; }
die() {
  say "$(basename "$0"): $*"
  exit 1
}

# The comment that the script called begins with, up to its `set`.
show_help() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
}

# use_torch VERSION: sets TORCH_MINOR and PYTHON, the interpreter that has it.
use_torch() {
  local version=$1
  [[ $version =~ ^2\.([0-9]+)$ ]] &&
    ((BASH_REMATCH[1] >= ${OLDEST_TORCH#*.} && BASH_REMATCH[1] <= ${NEWEST_TORCH#*.})) ||
    die "TORCH_VERSION is $OLDEST_TORCH to $NEWEST_TORCH, without a patch number, not '$version'"
  TORCH_MINOR=$version
  local venv=$ROOT/.venv
  [[ $TORCH_MINOR == "$NEWEST_TORCH" ]] || venv=$ROOT/.venv-$TORCH_MINOR
  PYTHON=$venv/bin/python
}

# step NAME COMMAND...: runs the command and notes how long it took.
STEP_NAMES=()
STEP_SECONDS=()
step() {
  local name=$1 begin=$SECONDS status=0
  shift
  say ""
  say "== $name"
  # Not `if "$@"`: that would switch off `set -e` inside a function given as the command.
  set +e
  ( set -e; "$@" )
  status=$?
  set -e
  STEP_NAMES+=("$name")
  STEP_SECONDS+=($((SECONDS - begin)))
  if ((status != 0)); then
    say "$(basename "$0"): step '$name' failed with status $status"
    exit "$status"
  fi
}

# print_times: where the time went, and what the compiler cache saved. For a trap on EXIT.
print_times() {
  local i
  ((${#STEP_NAMES[@]})) || return 0
  printf '\n%8s  %s\n' seconds step
  for i in "${!STEP_NAMES[@]}"; do
    printf '%8d  %s\n' "${STEP_SECONDS[i]}" "${STEP_NAMES[i]}"
  done
  printf '%8d  %s\n' "$SECONDS" total
  if [[ -s ${CCACHE_STATSLOG:-} ]]; then
    printf '\nccache:\n'
    ccache --show-log-stats
  fi
}

# count_ccache: makes print_times show the compilations of this run only.
count_ccache() {
  mkdir -p "$ROOT/build"
  export CCACHE_STATSLOG=$ROOT/build/ccache-stats.log
  rm -f "$CCACHE_STATSLOG"
}

# configure_and_build FOLDER CMAKE-OPTION...
configure_and_build() {
  local folder=$1
  shift
  cmake -S "$ROOT" -B "$folder" "$@"
  cmake --build "$folder" --parallel "$JOBS"
}
