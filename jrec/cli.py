"""The ``jrec`` command: finds the subcommand, imports only that module, and turns expected errors into one line.

A subcommand is a module with ``DESCRIPTION`` and ``EPILOG`` for its help, ``add_arguments(parser)`` and
``run(args) -> int | None``, listed in ``COMMANDS``. It may have ``meant(arguments) -> str``, an error that names the
command that was meant, or "".

Exit codes: 0 success, 1 a defect (with its trace), 2 a mistake that the message explains, 75 another process of the run
was killed or does not answer, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from jrec import signals
from jrec.errors import JrecError, print_error
from jrec.optional_packages import explained
from jrec.outputs import check_local


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand: its name, the module behind it, and its line in ``jrec --help``."""

    name: str
    module: str
    help: str


_HELP = {
    "prepare": "turn a raw click log into a dataset",
    "synth": "make a synthetic dataset of published table sizes",
    "reorder": "renumber rows so that rows that are read together lie together",
    "access": "count how often every row is accessed",
    "fae": "find hot rows; split a dataset into hot and cold examples",
    "links": "measure what reading rows between devices costs, for plans",
    "plan": "decide which device keeps which rows",
    "replan": "compare a plan with present accesses; make a new one",
    "init": "write a configuration that fits a dataset",
    "train": "train and evaluate a model, write a report",
    "follow": "go on learning from files as they appear",
    "prove": "train the same steps wherever rows may lie, compare the bits",
    "eval": "evaluate a checkpoint on a dataset",
    "predict": "score a raw log, a Parquet file or a dataset",
    "kernels": "check GPU kernels on this machine; show what is used",
    "export": "export a trained model for serving",
    "serve": "answer requests for scores over HTTP",
    "import-dlrm": "make a run of a DLRM that PyTorch trained",
    "compress": "compress trained tables into tensor trains",
}
COMMANDS = tuple(
    Command(name=name, module=f"jrec.app.commands.{name.replace('-', '_')}", help=help) for name, help in _HELP.items()
)

COMPILING = ("init", "train", "follow", "eval", "predict", "compress", "export", "serve", "import-dlrm")
"""Commands that import and compile much: a quick start, programs that outlive it, memory that steps find again."""

EXAMPLES = """\
examples:
  jrec synth --like quickstart --rows 1000000 --out data/quickstart
  jrec train quickstart
  jrec prepare csv --schema clicks.toml --input clicks.csv --out data/clicks
  jrec init data/clicks --out train_clicks.toml
  jrec train train_clicks.toml optimizer.learning_rate=0.02
  jrec COMMAND --help
"""


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Runs ``jrec`` with these arguments (by default the process's) and returns its exit code.

    Raises:
      SystemExit: From argparse, for ``--help`` and arguments that it rejects.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_trace = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]  # so that it may stand anywhere
    if argv is None:
        signals.end_on_signals()
    try:
        try:
            return _run(arguments, commands, own_process=argv is None)
        finally:
            sys.stdout.flush()  # here, where a closed pipe can still be answered
    except KeyboardInterrupt as error:
        print(f"jrec: {str(error) or 'interrupted'}", file=sys.stderr)
        return signals.exit_code(error)
    except BrokenPipeError:
        # Whoever read the output has left; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (JrecError, OSError) as error:
        return _refused(error, show_trace=show_trace)
    except ModuleNotFoundError as error:
        if not isinstance(known := explained(error), JrecError):
            raise
        return _refused(known, show_trace=show_trace)


def _refused(error: JrecError | OSError, *, show_trace: bool) -> int:
    if show_trace:
        traceback.print_exc()
    print_error(error)
    return error.exit_code if isinstance(error, JrecError) else JrecError.exit_code


def _run(arguments: list[str], commands: Sequence[Command], *, own_process: bool) -> int:
    name = next((a for a in arguments if not a.startswith("-")), None)
    by_name = {command.name: command for command in commands}
    if name is not None and name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1)
        advice = f"did you mean {near[0]!r}? " if near else ""
        print(f"jrec: error: unknown command {name!r}; {advice}commands: {', '.join(by_name)}", file=sys.stderr)
        return 2
    at = arguments.index(name) if name is not None else len(arguments)
    parser = _parser(commands)
    if parser.parse_args(arguments[:at]).version:
        from jrec import environment

        print(environment.summary())
        return 0
    if name is None:
        parser.print_help(sys.stderr)
        return 2
    module = importlib.import_module(by_name[name].module)
    options = _command_options(by_name[name], module, arguments[at + 1 :])
    for option in ("out", "figure"):  # before the work that the command may do first
        check_local(getattr(options, option, None) or "")
    with contextlib.ExitStack() as stack:
        if name in COMPILING:
            from jrec import compile_cache, memory

            if own_process:
                if (here := str(pathlib.Path.cwd())) not in sys.path:
                    sys.path.append(here)  # of model.factory; last, so that no file there stands in for a library
                stack.enter_context(memory.starting())
                memory.keep_by_default()
            if _alone(options):
                stack.enter_context(compile_cache.enabled())
        return int(module.run(options) or 0)


def _alone(options: argparse.Namespace) -> bool:
    """Whether no other process takes part: GPUs that tune a program together wait for one that finds it compiled."""
    return not (getattr(options, "distributed", False) or getattr(options, "coordinator", None))


class _OneLine(argparse.ArgumentParser):
    """Answers a mistake by one line, as every other part of the command does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help\n")


def _parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    """The parser of what comes before the command; it knows the commands only for its help text."""
    parser = _OneLine(
        prog="jrec",
        description="Train deep recommendation models whose embedding tables are huge.",
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print versions and devices, and exit")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in commands:
        subparsers.add_parser(command.name, help=command.help)
    return parser


def command_parser(command: Command, module: ModuleType) -> argparse.ArgumentParser:
    """The parser of a command's own arguments."""
    parser = _OneLine(
        prog=f"jrec {command.name}",
        description=module.DESCRIPTION,
        epilog=module.EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return parser


def _command_options(command: Command, module: ModuleType, arguments: list[str]) -> argparse.Namespace:
    parser = command_parser(command, module)
    if advice := getattr(module, "meant", lambda arguments: "")(arguments):
        parser.error(advice)
    try:
        return parser.parse_intermixed_args(arguments)  # so that `jrec train C.toml --resume seed=1` works
    except TypeError:  # argparse's answer where a command has subcommands of its own
        return parser.parse_args(arguments)
