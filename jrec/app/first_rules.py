"""What `jrec init` asks of rules: facts of a dataset, candidates that may suit it, and a configuration for each.

``first_config`` has the rules for labels, ``first_ranking`` those for the next item of a history.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypedDict

from jrec.app.baselines.examples import Split
from jrec.app.config.typed_toml import toml_key, toml_value
from jrec.data.columns import Column
from jrec.data.schema import Schema
from jrec.errors import ConfigError

_SAMPLE = 16  # blocks of the training split that are read, evenly spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a configuration: its section ("" for the top level), name, value and the reason for it."""

    section: str
    name: str
    value: Any
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """What trials are compared by on the valid split.

    Attributes:
      key: Its name in ``metrics.jsonl``.
      name: What texts call it.
      unit: Its unit.
      greater: Whether more is better.
      calibrated: Whether it is taken after the best scale and shift of the logits.
      beside: The key and the name of a second metric from 0 to 1, the more the better, which decides where trials are
        about the same; None for none.
    """

    key: str
    name: str
    unit: str
    greater: bool = False
    calibrated: bool = False
    beside: tuple[str, str] | None = None

    @property
    def best(self) -> str:
        """The word for a good one."""
        return "greatest" if self.greater else "least"

    def loss(self, score: float) -> float:
        """The score as a number that is the less the better."""
        return -score if self.greater else score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """What the schema of a log could say besides, found by a look at the data.

    Attributes:
      why: Lines of text.
      sections: TOML to add to the schema; "" for nothing.
    """

    why: tuple[str, ...] = ()
    sections: str = ""

    @property
    def lines(self) -> list[str]:
        """For a reader: why, and the sections."""
        return [*self.why, *(f"  {line}" for line in self.sections.splitlines())]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(abc.ABC):
    """A kind of model with rates that suit it.

    Attributes:
      name: What it is, in words.
      tuned: What a search has changed of it, in words, by what is changed.
    """

    name: str
    tuned: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name, and what a search has changed."""
        return ", ".join([self.name, *self.tuned.values()])

    @abc.abstractmethod
    def variants(self) -> Iterator[Self]:
        """Choices that differ in one thing, what tells most first."""

    def changed(self, key: str, words: str, **values: object) -> Self:
        """The same with one thing changed, which ``words`` describe."""
        return dataclasses.replace(self, tuned={**self.tuned, key: words}, **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules[C: Choice](abc.ABC):
    """Facts of a dataset, and what follows from them.

    Attributes:
      examples: Training examples.
      valid: Examples in the valid split.
    """

    examples: int
    valid: int

    @property
    @abc.abstractmethod
    def metric(self) -> Metric:
        """What trials are compared by."""

    @property
    @abc.abstractmethod
    def summary(self) -> str:
        """What the configuration goes by, for its first comment."""

    @abc.abstractmethod
    def candidates(self) -> Sequence[C]:
        """The kinds of model that may suit the dataset; the first is what the rules choose when nothing is tried."""

    @abc.abstractmethod
    def config(self, path: str, candidate: C, *, best_step: int = 0) -> list[Key]:
        """The keys of a configuration.

        Args:
          path: The dataset's folder, for ``data.path``.
          candidate: The kind of model.
          best_step: The step after which a trial of this kind got worse; 0 where that is not known.
        """

    @property
    @abc.abstractmethod
    def trial_examples(self) -> int:
        """How many training examples a trial reads at most."""

    @abc.abstractmethod
    def table(self) -> list[tuple[str, float, str]]:
        """Facts for the page: name, value and unit."""

    def proposal(self, folder: str, schema: Schema) -> Proposal:
        """What the log's schema could say besides."""
        del folder, schema
        return Proposal()

    def warnings(self) -> Iterator[str]:
        """What no configuration can make good, and its remedy."""
        if not self.valid:
            yield (
                "The dataset has no valid split, so nothing can stop training early; prepare it with"
                " --split 0.8,0.1,0.1."
            )


class SplitFacts(TypedDict):
    """The attributes of ``Rules``."""

    examples: int
    valid: int


def training_sample(folder: str | os.PathLike[str], schema: Schema) -> tuple[SplitFacts, list[Mapping[str, Column]]]:
    """What ``Rules`` say of the splits, by their attributes' names, and some blocks of training.

    Raises:
      ConfigError: If the dataset has no training examples.
      DatasetError: If a block cannot be read.
    """
    train, valid = schema.splits.get("train"), schema.splits.get("valid")
    if train is None or not train.examples:
        raise ConfigError(f"{folder} has no examples in a 'train' split, so there is nothing to train on")
    blocks = Split(folder, schema, "train")
    stride = -(-len(blocks.blocks) // _SAMPLE)
    facts: SplitFacts = {
        "examples": train.examples,
        "valid": 0 if valid is None else valid.examples,
    }
    return facts, list(blocks.read(blocks.blocks[::stride]))


def render(name: str, keys: Sequence[Key], rules: Rules[Any], notes: Sequence[str] = ()) -> str:
    """The configuration as TOML with comments.

    Args:
      name: The dataset's name.
      keys: The configuration.
      rules: What it follows from.
      notes: Lines for the comment at the top.
    """
    lines = [f"A first configuration for {name}, by `jrec init`:", rules.summary, *notes, *rules.warnings()]
    lines = [f"# {line}" for line in lines]
    section = ""
    for key in keys:
        if key.section != section:
            section = key.section
            lines += ["", f"[{section}]"]
        value = key.value
        text = toml_value(value)
        if isinstance(value, dict):
            text = "{ " + ", ".join(f"{toml_key(name)} = {toml_value(one)}" for name, one in value.items()) + " }"
        lines.append(f"{key.name} = {text}" + (f"  # {key.reason}" if key.reason else ""))
    return "\n".join(lines) + "\n"
