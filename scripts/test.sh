#!/usr/bin/env bash
# Sets jrec up in .venv and runs its tests: scripts/test.sh [ARGUMENTS OF PYTEST...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
