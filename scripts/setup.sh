#!/usr/bin/env bash
# Makes or updates an environment with jrec and pinned versions: scripts/setup.sh [FOLDER [REQUIREMENTS]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/uv.sh
folder=${1:-.venv}
requirements=${2:-requirements/dev.txt}

if [ ! -x "$folder/bin/python" ]; then
  # The version of .python-version first, then any that fits, pyenv's where its shims are not on the PATH; a download last.
  wanted=$(cat .python-version)
  for candidate in "$wanted" '>=3.12' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    if "$UV" venv --quiet --no-python-downloads --python "$candidate" "$folder" 2>/dev/null; then
      break
    fi
  done
  if [ ! -x "$folder/bin/python" ] && ! "$UV" venv --quiet --python "$wanted" "$folder"; then
    echo "jrec: needs Python 3.12 or newer; none was found and none could be downloaded" >&2
    exit 1
  fi
fi
# Where Python writes no bytecode, every process would compile all that it imports: two seconds of each start.
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
  export UV_COMPILE_BYTECODE=1
fi
"$UV" pip install --quiet --python "$folder/bin/python" --build-constraints requirements/build.txt \
  --requirement "$requirements" --editable '.[train]'
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
  "$folder/bin/python" -m compileall -q jrec # which uv leaves out, since it is not copied: half a second of each start
fi
