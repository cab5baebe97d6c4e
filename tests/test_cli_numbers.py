"""Every numeric option of every command: a value is meant and taken, or refused in one line; never a trace."""

import argparse
import importlib
import math

import pytest

from jrec import cli
from jrec.app.commands.arguments import integer, number, size
from jrec.errors import ConfigError
from jrec.sharding.hardware import parse_bytes, parse_devices

VALUES = ["0", "-1", str(2**31), str(2**62), str(2**64), "1" + 400 * "0", "1" + 5000 * "0", "nan", "inf", "1e309", "",
          "x", "1.5", "0x10"]  # fmt: skip
NUMBERS = {"N", "X", "K", "R", "G", "P", "E", "A", "I", "SECONDS", "SIZE", "BYTES"}  # metavars of numbers and of sizes


def parsers(parser, words):
    """The parser and those of its subcommands, with the words that lead there."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    yield from [] if nested else [(parser, words)]
    for action in nested:
        for word, below in action.choices.items():
            yield from parsers(below, [*words, word])


def numeric_options():
    for command in cli.COMMANDS:
        parser = cli.command_parser(command, importlib.import_module(command.module))
        for below, words in parsers(parser, []):
            for action in below._actions:
                if action.type is not None or (action.option_strings and action.metavar in NUMBERS):
                    yield pytest.param(command, below, words, action, id=" ".join([command.name, *words, action.dest]))


OPTIONS = list(numeric_options())


def required(parser):
    """Arguments without which the parser would refuse anything."""
    words = []
    for action in parser._actions:
        if action.required and not isinstance(action, argparse._SubParsersAction):
            value = str(next(iter(action.choices))) if action.choices else "1"
            words += [f"{action.option_strings[-1]}={value}"] if action.option_strings else [value]
    return words


def test_all_are_found():
    assert len(OPTIONS) > 60
    without = {command.name for command in cli.COMMANDS} - {str(p.id).split()[0] for p in OPTIONS}
    assert without == {"export", "import-dlrm"}


@pytest.mark.parametrize(("command", "parser", "words", "action"), OPTIONS)
def test_a_value_is_taken_or_refused_in_one_line(command, parser, words, action, capsys):
    assert action.type not in (None, int, float), "numbers have types of jrec.app.commands.arguments"
    whole = cli.command_parser(command, importlib.import_module(command.module))
    before = [*words, *(w for w in required(parser) if not w.startswith(action.option_strings[-1] + "="))]
    for text in VALUES:
        value = code = None
        try:
            value = getattr(whole.parse_args([*before, f"{action.option_strings[-1]}={text}"]), action.dest)
        except SystemExit as exit_:
            code = exit_.code
        if code is None:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                assert isinstance(one, (int, float))
                assert abs(one) < 2**64
                assert math.isfinite(one)
            continue
        lines = capsys.readouterr().err.splitlines()
        assert code == 2
        assert len(lines) == 1, lines
        assert action.option_strings[-1] in lines[0]
        assert text == "" or text[:20] in lines[0]
        assert len(lines[0]) < 400


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (integer(1, 65_536), "0", "'0' is out of range; give an integer from 1 to 65,536"),
        (integer(0, 2**64 - 1), str(2**64), "'18446744073709551616' is out of range"),
        (integer(1, 9), "2.5", "'2.5' is no integer from 1 to 9"),
        (number(0, 1, above=True), "0", "'0' is out of range; give a number above 0 to 1"),
        (number(0, 1, below=True), "nan", "'nan' is out of range; give a number from 0 and below 1"),
        (size(1), 400 * "9", r"9'\.\.\. \(400 characters\) is no size up to 2\^60 bytes"),
        (size(1), "0", "'0' is out of range; give at least 1 bytes"),
        (size(0), "-5", "'-5' is no size"),
    ],
)
def test_messages_name_value_and_range(kind, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        kind(text)


def test_values_are_kept():
    assert integer(0, 2**64 - 1)(str(2**64 - 1)) == 2**64 - 1
    assert number(0, 1)("0.25") == 0.25
    assert size(0)("1.5KiB") == 1536


@pytest.mark.parametrize("value", ["9e400", 10**400, math.inf, math.nan, True, "1" + 400 * "0" + "GB", 2**61])
def test_sizes_of_no_machine(value):
    with pytest.raises(ConfigError, match=r"memory is .*; give bytes up to 2\^60"):
        parse_bytes(value, "memory")


@pytest.mark.parametrize("value", ["0-99999999999", "9" * 400, "7-4", "", "-1"])
def test_devices_that_no_machine_has(value):
    with pytest.raises(ConfigError, match=r"--tables-on is .*; give numbers of devices"):
        parse_devices(value, "--tables-on")
