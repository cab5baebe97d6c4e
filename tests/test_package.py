"""What can be said of the package as a whole: what importing it costs, its pins, its scripts."""

import importlib
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import jrec
from jrec import moved

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = ("dev", "docs", "aot", "aot-newest", "ptxas", "newest", "build", "peers", "peers-fbgemm", "uv")
HEAVY = (
    "numba",
    "pyarrow",
    "grain",
    "array_record",
    "matplotlib",
    "tensorstore",
    "msgspec",
    "scipy",
    "tensorboardX",
    "sklearn",
)


def _pins(name):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = {}
    for line in lines:
        match = re.fullmatch(r"([a-z0-9.-]+)==([0-9][\w.]*)( ; .+)?", line)
        assert match, f"{line!r} in requirements/{name}.txt is no exact pin"
        found[match[1]] = Version(match[2])
    return found


def test_import_pulls_in_nothing_heavy():
    code = f"import sys, jrec; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_ops_and_modules_work_without_anything_heavy():
    code = f"""
import sys
import jrec, jrec.ops, jrec.nn, jrec.batch
jrec.ops.embedding_bag
print([m for m in {HEAVY} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


RAW_LOGS = ("prepare", "encoder", "ingest", "joined", "readers.tables", "readers.delimited", "readers.log_format")


def test_a_program_of_the_library_knows_no_raw_log():
    """What packs, trains and saves reads no format of a log, and no configuration."""
    code = f"""
import sys
import jrec, jrec.nn, jrec.data, jrec.run.run
jrec.distribute, jrec.data.pack_batch, jrec.data.make_loader, jrec.data.load_vocabularies
print([m for m in {RAW_LOGS} if "jrec.data." + m in sys.modules], [m for m in sys.modules if m[:10] == "jrec.app"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[] []"


def test_every_public_name_is_found_and_known_to_type_checkers():
    absent = "[n for n in jrec.__all__ if getattr(jrec, n, None) is None]"
    code = f"import jrec; print(*{absent}, dir(jrec) == sorted(jrec.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "True"
    declared = re.findall(r"^    from [\w.]+ import \w+ as (\w+)$", (ROOT / "jrec" / "__init__.py").read_text(), re.M)
    assert sorted(declared) == sorted(jrec.__all__)
    assert (ROOT / "jrec" / "py.typed").is_file()


@pytest.mark.parametrize("name", PINNED)
def test_requirements_are_exact_pins(name):
    assert _pins(name)


@pytest.mark.parametrize("name", ["dev", "aot", "aot-newest", "newest"])
def test_pins_are_within_the_ranges_of_pyproject(name):
    pins = _pins(name)
    groups = PROJECT["dependency-groups"]
    wanted = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["train"],
        *_group(groups, "test-tools" if name == "newest" else name),
    ]
    for requirement in map(Requirement, wanted):
        pin = pins.get(requirement.name.lower())
        assert pin is not None, f"{requirement.name} is not in requirements/{name}.txt; run requirements/compile.sh"
        assert pin in requirement.specifier, f"{requirement.name} is pinned to {pin}; run requirements/compile.sh"


def _group(groups, name):
    for item in groups[name]:
        if isinstance(item, dict):
            yield from _group(groups, item["include-group"])
        else:
            yield item


def test_environments_agree_on_their_common_pins():
    dev, aot = _pins("dev"), _pins("aot")
    assert dev["jax"] == Version("0.11.2")
    assert {name: aot[name] for name in dev.keys() & aot.keys()} == {
        name: dev[name] for name in dev.keys() & aot.keys()
    }


def test_the_newest_jax_is_newer_than_the_pinned_one():
    assert _pins("newest")["jax"] > _pins("dev")["jax"]
    assert _pins("aot-newest")["jax"] == _pins("newest")["jax"]


def _tracked():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so the files of the repository are not known")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_file_names_a_download_host():
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"))]
    hosts += ["--" + "index-url", "--" + "extra-index-url", "index" + "-url ="]
    for path in _tracked():
        if not path.is_file():
            continue
        content = path.read_bytes()
        found = [host for host in hosts if host.encode() in content]
        assert not found, f"{path.relative_to(ROOT)} names {found}"


def test_scripts_parse():
    scripts = [ROOT / ".ci" / "run", *ROOT.glob("scripts/*.sh"), *ROOT.glob("requirements/*.sh")]
    assert len(scripts) >= 5
    for script in scripts:
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_tests_that_scripts_name_are_there():
    for script in (ROOT / ".ci" / "run", *ROOT.glob("scripts/*.sh")):
        for name in re.findall(r"\btests/\w+\.py", script.read_text()):
            assert (ROOT / name).is_file(), f"{script.relative_to(ROOT)} runs {name}, which is not there"


def test_python_version_fits_requires_python():
    wanted = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert (ROOT / ".python-version").read_text().strip() == wanted


@pytest.mark.parametrize(("old", "now"), moved.MOVED.items())
def test_an_import_path_that_moved_gives_the_same_module_and_warns(old, now):
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{old}.")]:
        del sys.modules[name]
    parent = old.rpartition(".")[0]
    if any(f"{parent}.".startswith(f"{one}.") for one in moved.MOVED):  # which warns of itself
        with pytest.warns(FutureWarning):
            importlib.import_module(parent)
    with pytest.warns(FutureWarning, match=f"{re.escape(old)} is {re.escape(now)} now"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(now)
    assert module.__spec__ is not None
    assert module.__spec__.name == now
    inside = next((info.name for info in pkgutil.iter_modules(getattr(module, "__path__", []))), None)
    if inside is not None:
        with pytest.warns(FutureWarning):
            assert importlib.import_module(f"{old}.{inside}") is importlib.import_module(f"{now}.{inside}")
