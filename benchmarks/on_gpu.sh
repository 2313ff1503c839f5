#!/usr/bin/env bash
# Everything that needs a GPU: build the wheel, test, compare with others, look for bad memory accesses and races. No network is needed.
#
#   benchmarks/on_gpu.sh [--dry] [--no-build] [all | build test bench sanitize ...]
#
# Needed: nvcc, a Python with torch for CUDA, pip, setuptools, cmake, ninja, pybind11, pytest. What is not there of Liger, TRL, flash-attn
# and compute-sanitizer is listed and left out; WHEELS names a folder of wheels that are installed first (never into that Python).
# --dry takes the same path on a CPU with toy shapes, Triton in its interpreter. --no-build tests what is installed.
#
#   PYTHON     python3
#   OUT        where logs and results go: at most 8 files (build/on-gpu/results)
#   WORK       where the wheel is built and installed (build/on-gpu)
#   LEAVE_OUT  a pattern of contestants not to run, e.g. compile
#   BUILD_SECONDS, TEST_SECONDS, BENCH_SECONDS, SANITIZE_SECONDS   what each phase may take; a phase that hangs costs no other
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)') || exit 2
WORK=${WORK:-$ROOT/build/on-gpu}
OUT=${OUT:-$WORK/results}
DRY='' BUILD=1 PHASES=()
for argument in "$@"; do
  case $argument in
    --dry) DRY=1 ;;
    --no-build) BUILD='' ;;
    all) PHASES+=(build test bench sanitize) ;;
    build | test | bench | sanitize) PHASES+=("$argument") ;;
    *) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done
[ ${#PHASES[@]} -gt 0 ] || PHASES=(build test bench sanitize)

mkdir -p "$WORK" "$OUT"
WORK=$(cd "$WORK" && pwd) OUT=$(cd "$OUT" && pwd)
[ -z "${WHEELS:-}" ] || WHEELS=$(cd "$WHEELS" && pwd)
cd "$OUT" # never the sources: `python -m` would import the package from there, which has no compiled module
# PYTHONPATH, not a virtual environment: one made inside another does not see the packages of that one.
SITE=$WORK/site
export PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
COMMIT=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null) || COMMIT=unversioned
export COMMIT

if [ -z "$DRY" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "no GPU that torch can use: a dry run on the CPU"
  DRY=1
fi
if [ -n "$DRY" ]; then
  export TRITON_INTERPRET=1
else
  unset TRITON_INTERPRET
fi

STATUS=0 SUMMARY=()
# phase NAME SECONDS COMMAND...: its output goes to NAME.log and to the screen, that of the build only its end. Interrupted at its limit:
# pytest then still says what failed.
phase() {
  local name=$1 seconds=$2 start=$SECONDS status how=done
  shift 2
  echo "== $name"
  if [ "$name" = build ]; then
    timeout --signal=INT --kill-after=20 "$seconds" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    tail -n 15 "$OUT/$name.log"
  else
    timeout --signal=INT --kill-after=20 "$seconds" "$@" 2>&1 | tee "$OUT/$name.log"
    status=${PIPESTATUS[0]}
  fi
  case $status in
    0) ;;
    124 | 137) how="out of time" STATUS=1 ;;
    *) how="FAILED ($status)" STATUS=1 ;;
  esac
  SUMMARY+=("$(printf '%-9s %4d s  %s' "$name" $((SECONDS - start)) "$how")")
  return "$status"
}

wanted() { [[ " ${PHASES[*]} " == *" $1 "* ]]; }

install_wheels() { "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$SITE" "$@"; }
build_and_install() {
  # for this GPU alone: one architecture instead of three
  local arch
  if arch=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())' 2>/dev/null); then
    export CUDAARCHS=${CUDAARCHS:-$arch}
  fi
  rm -rf "$WORK/wheel" "$SITE"/grpo_kernels "$SITE"/grpo_kernels-* # an old one is not to be tested where this fails
  "$PYTHON" -m pip wheel --verbose --no-build-isolation --no-deps --no-index -w "$WORK/wheel" "$ROOT" &&
    install_wheels "$WORK"/wheel/grpo_kernels-*.whl
}
export -f build_and_install install_wheels
export PYTHON WORK SITE ROOT

