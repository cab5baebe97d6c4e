"""Guessed schemas of some forty logs with the columns of public ones: right, asked about, and ready to prepare."""

import dataclasses
import pathlib
import re

import pytest
import zoo

from jrec import cli
from jrec.data.schema import DatasetError
from jrec.prepare.readers import load_schema
from jrec.prepare.readers.delimited_schema import DelimitedSchema
from jrec.prepare.readers.guess import guess_schema

RIGHT, ASKED = 0.95, 0.2  # the least share of columns, and the most: a guess that asks about everything is none
LOGS = [*zoo.FIRST, *zoo.SECOND]


@dataclasses.dataclass(frozen=True)
class Score:
    """What a guess made of a log's columns: by name (wanted, got), and those that it asks about."""

    columns: dict[str, tuple[str, str]]
    asked: frozenset[str]
    text: str

    @property
    def wrong(self) -> dict[str, tuple[str, str]]:
        """The columns that are not what a careful person makes of them."""
        return {name: (w, g) for name, (w, g) in self.columns.items() if g != w and g not in w.split("/")}


def roles_of(schema: DelimitedSchema) -> dict[str, str]:
    """What a schema makes of the columns that it names, as ``zoo.Log.roles``."""
    roles = {c.column: f"list:{c.separator}" if c.many else "cat" for c in schema.categorical}
    roles |= {c.weights: "weights" for c in schema.categorical if c.weights}
    roles |= {d.column: "dense" for d in schema.dense}
    if schema.time:
        roles[schema.time.column] = f"time:{schema.time.format}"
    return roles | ({schema.label.column: "label"} if schema.label else {})


def score(log: zoo.Log, folder: pathlib.Path) -> Score:
    """Guesses a log's schema, which is written to ``LOG.toml`` beside it, and compares."""
    try:
        text = guess_schema(str(log.write(folder)))
        path = folder / f"{log.name}.toml"
        path.write_text(text)
        schema = load_schema(str(path))
    except DatasetError as error:
        return Score({name: (role, "refused") for name, role in log.roles.items()}, frozenset(), str(error))
    got = roles_of(schema)
    columns = {name: (role, got.get(name, "out")) for name, role in log.roles.items()}
    columns |= {text: ("missing", "missing" if text in schema.missing_values else "value") for text in log.missing}
    return Score(columns, frozenset(re.findall(r'^# \? "(.*?)":', text, re.MULTILINE)), text)


@pytest.mark.parametrize("logs", [zoo.FIRST, zoo.SECOND], ids=["first", "second"])
def test_the_share_of_columns_that_are_right(tmp_path, logs):
    scores = {log.name: score(log, tmp_path) for log in logs}
    wrong = {(name, *column) for name, one in scores.items() for column in one.wrong.items()}
    total = sum(len(one.columns) for one in scores.values())
    assert len(wrong) <= (1 - RIGHT) * total, wrong
    asked = sum(len(one.asked) for one in scores.values())
    assert asked <= ASKED * total


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_what_is_wrong_is_asked_about_and_the_schema_prepares_the_log(tmp_path, capsys, log):
    path = log.write(tmp_path)
    command = ["prepare", "csv", "--input", str(path), "--out", str(tmp_path / "out"), "--quiet", "--threads", "1"]
    assert cli.main(command) == 1
    told = capsys.readouterr().err
    for name in score(log, tmp_path).wrong:
        assert f'"{name}"' in told
    schema = tmp_path / "out.schema.toml"
    unlabelled = [] if "\n[label]" in schema.read_text() else ["--no-labels"]
    assert cli.main([*command, "--schema", str(schema), *unlabelled]) == 0, capsys.readouterr().err
