#!/usr/bin/env bash
# Runs benchmarks.gpu_first with python3 on a machine with an NVIDIA GPU that can fetch nothing. What it lacks comes in
# .gpu/, which git ignores, so that a copy of the checkout has to take it along by name:
#   bash scripts/gpu_first.sh prepare           here: packages as wheels, and the commit
#   bash scripts/gpu_first.sh                   there: the first call, of 9 minutes, into $OUT
#   bash scripts/gpu_first.sh prepare RESULTS   here, before another call: with the results of the first, to go on from
#   bash scripts/gpu_first.sh --minutes 3       there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What jrec and its GPU tests need beside JAX, NumPy, numba, SciPy, PyArrow, rich, pytest and hypothesis, whose versions
# may be any; tests/gpu_machine.txt lists what such a machine may be thought to have.
packages=(flax optax grain array-record msgspec tensorboardx importlib-resources portpicker beartype)

if [ "${1:-}" = prepare ]; then
  pins=()
  for name in "${packages[@]}"; do
    pins+=("$(grep --ignore-case --only-matching "^$name==[^ ;]*" requirements/dev.txt || echo "$name")")
  done
  platforms=()
  for glibc in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${glibc}_x86_64")
  done
  rm -rf .gpu
  mkdir .gpu
  python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$(cat .python-version)" \
    --implementation cp "${platforms[@]}" --dest .gpu "${pins[@]}"
  git describe --always --dirty --abbrev=12 --exclude='*' | tee .gpu/commit
  if [ -n "${2:-}" ]; then
    cp "$2/lines.jsonl" .gpu/
  fi
  exit
fi

arguments=("$@")
if [ -d .gpu ]; then
  if compgen -G '.gpu/*.whl' >/dev/null; then
    site=$(mktemp -d)
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .gpu/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
  fi
  export JREC_COMMIT=${JREC_COMMIT:-$(cat .gpu/commit)}
  if [ -f .gpu/lines.jsonl ]; then
    arguments+=(--earlier .gpu)
  fi
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec python3 -m benchmarks.gpu_first "${arguments[@]}"
