"""The shell of the ``jrec`` command: dispatch, help, exit codes, and which errors become one line."""

import os
import signal
import subprocess
import sys
import time
import types

import pytest

from jrec import cli, environment, signals
from jrec.data.schema import DatasetError
from jrec.errors import CheckpointError, ConfigError, DivergedError


@pytest.fixture
def toy(monkeypatch):
    """A command ``toy`` whose ``--do`` names what it raises or returns."""
    outcomes = {
        "three": 3,
        "nothing": None,
        "config": ConfigError("first line\n  second line"),
        "dataset": DatasetError("no shards in  a folder"),
        "checkpoint": CheckpointError("of another model"),
        "diverged": DivergedError("loss is NaN"),
        "disk": OSError(28, "No space left on device", "runs/x/metrics.jsonl"),
        "absent": FileNotFoundError(2, "No such file or directory", "in.tsv"),
        "moved": OSError(18, "Invalid cross-device link", "a", None, "b"),
        "bare": OSError("cannot be read"),
        "slip": ValueError("operands could not be broadcast"),
        "interrupt": KeyboardInterrupt(),
    }

    def add_arguments(parser):
        parser.add_argument("--do", choices=outcomes, required=True, help="the outcome")
        parser.add_argument("first", nargs="?", help="a positional argument")
        parser.add_argument("others", nargs="*", help="more of them")

    def run(options):
        sys.stderr.write(" ".join(["positional:", str(options.first), *options.others]) + "\n")
        outcome = outcomes[options.do]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.ModuleType("toy_command")
    texts = {"DESCRIPTION": "Does as told, `at once`.", "EPILOG": "examples:\n  jrec toy --do three"}
    vars(module).update(add_arguments=add_arguments, run=run, **texts)
    monkeypatch.setitem(sys.modules, "toy_command", module)
    command = cli.Command(name="toy", module="toy_command", help="do as told")
    broken = cli.Command(name="broken", module="jrec_no_such_module", help="never imported")
    return lambda *arguments: cli.main(arguments, commands=(command, broken))


def test_exit_code_is_the_commands(toy, capsys):
    assert toy("toy", "--do", "three") == 3
    assert toy("toy", "--do", "nothing") == 0


def test_options_may_stand_between_positional_arguments(toy, capsys):
    assert toy("toy", "a", "b=1", "--do", "three", "c=2") == 3
    assert capsys.readouterr().err == "positional: a b=1 c=2\n"


def test_a_command_with_subcommands(monkeypatch, capsys):
    def add_arguments(parser):
        inner = parser.add_subparsers(dest="format", required=True).add_parser("csv")
        inner.add_argument("--n", type=int)

    module = types.ModuleType("nested_command")
    vars(module).update(add_arguments=add_arguments, run=lambda options: options.n, DESCRIPTION="Nested.", EPILOG=None)
    monkeypatch.setitem(sys.modules, "nested_command", module)
    commands = (cli.Command(name="nested", module="nested_command", help="nested"),)
    assert cli.main(["nested", "csv", "--n", "4"], commands) == 4
    with pytest.raises(SystemExit):
        cli.main(["nested", "csv", "--n", "four"], commands)
    assert "jrec nested csv: error: argument --n: invalid int value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        ("config", "first line second line"),
        ("dataset", "no shards in  a folder"),
        ("checkpoint", "of another model"),
        ("diverged", "loss is NaN"),
        ("disk", "runs/x/metrics.jsonl: No space left on device"),
        ("absent", "in.tsv: No such file or directory"),
        ("moved", "a -> b: Invalid cross-device link"),
        ("bare", "cannot be read"),
    ],
)
def test_expected_errors_are_one_line_and_exit_2(toy, capsys, outcome, line):
    assert toy("toy", "--do", outcome) == 2
    assert capsys.readouterr() == ("", f"positional: None\njrec: error: {line}\n")


@pytest.mark.parametrize(
    "arguments", [("--traceback", "toy", "--do", "config"), ("toy", "--do", "config", "--traceback")]
)
def test_traceback_shows_where(toy, capsys, arguments):
    assert toy(*arguments) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "raise outcome" in err
    assert err.endswith("jrec: error: first line second line\n")


def test_a_slip_in_the_code_is_not_dressed_up(toy):
    with pytest.raises(ValueError, match=r"broadcast"):
        toy("toy", "--do", "slip")


def test_interrupt(toy, capsys):
    assert toy("toy", "--do", "interrupt") == 130
    assert capsys.readouterr().err.endswith("\njrec: interrupted\n")


