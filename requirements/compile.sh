#!/usr/bin/env bash
# Renews the pinned versions in this folder from pyproject.toml: requirements/compile.sh [--upgrade]
# Nothing but names and versions is written, so that the pins hold with any package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/uv.sh

compile() { # OUTPUT ARGUMENTS...
  local output=$1
  shift
  "$UV" pip compile --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$output" "$@"
}

compile requirements/dev.txt --universal --python-version 3.12 --group dev --extra train pyproject.toml "$@"
compile requirements/newest.txt --universal --python-version 3.12 --group test-tools --extra train pyproject.toml --upgrade
compile requirements/docs.txt --universal --python-version 3.12 --group docs "$@"
compile requirements/aot.txt --python-platform linux --python-version 3.12 --group aot --extra train pyproject.toml "$@"
compile requirements/aot-newest.txt --python-platform linux --python-version 3.12 --group aot-newest --extra train pyproject.toml --upgrade
echo "hatchling
editables" | compile requirements/build.txt --universal --python-version 3.12 - "$@"
