"""Installs jrec in fresh environments, tries each, and fills docs/install.md's table of their sizes.

python -m scripts.install_sizes                        # every extra that is listed, on this Python
python -m scripts.install_sizes --python 3.12 3.13 3.14 --extra core train    # uv finds or fetches the Pythons
python -m scripts.install_sizes --write                # and writes the table
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
BLOCK = re.compile(r"(?<=<!-- sizes: scripts/install_sizes.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
UV = ROOT / ".venv-uv" / "bin" / "uv"
EXTRAS = ("core", "serve", "train", "onnx", "ray", "cuda")
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
README = next(program for program in PROGRAMS if "jrec.distribute" in program)
SERVED = """
run.export("model", dense=["price"])
columns = next(batches(1))
assert jrec.serving.load("model", batch_sizes=[512])({name: columns[name] for name in (*rows, "price")}).shape == (512,)
"""
TRIED = {
    "core": ["-c", README + SERVED],
    "serve": ["-m", "jrec", "serve", "--help"],
    "train": ["-m", "jrec", "synth", "--like", "quickstart", "--rows", "2000", "--out", "data"],
    "onnx": ["-c", "import jrec, jax2onnx, onnxruntime"],
    "ray": ["-c", "import jrec.app.ray, ray"],
    "cuda": ["-m", "jrec", "--version"],
}
"""What each environment has to do: the program of README.md, or a command."""


def main() -> None:
    """Installs, tries and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", nargs="+", choices=EXTRAS, default=list(EXTRAS), help="default: all")
    parser.add_argument("--python", nargs="+", default=["3.12"], metavar="VERSION", help="or paths; default: 3.12")
    parser.add_argument("--write", action="store_true", help="write the table into docs/install.md")
    arguments = parser.parse_args()
    rows = [row_of(python, extra) for python in arguments.python for extra in arguments.extra]
    head = ["| Python | installed by | packages | MB on disk | seconds |", "| --- | --- | ---: | ---: | ---: |"]
    table = "\n".join([*head, *rows, "", f"Measured on {datetime.datetime.now(datetime.UTC).date()}."])
    sys.stdout.write(f"{table}\n")
    if arguments.write:
        PAGE.write_text(BLOCK.sub(lambda _: table + "\n", PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def row_of(python: str, extra: str) -> str:
    """A row of the table: one fresh environment, which was tried.

    Raises:
      subprocess.CalledProcessError: If it cannot be installed, or does not work.
    """
    what = str(ROOT) if extra == "core" else f"{ROOT}[{extra}]"
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run([UV, "venv", "--quiet", "--seed", "--python", python, folder / "env"], check=True)
        own, start = folder / "env/bin/python", time.perf_counter()
        subprocess.run([own, "-m", "pip", "install", "--quiet", "--no-cache-dir", what], check=True)
        seconds = time.perf_counter() - start
        subprocess.run([own, *TRIED[extra]], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        version = subprocess.run([own, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
        [packages] = (folder / "env/lib").glob("python*/site-packages")
        size = sum(f.stat().st_size for f in packages.rglob("*") if f.is_file() and not f.is_symlink()) / 1e6
        count = len([d for d in packages.glob("*.dist-info") if not d.name.startswith("pip-")])
    said = "pip install ." if extra == "core" else f"pip install '.[{extra}]'"
    return f"| {version} | `{said}` | {count} | {size:,.0f} | {seconds:.0f} |"


if __name__ == "__main__":
    main()
