#!/usr/bin/env bash
# Sets jrec up in .venv, makes a synthetic click log and trains the quickstart model on it to the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
if [ ! -e data/quickstart/schema.json ]; then
  .venv/bin/jrec synth --like quickstart --rows 1000000 --seed 0 --out data/quickstart
fi
.venv/bin/jrec train configs/quickstart.toml --resume "$@"
