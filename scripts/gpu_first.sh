#!/usr/bin/env bash
# Runs benchmarks.gpu_first with python3 on a machine with an NVIDIA GPU that can fetch nothing: packages that it lacks
# come as wheels in .whl/, which `bash scripts/gpu_first.sh wheels` fills on another machine.
#   bash scripts/gpu_first.sh --minutes 9 --out first
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What jrec and its GPU tests need beside JAX, NumPy, numba, SciPy, PyArrow, rich, pytest and hypothesis.
packages=(flax optax grain array-record msgspec tensorboardx importlib-resources portpicker beartype)

if [ "${1:-}" = wheels ]; then
  pins=()
  for name in "${packages[@]}"; do
    pins+=("$(grep --ignore-case --only-matching "^$name==[^ ;]*" requirements/dev.txt || echo "$name")")
  done
  platforms=()
  for glibc in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${glibc}_x86_64")
  done
  exec python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$(cat .python-version)" \
    --implementation cp "${platforms[@]}" --dest .whl "${pins[@]}"
fi

if [ -d .whl ]; then
  site=$(mktemp -d)
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec python3 -m benchmarks.gpu_first "$@"
