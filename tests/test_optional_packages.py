"""Packages of extras: what works without them, and what a message says where one is missing."""

import pathlib
import re
import subprocess
import sys
import tomllib
import types

import numpy as np
import pytest
from child_processes import compiling

from jrec import cli
from jrec.data.column_forms import form_of
from jrec.errors import JrecError
from jrec.optional_packages import EXTRA_OF, MissingPackageError, explained, remedy

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def absent(monkeypatch):
    for module in EXTRA_OF:
        if module not in ("scipy", "rich"):  # jax and flax need them
            monkeypatch.setitem(sys.modules, module, None)


def test_the_extras_have_the_packages_of_the_messages():
    listed = {re.split(r"[><=\[]", package)[0].lower().replace("-", "_") for package in EXTRAS["train"]}
    assert {module.lower() for module in EXTRA_OF} == listed
    assert set(EXTRA_OF.values()) == {"train"}
    assert {"cuda", "onnx", "ray", "serve", "reorder", "train", "wandb", "mlflow"} == EXTRAS.keys()


def test_the_program_of_the_readme_trains_exports_and_serves_without_extras(tmp_path):
    from scripts.install_sizes import TRIED

    blocked = [module for module in EXTRA_OF if module not in ("scipy", "rich")]
    code = f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n{TRIED['core'][1]}"
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= compiling()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout[:5]) == (0, "loss "), done.stderr


def test_a_command_names_the_extra_that_it_needs(absent, tmp_path, capsys):
    assert cli.main(["synth", "--like", "quickstart", "--rows", "100", "--out", str(tmp_path / "data")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(r"needs (array_record|pyarrow), which is not installed: pip install 'jrec\[train\]', or in", error)


def test_lists_and_frames_name_the_extra_that_they_need(absent):
    assert form_of("user", np.array([3, 4])).values.tolist() == [3, 4]
    with pytest.raises(
        MissingPackageError, match=re.escape(f"this needs pyarrow, which is not installed: {remedy('train')}")
    ):
        form_of("user", ["a", "b"])


def test_other_missing_modules_are_defects(monkeypatch):
    error = ModuleNotFoundError("No module named 'colour'", name="colour")
    assert explained(error) is error
    known = explained(ModuleNotFoundError("No module named 'pyarrow.dataset'", name="pyarrow.dataset"))
    assert isinstance(known, JrecError)
    assert explained(known) is known

    def run(args):
        raise error

    toy = types.ModuleType("toy_of_extras")
    toy.DESCRIPTION, toy.EPILOG, toy.add_arguments, toy.run = "", "", lambda parser: None, run
    monkeypatch.setitem(sys.modules, "toy_of_extras", toy)
    with pytest.raises(ModuleNotFoundError, match="colour"):
        cli.main(["toy"], [cli.Command(name="toy", module="toy_of_extras", help="")])
