"""Which pairs of ids have a mean label that their ids do not tell: a quick test, for what `jrec init` proposes.

An additive model, one number an id and one for each sixteenth of a dense feature, is fitted to a sample of training by
logistic regression, or for labels that are numbers by least squares, with a ridge. Then each pair of values gets one
more number, a Newton step shrunk by the same ridge. A pair of features is taken if that lowers the loss (log loss, or
squared error) of other training examples, beyond chance, and of valid, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import override

import numpy as np

from jrec.app.baselines.examples import Split
from jrec.app.config.typed_toml import toml_value
from jrec.app.first_rules import Proposal
from jrec.data.blocks import LABEL
from jrec.data.schema import DatasetError, Schema

_ROWS = 200_000  # of training that are read at most, and half as many of valid
_FEATURES = 100  # of which pairs are looked at
_WORK = 40_000_000  # pairs of features times examples; each takes some 0.1 µs
_BINS = 16
_RIDGE = 10.0  # average examples that each number is shrunk by
_PASSES = 4
_JUDGES = 5  # every so-manieth training example judges what the others fitted
_SIGMAS = 4.0  # of chance, since the best of hundreds of pairs is looked at
_LEAST = 0.01  # of the loss, by which a pair has to lower it: less is found by products of rows as well
_MOST = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two features, and the share of the additive model's loss on valid that their pairs take away, 0 to 1."""

    features: tuple[str, str]
    gain: float


