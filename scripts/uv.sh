# Sourced from the repository's root: puts the pinned uv into .venv-uv, where it is not yet, and its path into $UV.
# Needs a Python with pip, of any version that uv supports, and changes nothing outside of the checkout.

UV=$PWD/.venv-uv/bin/uv

if ! "$UV" --version 2>/dev/null | grep -qF "uv $(sed 's/^uv==//' requirements/uv.txt) "; then
  # Under pyenv, "python3" may be a shim of a version that is not installed; the others may lack pip.
  for bootstrap in python3 python python3.14 python3.13 python3.12 /usr/bin/python3; do
    if "$bootstrap" -m pip --version >/dev/null 2>&1; then
      break
    fi
    bootstrap=
  done
  if [ -z "$bootstrap" ]; then
    echo "jrec: no Python with pip was found; install Python 3.12 or newer with pip and run this again" >&2
    exit 1
  fi
  rm -rf .venv-uv
  PIP_ROOT_USER_ACTION=ignore "$bootstrap" -m pip install -qq --disable-pip-version-check --target .venv-uv --requirement requirements/uv.txt
fi
