#!/usr/bin/env bash
# Builds, checks and tries a release: scripts/release.sh [FOLDER]
# Refuses a tree with changes, and a version without a section in CHANGELOG.md or whose tag is another commit's. Builds an
# sdist and a wheel from it into FOLDER (dist), installs the wheel in a fresh environment, and there runs README's program,
# then makes data, trains, exports and scores by the command. It tags and publishes nothing: the last line says how.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/uv.sh
folder=${1:-dist}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)

refuse() {
  echo "release: $1" >&2
  exit 1
}

[ -z "$(git status --porcelain)" ] || refuse "the tree has changes; commit them"
grep -q "^## .*$version" CHANGELOG.md || refuse "CHANGELOG.md has no section for $version, pyproject.toml's version"
tagged=$(git rev-list -n 1 "v$version" 2>/dev/null || true)
[ -z "$tagged" ] || [ "$tagged" = "$(git rev-parse HEAD)" ] || refuse "v$version is a tag of another commit; raise the version"

rm -rf "$folder"
"$UV" build --quiet --build-constraints requirements/build.txt --out-dir "$folder" # the wheel from the sdist
wheel=$(echo "$folder"/jrec-"$version"-py3-none-any.whl)
[ -f "$wheel" ] || refuse "no $wheel was built"
wheel=$(realpath "$wheel")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$UV" venv --quiet --python "$(cat .python-version)" "$work/env"
"$UV" pip install --quiet --python "$work/env/bin/python" "$wheel"
export JREC_CACHE="$work/cache" NUMBA_CACHE_DIR="$work/kernels"
# README's first table has a hundred million rows; less will do.
python3 -c 'import re; print(*re.findall(r"```python\n(.*?)```", open("README.md").read(), re.DOTALL), sep="")' |
  sed 's/100_000_000/100_000/' >"$work/readme.py"
cd "$work" # not the checkout, whose jrec would be imported
env/bin/python readme.py
"$UV" pip install --quiet --python env/bin/python "$wheel[train,serve]"
export PATH="$work/env/bin:$PATH"
jrec --version
jrec synth --like quickstart --rows 20000 --out data
jrec train quickstart data.path=data max_steps=40 out=run
jrec eval run data --batches 2
jrec export run --out export
jrec predict run data --out scores.parquet
cd - >/dev/null
ls -l "$folder"
echo "release: $version is all right. To publish: git tag v$version && git push origin v$version, then upload $folder"