def telling_pairs(folder: str | os.PathLike[str], schema: Schema) -> list[Pair]:
    """Pairs of features with one id each for which the schema of the log could name a target mean, the best first.

    Only datasets of the format csv have such a schema; of others, and without a valid split, there are none.

    Args:
      folder: The dataset.
      schema: Its description.

    Raises:
      DatasetError: If a block cannot be read.
    """
    pairs = _open_pairs(schema)
    if not pairs or len(schema.with_examples(["train", "valid"])) < 2:
        return []
    rows = min(_ROWS, _WORK // len(pairs))
    train, valid = _columns(folder, schema, "train", rows), _columns(folder, schema, "valid", rows // 2)
    kind = _Examples if schema.numbers is None else _NumberExamples
    examples = kind.of(schema, {name: np.concatenate([train[name], valid[name]]) for name in train})
    number, train_rows = np.arange(len(examples.labels)), len(train[LABEL])
    of_valid = number >= train_rows
    judges = (number % _JUDGES == 0) & ~of_valid
    fitted = ~judges & ~of_valid
    if np.ptp(examples.labels[fitted]) == 0 or not judges.any():
        return []
    outputs = examples.additive(fitted)
    chosen: list[Pair] = []
    gains = {
        pair: (examples.losses(outputs) - examples.losses(examples.with_pair(outputs, pair, fitted)))[judges].mean()
        for pair in pairs
    }
    for pair in sorted(pairs, key=lambda pair: -gains[pair])[: 2 * _MOST]:
        together = examples.with_pair(outputs, pair, fitted)
        before, gain = examples.losses(outputs), examples.losses(outputs) - examples.losses(together)
        chance = _SIGMAS * gain[judges].std() / np.sqrt(judges.sum())
        share = float(gain[of_valid].mean() / before[of_valid].mean())
        if gain[judges].mean() > max(chance, _LEAST * before[judges].mean()) and share > _LEAST:
            chosen.append(Pair(features=pair, gain=share))
            outputs = together
        if len(chosen) == _MOST:
            break
    return chosen


def proposal(pairs: Sequence[Pair], schema: Schema) -> Proposal:
    """What to do about pairs of a dataset: target means, for the schema of the log."""
    if not pairs:
        return Proposal()
    mean, loss = ("click rate", "log loss") if schema.numbers is None else ("mean label", "squared error")
    why = (
        f"Some pairs of values have a {mean} that the values by themselves do not tell. Beside each is the share of",
        f"a linear model's {loss} on the valid split that it takes away. To use it, add the lines to the schema of",
        "the log and prepare it again; docs/crosses.md says when [[cross]] is better than [[target_mean]].",
    )
    means = (f"[[target_mean]]\nof = {toml_value(pair.features)}  # {pair.gain:.1%}\n" for pair in pairs)
    return Proposal(why=why, sections="".join(means))


def _open_pairs(schema: Schema) -> list[tuple[str, str]]:
    """Pairs of features that the schema of a csv log may name, and does not name yet."""
    from jrec.prepare.readers.delimited import read_stored

    options = schema.preparation.get("format_options")
    if not isinstance(options, Mapping) or "schema" not in options:
        return []
    stored = read_stored(options["schema"], where="schema.json: provenance.format_options.schema", error=DatasetError)
    named = {frozenset(one.of) for one in (*stored.cross, *stored.target_mean)}
    single = [c.feature for c in stored.prejoined().categorical if not (c.many or c.quantiles)]
    return [pair for pair in itertools.combinations(single[:_FEATURES], 2) if frozenset(pair) not in named]


def _columns(folder: str | os.PathLike[str], schema: Schema, split: str, rows: int) -> dict[str, np.ndarray]:
    """Labels, ids of features with one id, and dense values of about ``rows`` examples, in blocks evenly spread."""
    blocks = Split(folder, schema, split)
    stride = -(-schema.splits[split].examples // rows)
    read = list(blocks.read(blocks.blocks[::stride]))
    names = [name for name, column in read[0].items() if isinstance(column, np.ndarray)]
    return {name: np.concatenate([np.asarray(block[name]) for block in read]) for name in names}


@dataclasses.dataclass(frozen=True)
class _Examples:
    """Some examples.

    Attributes:
      labels: (rows,) float64.
      codes: By feature, (rows,) int64 that number its values, or the sixteenths of a dense one.
      sizes: By feature, how many numbers there are.
    """

    labels: np.ndarray
    codes: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, schema: Schema, columns: Mapping[str, np.ndarray]) -> _Examples:
        """The examples of columns."""
        dense = [f.name for f in schema.dense]
        edges = {name: np.quantile(columns[name], np.linspace(0, 1, _BINS + 1)[1:-1]) for name in dense}
        values = {f.name: columns[f.name] for f in schema.categorical if f.name in columns}
        values |= {name: np.searchsorted(edges[name], columns[name]) for name in dense}
        numbered = {name: np.unique(column, return_inverse=True) for name, column in values.items()}
        codes = {name: code.astype(np.int64) for name, (_, code) in numbered.items()}
        sizes = {name: len(known) for name, (known, _) in numbered.items()}
        return cls(columns[LABEL].astype(np.float64), codes, sizes)

    def losses(self, outputs: np.ndarray) -> np.ndarray:
        """(rows,) float64 losses of outputs: of logits, in nats."""
        return np.logaddexp(0, outputs) - self.labels * outputs

    def first_output(self, mean: float) -> float:
        """The output that predicts a mean label."""
        return float(np.log(mean / (1 - mean)))

    def predictions(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) predicted labels of (n,) outputs, and by how much they rise with them."""
        chance = 1 / (1 + np.exp(-outputs))
        return chance, chance * (1 - chance)

    def additive(self, fitted: np.ndarray) -> np.ndarray:
        """(rows,) float64 outputs of the additive model, fitted to the examples where ``fitted`` is true."""
        outputs = np.full(len(self.labels), self.first_output(self.labels[fitted].mean()))
        weights = {name: np.zeros(size) for name, size in self.sizes.items()}
        for _, name in itertools.product(range(_PASSES), self.codes):
            step = self._step(outputs, self.codes[name], self.sizes[name], fitted, weights[name])
            weights[name] += step
            outputs = outputs + step[self.codes[name]]
        return outputs

    def with_pair(self, outputs: np.ndarray, pair: tuple[str, str], fitted: np.ndarray) -> np.ndarray:
        """(rows,) float64 outputs with a number for each pair of values; 0 for pairs of no fitted example."""
        first, second = pair
        keys = self.codes[first] * self.sizes[second] + self.codes[second]
        known, codes = np.unique(keys, return_inverse=True)
        step = self._step(outputs, codes, len(known), fitted, np.zeros(len(known)))
        return outputs + step[codes]

    def _step(
        self, outputs: np.ndarray, codes: np.ndarray, size: int, fitted: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        """(size,) float64: a Newton step of every number of a feature, of a penalized loss."""
        (predicted, curvature), own = self.predictions(outputs[fitted]), codes[fitted]
        ridge = _RIDGE * curvature.mean()
        slope = np.bincount(own, self.labels[fitted] - predicted, size) - ridge * weights
        return slope / (np.bincount(own, curvature, size) + ridge)


class _NumberExamples(_Examples):
    """Examples whose labels are numbers."""

    @override
    def losses(self, outputs: np.ndarray) -> np.ndarray:
        return (self.labels - outputs) ** 2

    @override
    def first_output(self, mean: float) -> float:
        return mean

    @override
    def predictions(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return outputs, np.ones(len(outputs))
