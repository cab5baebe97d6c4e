"""The shell commands of the documentation: those of its code blocks, and those that its prose names."""

import argparse
import dataclasses
import importlib
import importlib.util
import pathlib
import re
import shlex
import sys
import tomllib
import unittest.mock

from jrec import cli
from jrec.app.config import load_config
from jrec.app.config.reading import find_config, shipped_configs
from jrec.app.predict import SCORE_FORMATS
from jrec.sharding.hardware import PRESETS

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = tuple(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/**/README.md")
    for path in sorted(ROOT.glob(pattern))
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELLS = ("bash", "sh", "console")
PROGRAMS = ("jrec", "python", "pip", "bash", "curl", "psql", "srun", "mpirun")
LAUNCHERS = ("srun", "mpirun")  # start the command that follows their own options
SUFFIXES = {
    **{(command, "config"): (".toml",) for command in ("train", "prove", "plan", "fae")},
    **{(command, "out"): (".toml",) for command in ("init", "links")},
    ("predict", "out"): SCORE_FORMATS,
    ("prepare", "schema"): (".toml", ".json"),
    ("import-dlrm", "checkpoint"): (".pt", ".safetensors"),
}
FOLDERS = ("scripts/", "tests/", "configs/", "requirements/", "examples/", "benchmarks/")
COMMANDS = {command.name: command for command in cli.COMMANDS}


@dataclasses.dataclass(frozen=True)
class DocCommand:
    """One command of a page: where it stands, and its words, without variables before it and what launches it."""

    page: str
    line: int
    words: tuple[str, ...]
    inline: bool = False

    @property
    def text(self) -> str:
        """The command as one would type it."""
        return shlex.join(self.words)

    @property
    def place(self) -> str:
        """Page, line and command, for messages."""
        return f"{self.page}:{self.line}: {self.text}"


def block_commands(page: str) -> list[DocCommand]:
    """The commands of a page's fenced shell blocks and of its indented lines.

    Raises:
      ValueError: If a fenced block has a line whose program is not in ``PROGRAMS``.
    """
    text = (ROOT / page).read_text()
    found = []
    for indent, language, body in ((m[1], m[2], m) for m in FENCE.finditer(text)):
        if language not in SHELLS:
            continue
        if included := re.fullmatch(r'--8<-- "(.*)"\n', body[3]):
            found += commands_of(included[1], (ROOT / included[1]).read_text(), 1, strict=False)
            continue
        script = re.sub(f"^{indent}", "", body[3], flags=re.MULTILINE)
        found += commands_of(page, script, text.count("\n", 0, body.start(3)) + 1, strict=True)
    outside = FENCE.sub(lambda match: re.sub(r"[^\n]+", "", match[0]), text)
    indented = re.sub(r"^(?!    ).+", "", outside, flags=re.MULTILINE)
    found += commands_of(page, indented, 1, strict=False)
    return sorted(found, key=lambda command: command.line)


def inline_commands(page: str) -> list[DocCommand]:
    """The commands of a page's inline code."""
    text = FENCE.sub(lambda match: re.sub(r"[^\n]+", "", match[0]), (ROOT / page).read_text())
    spans = [(text.count("\n", 0, m.start()) + 1, m[1]) for m in re.finditer(r"`([^`\n]+)`", text)]
    found = [one for line, span in spans for one in commands_of(page, span.replace(r"\|", ","), line, strict=False)]
    return [dataclasses.replace(command, inline=True) for command in found]


def commands_of(page: str, script: str, first: int, *, strict: bool) -> list[DocCommand]:
    """The commands of a script whose first line is a page's line ``first``."""
    found, line = [], first
    script = re.sub(r"\\\n", lambda _: "\\\0", script)  # a command that goes on in the next line stays one
    for whole in script.split("\n"):
        joined = re.sub(r"^([\w-]*\$) ", "", whole.replace("\\\0", " ").strip())  # without a prompt
        for words in _simple_commands(joined) if strict or _known(joined) else ():
            if _program(words[0]) in PROGRAMS:
                found.append(DocCommand(page, line, tuple(words)))
            elif strict:
                raise ValueError(f"{page}:{line}: tests/doc_commands.py does not know the program {words[0]!r}")
        line += 1 + whole.count("\0")
    return found


def _known(line: str) -> bool:
    return re.match(r"(\w+=\S* )*[./\w-]*\b(" + "|".join(PROGRAMS) + r")[\d.]*(\s|$)", line) is not None


def _program(word: str) -> str:
    return re.sub(r"[\d.]+$", "", word.rpartition("/")[2])


def _simple_commands(line: str) -> list[list[str]]:
    line = re.sub(r"\$\(([^()]*)\)", "substituted", re.sub(r" > \S+$", "", line))
    lexer = shlex.shlex(re.sub(r"\$\w+", "1", line), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;"):
            commands.append([])
        elif word not in ("…", "...") and (commands[-1] or not re.match(r"\w+=", word)):
            commands[-1].append(word.replace("…", ""))
    for words in commands:
        if words and words[0] in LAUNCHERS:
            del words[: next((n for n, word in enumerate(words) if n and word in PROGRAMS), 0)]
    return [words for words in commands if words]


def check(command: DocCommand, base: pathlib.Path) -> None:
    """Has the command's own parser read its words, and compares names in it with what the repository has.

    Args:
      command: The command.
      base: A configuration, in place of a reader's own, over which ``section.key=value`` go.

    Raises:
      ValueError: If something is wrong; the message names the place.
    """
    program, *arguments = command.words
    try:
        for word in command.words:
            if word.startswith(FOLDERS) and not any(ROOT.glob(word.partition("::")[0])):
                raise ValueError(f"{word} is not in the repository")
        if program == "jrec":
            (_check_named if command.inline else _check_jrec)(arguments, base)
        elif _program(program) == "python" and arguments[:1] == ["-m"]:
            _check_module(arguments[1], arguments[2:])
        elif program == "pip":
            _check_extras(arguments)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{command.place}: {error}") from error


def _check_jrec(arguments: list[str], base: pathlib.Path) -> None:
    line = COMMANDS[arguments[0]]
    with unittest.mock.patch.object(argparse.ArgumentParser, "exit", _raise):
        options = cli._command_options(line, importlib.import_module(line.module), arguments[1:])
    for (name, key), suffixes in SUFFIXES.items():
        file = pathlib.Path(getattr(options, key, None) or "") if name == line.name else pathlib.Path()
        placeholder = key == "config" and (file.name == "CONFIG" or file.name in shipped_configs())
        if file.parts and file.suffix not in suffixes and not placeholder:
            raise ValueError(f"{key} is {file}, which does not end in {' or '.join(suffixes)}")
    hardware = getattr(options, "hardware", None)
    if hardware and hardware not in PRESETS and not hardware.endswith(".toml"):
        raise ValueError(f"--hardware {hardware} is neither a preset nor a TOML file")
    if hasattr(options, "overrides"):
        named = getattr(options, "config", "CONFIG")
        own = named == "CONFIG" or (named.endswith(".toml") and not named.startswith(FOLDERS))
        load_config(base if own else ROOT / find_config(named), options.overrides)


def _check_named(arguments: list[str], base: pathlib.Path) -> None:
    """Of a command in prose, which may leave out what it needs: only its options' names, and its keys."""
    name, *rest = arguments or [""]
    if not name:
        return
    known = _options(cli.command_parser(COMMANDS[name], importlib.import_module(COMMANDS[name].module)))
    if unknown := [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]:
        raise ValueError(f"no such option: {', '.join(unknown)}")
    if name == "train":
        load_config(base, [word for word in rest if re.fullmatch(r"[a-z_.]+=[^A-Z]+", word)])


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The names of a parser's options, and of those of its subcommands."""
    nested = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {*parser._option_string_actions}.union(*(_options(one) for some in nested for one in some.values()))


class _ParsedError(Exception):
    """Ends a program once its arguments are parsed."""


def _check_module(name: str, arguments: list[str]) -> None:
    if not name.startswith(("benchmarks.", "scripts.", "tests.")):
        return
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"there is no module {name}")
    if not arguments:
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, *given, **named):
        parse(parser, *given, **named)
        raise _ParsedError

    patched = unittest.mock.patch.multiple(argparse.ArgumentParser, parse_args=parse_only, exit=_raise)
    module = importlib.import_module(f"{name}.__main__" if name == "tests.faults" else name)
    with patched, unittest.mock.patch.object(sys, "argv", [name, *arguments]):
        try:
            module.main()
        except _ParsedError:
            return
    raise ValueError(f"{name} takes no arguments")


def _check_extras(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in arguments:
        asked = re.fullmatch(r"\.\[(.*)\]", word)
        if asked and (unknown := set(asked[1].split(",")) - extras.keys()):
            raise ValueError(f"pyproject.toml has no extra {', '.join(sorted(unknown))}")


def _raise(parser, status=0, message=None):
    raise ValueError((message or f"exit {status}").strip())