if [ -n "${WHEELS:-}" ]; then install_wheels "$WHEELS"/*.whl || STATUS=1; fi
if wanted build && [ -n "$BUILD" ]; then phase build "${BUILD_SECONDS:-180}" bash -c build_and_install; fi

# What is here, and the backends to test and to watch as far as they are there.
{
  command -v nvidia-smi >/dev/null && nvidia-smi
  command -v compute-sanitizer >/dev/null || echo "compute-sanitizer MISSING"
  "$PYTHON" - "$DRY" <<'PY'
import importlib.util, sys
from grpo_kernels import available_backends
from grpo_kernels.__main__ import report

print(report())
for name in ("liger_kernel", "trl", "flash_attn"):
    print(f"{'peer ' + name:<22} {'there' if importlib.util.find_spec(name) else 'MISSING'}")
names = ("triton", "cpu") if sys.argv[1] else ("cuda", "triton")
print(f"{'under test':<22}", *(name for name in names if available_backends()[name] == "available"))
PY
} 2>&1 | tee "$OUT/environment.txt"
BACKENDS=$(sed -n 's/^under test *//p' "$OUT/environment.txt")
if [ -z "$BACKENDS" ]; then
  echo "grpo_kernels is not installed for $PYTHON, or has no backend for this machine" | tee -a "$OUT/environment.txt"
  exit 1
fi

run_pytest() { "$PYTHON" -m pytest -c "$ROOT/pyproject.toml" --rootdir "$ROOT" -p no:cacheprovider -p no:benchmark -q "$@"; }
export -f run_pytest
if wanted test; then
  export GRPO_KERNELS_TEST_BACKENDS=${BACKENDS// /,}
  if [ -n "$DRY" ]; then
    phase gpu "${TEST_SECONDS:-150}" bash -c 'run_pytest "$ROOT/tests/test_gpu.py"'
    phase suite "${TEST_SECONDS:-150}" bash -c 'run_pytest "$ROOT/tests/test_metrics.py"'
  else
    workers=''
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then workers="-n ${TEST_WORKERS:-8}"; fi
    phase gpu "${TEST_SECONDS:-150}" bash -c 'run_pytest --maxfail 20 "$ROOT/tests/test_gpu.py"'
    # those that ask for a backend: others may need packages that are not there
    files=$(grep -lE '\bbackend[,:)]' "$ROOT"/tests/test_*.py | grep -v test_gpu.py | tr '\n' ' ')
    phase suite "${TEST_SECONDS:-150}" bash -c "run_pytest $workers --maxfail 40 --continue-on-collection-errors -m gpu $files"
  fi
fi

if wanted bench; then
  # It stops by itself before it is stopped.
  limit=${BENCH_SECONDS:-200}
  phase bench "$limit" "$PYTHON" "$ROOT/benchmarks/gpu.py" ${DRY:+--dry} --output "$OUT/gpu.json" --seconds $((limit * 3 / 4)) \
    ${LEAVE_OUT:+--leave-out "$LEAVE_OUT"}
fi

sanitize() {
  local failed=0 backend tool
  if [ -n "$DRY" ]; then
    "$PYTHON" "$ROOT/benchmarks/exercise.py" cpu 37
    return
  fi
  for backend in $BACKENDS; do "$PYTHON" "$ROOT/benchmarks/exercise.py" "$backend" || failed=1; done
  command -v compute-sanitizer >/dev/null || return $failed
  for backend in $BACKENDS; do
    for tool in memcheck racecheck; do
      [ "$tool $backend" = "racecheck triton" ] && continue # barriers there are Triton's own
      echo "-- $tool, $backend"
      # each allocation its own, so that one byte behind a tensor is out of bounds
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 1 --print-limit 20 \
        "$PYTHON" "$ROOT/benchmarks/exercise.py" --few "$backend" 1025 40960 || failed=1
    done
  done
  return $failed
}
export -f sanitize
export BACKENDS DRY
if wanted sanitize; then phase sanitize "${SANITIZE_SECONDS:-120}" bash -c sanitize; fi

echo
echo "== summary"
echo "commit $COMMIT, results in $OUT"
grep -hE '^(FAILED|ERROR) ' "$OUT"/gpu.log "$OUT"/suite.log 2>/dev/null | cut -c1-160 | head -n 20
if wanted bench && [ -f "$OUT/gpu.md" ]; then cat "$OUT/gpu.md"; fi
printf '%s\n' "${SUMMARY[@]}"
exit $STATUS