_WAITS = """
import sys, tempfile, time, types
from jrec import cli
def run(options):
    try:
        with tempfile.TemporaryDirectory(dir=options.folder):
            print("waits", flush=True)
            time.sleep(60)
    finally:
        time.sleep(options.takes)  # what is removed at the end
module = types.ModuleType("waits")
module.run, module.DESCRIPTION, module.EPILOG = run, "Waits.", None
def add_arguments(parser):
    parser.add_argument("folder")
    parser.add_argument("takes", type=float)
module.add_arguments = add_arguments
sys.modules["waits"] = module
sys.exit(cli.main(commands=[cli.Command(name="waits", module="waits", help="waits")]))
"""


def waiting(folder, takes):
    """A command that waits, with a temporary folder, and takes so many seconds to end."""
    command = [sys.executable, "-c", _WAITS, "waits", str(folder), str(takes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    return process


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_a_command_in_order_and_its_echo_does_nothing(tmp_path, number, code, line):
    with waiting(tmp_path, 0.3) as process:
        for _ in range(3):
            process.send_signal(number)
            time.sleep(0.05)
        assert process.communicate(timeout=20) == ("", f"jrec: {line}\n")
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_a_later_signal_ends_a_command_that_does_not_end(tmp_path):
    with waiting(tmp_path, 60) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(signals.ECHO_SECONDS + 0.1)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20) == ("", "jrec: ended at once, without removing temporary files\n")
    assert process.returncode == 143


def test_help_lists_commands_without_importing_them(toy, capsys):
    with pytest.raises(SystemExit) as exit_:
        toy("--help")
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "do as told" in out
    assert "never imported" in out
    assert "examples:\n" in out


def test_help_of_a_command(toy, capsys):
    with pytest.raises(SystemExit) as exit_:
        toy("toy", "--help")
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "Does as told, `at once`." in out
    assert "examples:\n  jrec toy --do three" in out


def test_bad_usage(toy, capsys):
    assert toy("tony") == 2
    assert "unknown command 'tony'; did you mean 'toy'? commands: toy, broken" in capsys.readouterr().err
    assert toy() == 2
    assert "do as told" in capsys.readouterr().err
    for arguments in (("toy", "--do", "five"), ("toy",), ("toy", "--d", "three"), ("--trace", "toy")):
        with pytest.raises(SystemExit) as exit_:
            toy(*arguments)
        assert exit_.value.code == 2
        assert "error:" in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("jrec 0.")
    assert "4 x cpu" in out


def test_the_version_tells_the_commit_of_a_clone_or_of_a_url(monkeypatch, tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "jrec").mkdir()
    (tmp_path / "jrec" / "environment.py").touch()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "jrec" / "environment.py"))
    found = types.SimpleNamespace(version="0", read_text=lambda name: '{"vcs_info": {"commit_id": "0123456789abcdef"}}')
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: found)
    assert environment.commit() == "0123456789ab"
    found.read_text = lambda name: '{"url": "file:///src"}'
    assert environment.commit() == ""
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout[:12]
    assert environment.commit() == head
    (tmp_path / "jrec" / "environment.py").write_text("changed")
    assert environment.commit() == f"{head}+"
    assert f"(commit {head}+), jax" in environment.summary()


@pytest.mark.parametrize("command", [c.name for c in cli.COMMANDS])
def test_every_command_has_help_with_examples(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out.lower()
    assert f"jrec {command}" in out


def test_help_is_quick_because_it_loads_nothing():
    code = (
        "import sys; from jrec.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'numba', 'flax', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "[]\n"
    assert "commands:" in done.stdout


def test_as_a_process_with_a_reader_that_leaves():
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jrec", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=buffered,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as stderr:
        assert stderr.read() == ""
    assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("clicks.parquet", "jrec prepare csv --input clicks.parquet --out data/clicks` which guesses a schema first"),
        ("a.csv b.csv --quiet --out x", "jrec prepare csv --input a.csv b.csv --quiet --out x` which"),
        ("a.csv --schema s.toml", "jrec prepare csv --input a.csv --schema s.toml --out data/a`?"),
    ],
)
def test_a_log_in_place_of_its_format_names_the_command_that_was_meant(arguments, command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["prepare", *arguments.split()])
    assert ended.value.code == 2
    assert f"did you mean `{command}" in capsys.readouterr().err.replace("`,", "`")
    with pytest.raises(SystemExit):
        cli.main(["prepare", "avasu"])
    assert "invalid choice: 'avasu'" in capsys.readouterr().err


def test_a_log_in_place_of_a_dataset_is_named(tmp_path, capsys):
    log = tmp_path / "clicks.csv"
    log.touch()
    assert cli.main(["init", str(log), "--out", str(tmp_path / "model.toml")]) == 2
    assert f"jrec prepare csv --input {log} --out DATASET" in capsys.readouterr().err
