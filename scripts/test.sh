#!/usr/bin/env bash
# Sets jrec up in .venv and runs its tests, two at a time: scripts/test.sh [ARGUMENTS OF PYTEST...]
# JREC_TEST_WORKERS: how many (default 2); 0 runs them in one process, as tests of a GPU need it.
# JREC_TEST_CODEGEN=default: compile for CPUs as users do, rather than in half the time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest -n "${JREC_TEST_WORKERS:-2}" --dist worksteal "$@"
