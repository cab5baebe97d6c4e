#!/usr/bin/env bash
# Builds the site into build/site, in an environment of its own: scripts/site.sh [ARGUMENTS OF mkdocs build]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/uv.sh
if [ ! -x .venv-docs/bin/python ]; then
  "$UV" venv --quiet --python '>=3.12' .venv-docs
fi
"$UV" pip install --quiet --python .venv-docs/bin/python --requirement requirements/docs.txt
# mkdocs-material announces its successor at every start; nothing here depends on it.
# Without --quiet: with it, --strict would not see warnings.
NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict "$@"
