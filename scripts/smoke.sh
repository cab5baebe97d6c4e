#!/usr/bin/env bash
# Tries jrec on a Python and a JAX other than the pinned ones: scripts/smoke.sh [PYTHON [REQUIREMENT...]]
#   scripts/smoke.sh 3.14            # the newest of every dependency that pyproject.toml admits
#   scripts/smoke.sh 3.12 'jax==0.11.2'
#   scripts/smoke.sh 3.12 --requirement requirements/newest.txt # the newest, but for what came out since; as CI does
# Makes an environment under .venv-smoke, trains, resumes and evaluates a small model in it, and runs a few tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/uv.sh
python=${1:-3.12}
folder=.venv-smoke/$python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

interpreter=$python # pyenv's where its shims are not on the PATH; uv downloads one last
for candidate in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$python".*/bin/python; do
  [ -x "$candidate" ] && interpreter=$candidate
done
"$UV" venv --quiet --clear --python "$interpreter" "$folder"
"$UV" pip install --quiet --python "$folder/bin/python" --build-constraints requirements/build.txt --compile-bytecode \
  --upgrade "${@:2}" pytest pytest-xdist hypothesis beartype --editable '.[train]'
export PATH="$PWD/$folder/bin:$PATH" JREC_CACHE="$work/cache" NUMBA_CACHE_DIR="$work/kernels"
jrec --version

run() { # out=FOLDER MORE...
  jrec train configs/quickstart.toml data.path="$work/data" max_steps=12 checkpoint.every_steps=6 "$@"
}
jrec synth --like quickstart --rows 20000 --out "$work/data"
run out="$work/whole"
cp -r "$work/whole" "$work/resumed"
run out="$work/resumed" --resume-from 6 # from the cache of compiled programs, too
jrec eval "$work/resumed" "$work/data" --batches 2
diff -r "$work/whole/checkpoints/12" "$work/resumed/checkpoints/12"
python -m pytest -q -n 2 tests/test_ops_embedding_bag.py tests/test_native_ffi.py tests/test_native_xla.py tests/test_compile_cache.py \
  tests/test_kernel_cache.py tests/test_row_optimizers.py tests/test_mesh_overlap.py tests/test_mesh_retrieve.py \
  tests/test_table.py tests/test_tt.py::test_combiners
echo "smoke: $(jrec --version): all right"
