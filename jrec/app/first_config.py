"""A first configuration for a dataset with a label: sizes and rates by its numbers, each with the reason beside it.

`python -m benchmarks.quality` says on which logs the rules were found, and judges them on others, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import override

import numpy as np

from jrec.app.baselines.examples import lists_of
from jrec.app.config.typed_toml import toml_key
from jrec.app.first_rules import Choice, Key, Metric, Proposal, Rules, training_sample
from jrec.data.schema import CategoricalFeature, Schema

_PIECES = 16  # of a dense feature, about equally many examples in each
_OFTEN = 100.0  # lookups of a row, on average, from which Adam's own rate for every element of a row pays
_STEPS = 50  # between evaluations at least: fewer change a model less than its score is uncertain
_LARGE = 1 << 30  # bytes of rows, from which Adam's two slots of a row's size are left out
_PATIENT = 18  # evaluations: rows that are kept small may stay alike for 1,000 steps before they get better by far
_MEMBERS = 8
_OOV_RATE = 0.01  # of ids: enough to train a row, and few enough to cost the others nothing that shows
_DROPOUT = 0.2
_TRIED = 1_000_000  # training examples that a trial reads at most
_MANY = 1_000_000  # training examples from which one model learns about as much as several
LARGE = 5_000_000
"""Training examples from which layers are wide, one pass is enough, and nothing is tried."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts(Rules["Candidate"]):
    """What the rules depend on.

    Attributes:
      tables: Rows of the tables that features read, by name.
      lookups: Ids of an example, on average.
      dense: Dense features.
      boundaries: Quantiles of the dense features, by name; none of a feature that is constant.
      histories: By feature with one id, the list feature of the same table, such as the ids before it.
      history_tables: The tables that these features read.
      growing: The tables that grow.
      unmet_oov: The tables whose row for values outside the vocabulary no training example reads.
      numeric: Whether the label, or the first of several, is a number.
      tasks: The labels where there are several.
    """

    tables: dict[str, int]
    lookups: float
    dense: int
    boundaries: dict[str, tuple[float, ...]]
    histories: dict[str, str]
    history_tables: dict[str, str]
    growing: frozenset[str] = frozenset()
    unmet_oov: frozenset[str] = frozenset()
    numeric: bool = False
    tasks: tuple[str, ...] = ()

    @property
    @override
    def metric(self) -> Metric:
        if self.numeric:
            return Metric(key="rmse", name="RMSE", unit="unit of the label")
        return Metric(
            key="refinement", name="log loss", unit="nats per example", calibrated=True, beside=("auc", "AUC")
        )

    @property
    @override
    def summary(self) -> str:
        decides = f" Of the labels {', '.join(self.tasks)} the first decides." if self.tasks else ""
        return (
            f"{self.examples:,} training examples, {self.lookups:,.1f} ids each, {self.rows:,} rows, {self.dense} dense"
            f" features.{decides}"
        )

    @override
    def candidates(self) -> list[Candidate]:
        return candidates(self)

    @override
    def config(self, path: str, candidate: Candidate, *, best_step: int = 0) -> list[Key]:
        return first_config(path, self, candidate, best_step=best_step)

    @property
    @override
    def trial_examples(self) -> int:
        return _TRIED

    @override
    def table(self) -> list[tuple[str, float, str]]:
        return [
            ("training examples", self.examples, "count"),
            ("valid examples", self.valid, "count"),
            ("dense features", self.dense, "count"),
            ("ids", self.lookups, "of an example, on average"),
            ("lookups of a row", self.visits, "in an epoch, on average"),
            ("rows", self.rows, "count, of all tables"),
            *((f"rows of {name}", rows, "count") for name, rows in self.tables.items()),
        ]

    @override
    def proposal(self, folder: str, schema: Schema) -> Proposal:
        from jrec.app.pairs import proposal, telling_pairs

        return proposal(telling_pairs(folder, schema), schema)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(self.tables.values())

    @property
    def visits(self) -> float:
        """Lookups of a row in an epoch, on average."""
        return self.examples * self.lookups / max(1, self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Choice):
    """A kind of model with rates that suit it.

    Attributes:
      interaction: "dot" or "concat".
      dim: Elements of an embedding.
      top: Widths of the hidden layers over the interaction.
      rows: The row optimizer and its learning rate.
      decay: The weight decay of rows.
      frozen: Tables whose rows keep their small first values, so that their features hardly count.
      bounds: By table, the bound of initial rows that are longer than others.
      kind: "dlrm", or "tbsm" over the dataset's histories.
      rate: The learning rate of dense parameters.
      dropout: Of the hidden layers.
      experts: Of several labels, how many experts they share.
    """

    interaction: str
    dim: int
    top: tuple[int, ...]
    rows: tuple[str, float]
    decay: float = 0.0
    frozen: tuple[str, ...] = ()
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kind: str = "dlrm"
    rate: float = 0.001
    dropout: float = 0.0
    experts: int = 1

    @override
    def variants(self) -> Iterator[Candidate]:
        name, rate = self.rows
        for factor in (2.0, 0.5):
            yield self.changed("rows", f"rows' rate {factor * rate:.3g}", rows=(name, factor * rate))
        for dim in (2 * self.dim, self.dim // 2):
            if 4 <= dim <= 128:
                yield self.changed("dim", f"dim {dim}", dim=dim)
        for decay in (10 * self.decay, 0.0) if self.decay else (1e-3,):
            yield self.changed("decay", f"rows' decay {decay:.3g}", decay=decay)
        if self.top:
            dropout = 0.0 if self.dropout else _DROPOUT
            yield self.changed("dropout", f"dropout {dropout:g}", dropout=dropout)
        if self.experts > 1:
            yield self.changed("experts", f"{2 * self.experts} experts", experts=2 * self.experts)
        for factor in (2.0, 0.5):
            yield self.changed("rate", f"dense rate {factor * self.rate:.3g}", rate=factor * self.rate)


def facts_of(folder: str | os.PathLike[str], schema: Schema) -> Facts:
    """Reads what the rules depend on: the schema, and some blocks of the training split.

    Raises:
      ConfigError: If the dataset has no training examples.
      DatasetError: If a block cannot be read.
    """
    counts, columns = training_sample(folder, schema)
    examples = sum(len(block["label"]) for block in columns)
    lookups, unmet = 0, {table.name: table.oov_row for table in schema.tables if table.oov_row is not None}
    for block, feature in itertools.product(columns, schema.categorical):
        _, ids, _ = lists_of(block, feature)
        lookups += len(ids)
        if feature.table in unmet and (ids == unmet[feature.table]).any():
            del unmet[feature.table]
    boundaries = {}
    for feature in schema.dense:
        values = np.concatenate([np.asarray(block[feature.name], np.float64) for block in columns])
        own = _rounded(np.quantile(values, np.linspace(0, 1, _PIECES + 1)))
        if len(own) > 1:
            boundaries[feature.name] = own
    read = {feature.table for feature in schema.categorical}
    histories = _histories(schema.categorical)
    return Facts(
        **counts,
        tables={table.name: table.rows for table in schema.tables if table.name in read},
        lookups=lookups / examples,
        dense=len(schema.dense),
        boundaries=boundaries,
        histories=histories,
        history_tables={feature.name: feature.table for feature in schema.categorical if feature.name in histories},
        growing=schema.growing,
        unmet_oov=frozenset(unmet),
        numeric=schema.numbers is not None,
        tasks=schema.tasks,
    )


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    """Distinct values in ascending order, of as few digits as keep them apart well."""
    return tuple(sorted({float(f"{value:.5g}") for value in values}))


def _histories(features: Sequence[CategoricalFeature]) -> dict[str, str]:
    """Pairs of a feature with one id and a list of the same table; a list of another length is in no pair."""
    histories: dict[str, str] = {}
    lengths = set()
    for feature in features:
        lists = [f for f in features if f.table == feature.table and f.max_length > 1 and not f.scaled]
        if feature.one_hot and len(lists) == 1 and lists[0].name not in histories.values():
            histories[feature.name] = lists[0].name
            lengths.add(lists[0].max_length)
    return histories if len(lengths) == 1 else {}


def candidates(facts: Facts) -> list[Candidate]:
    """The kinds of model that may suit a dataset; the first is what the rules choose when nothing is tried."""
    fit = _candidates(facts)
    if not facts.tasks:
        return fit
    fit = [candidate for candidate in fit if candidate.top]  # whose hidden layers are what the tasks share
    mixed = dataclasses.replace(fit[0], name=f"{fit[0].name}, four experts with a gate for each label", experts=4)
    return [fit[0], mixed, *fit[1:]]


def _candidates(facts: Facts) -> list[Candidate]:
    large, often = facts.examples >= LARGE, facts.visits >= _OFTEN
    dim = 32 if facts.examples >= 100_000_000 else 16
    top = (512, 256) if large else (64, 32)
    products = "products of all pairs of features"
    adagrad = Candidate(
        name=f"{products}, rare rows in large steps",
        interaction="dot",
        dim=dim,
        top=top,
        rows=("rowwise_adagrad", 0.05),
    )
    adam = Candidate(name=f"{products}, rows by Adam", interaction="dot", dim=dim, top=top, rows=("adam", 0.002))
    linear = Candidate(name="a linear model of the ids", interaction="concat", dim=4, top=(), rows=("adam", 0.0005))
    if facts.rows * dim * 4 >= _LARGE:
        return [adagrad, dataclasses.replace(linear, rows=("rowwise_adagrad", 0.02))]
    small = dataclasses.replace(adam, name=f"{products}, rows by Adam and kept small", decay=0.01)
    crossed = dataclasses.replace(adagrad, name="cross layers (DCN-v2), rare rows in large steps", interaction="dcn")
    pairs = [adam, adagrad, small] if often else [adagrad, adam, small]
    candidates = [*pairs, crossed, linear]
    if facts.histories:
        coarsest = min(facts.histories, key=lambda feature: facts.tables[facts.history_tables[feature]])
        kept = facts.history_tables[coarsest]
        frozen = tuple(name for name in facts.tables if name != kept)
        if facts.growing.intersection(frozen):  # whose rows mean nothing to a new value unless they are trained
            return candidates
        name = f"products with the history of {coarsest}, whose rows alone are trained"
        rows = ("rowwise_adagrad", 0.1)
        of_rows = Candidate(name=name, interaction="dot", dim=64, top=top, rows=rows, frozen=frozen, bounds={kept: 0.2})
        name = f"attention over the history (TBSM), where the rows of {coarsest} alone are trained"
        attention = Candidate(
            name=name,
            kind="tbsm",
            interaction="concat",
            dim=32,
            top=(32,),
            rate=0.002,
            rows=rows,
            frozen=frozen,
            bounds={kept: 1.0},
        )
        candidates += [of_rows, attention]
    return candidates


def first_config(path: str, facts: Facts, candidate: Candidate, *, best_step: int = 0) -> list[Key]:
    """The keys of a configuration for a dataset.

    Args:
      path: The dataset's folder, for ``data.path``.
      facts: What the rules depend on.
      candidate: The kind of model.
      best_step: The step after which a trial of this kind got worse; 0 where that is not known.
    """
    n = facts.examples
    batch = next(size for limit, size in _BATCHES if n < limit)
    epochs, why = 20 if n < 200_000 else 10, "early stopping ends it sooner" if facts.valid else ""
    if n >= LARGE:
        epochs, why = 1, "so many examples overfit in a second pass"
    steps = -(-n // batch)
    size = f"of {n:,} training examples: {steps:,} steps an epoch"
    falls = f"the trial was best at step {best_step:,}, and rates fall until twice as many"
    keys = [
        Key(section="", name="epochs", value=epochs, reason=why),
        *([Key(section="", name="max_steps", value=2 * best_step, reason=falls)] if best_step else ()),
        Key(section="data", name="path", value=path),
        Key(section="data", name="batch_size", value=batch, reason=size),
        *_oov(facts),
        *_model(facts, candidate),
        *_rates(facts, candidate),
    ]
    if best_step:
        why = "the noise of the last batches, by which one mean differs from another, averages out"
        keys.append(Key(section="lr_schedule", name="kind", value="warmup_linear", reason=why))
    return [*keys, *(_watch(facts, candidate, steps) if facts.valid else ())]


_BATCHES = ((50_000, 64), (150_000, 128), (500_000, 256), (3_000_000, 1024), (30_000_000, 2048), (float("inf"), 8192))


def _oov(facts: Facts) -> Iterator[Key]:
    if facts.unmet_oov:
        some = ", ".join(sorted(facts.unmet_oov)[:3]) + (", ..." if len(facts.unmet_oov) > 3 else "")
        why = f"trains the row that new values of {some} get: every value of training has a row of its own"
        yield Key(section="data", name="oov_rate", value=_OOV_RATE, reason=why)


def _members(facts: Facts, candidate: Candidate) -> int:
    alone = candidate.frozen or facts.examples >= _MANY
    return 1 if alone or facts.rows * candidate.dim * 4 * _MEMBERS >= _LARGE else _MEMBERS


def _model(facts: Facts, candidate: Candidate) -> Iterator[Key]:
    dim, members = candidate.dim, _members(facts, candidate)
    if candidate.kind != "dlrm":
        yield Key(section="model", name="kind", value=candidate.kind)
    yield Key(section="model", name="interaction", value=candidate.interaction, reason=candidate.name)
    yield Key(section="model", name="embedding_dim", value=dim)
    if members > 1:
        why = (
            f"the mean of {members} models predicts better than one where examples are few; each has a part of the rows"
        )
        yield Key(section="model", name="members", value=members, reason=why)
    if facts.dense:
        last = dim if candidate.interaction == "dot" else 16
        bottom = [512, 256, 64, last] if facts.examples >= LARGE else [64, last]
        yield Key(section="model", name="bottom_mlp", value=bottom, reason=f"over the {facts.dense} dense features")
    elif candidate.kind == "tbsm":
        yield Key(section="model", name="bottom_mlp", value=[16], reason="over a step's place in time")
    else:
        yield Key(section="model", name="bottom_mlp", value=[], reason="the dataset has no dense feature")
    why = "" if facts.examples >= LARGE or not candidate.top else "wider layers learn such a log by heart"
    yield Key(section="model", name="top_mlp", value=[*candidate.top, 1], reason=why)
    if candidate.dropout:
        yield Key(section="model", name="dropout", value=candidate.dropout, reason="better on valid than without")
    yield Key(section="model", name="pooling", value="mean", reason="of lists: their length says nothing by itself")
    if candidate.experts > 1:
        why = "each label reads a mixture of them by a gate of its own"
        yield Key(section="model.multi_task", name="experts", value=candidate.experts, reason=why)
    if facts.valid and not facts.numeric and not facts.tasks:
        why = "by a scale fitted on valid: training makes probabilities too extreme before it makes rankings worse"
        yield Key(section="model", name="calibrate", value=True, reason=why)
    why = f"quantiles in training: a curve of up to {_PIECES} pieces in place of a slope, whatever the scale"
    for number, (name, own) in enumerate(facts.boundaries.items()):
        yield Key(section="model.dense_boundaries", name=toml_key(name), value=list(own), reason="" if number else why)
    if candidate.kind == "tbsm":
        yield Key(section="model.tbsm", name="histories", value=facts.histories)
        yield Key(section="model.tbsm", name="tower_mlp", value=[64], reason="over a step's embeddings")
        yield Key(section="model.tbsm", name="attention_mlp", value=[16, 16])
        why = "they tell at once how like the target the steps are"
        yield Key(section="model.tbsm", name="top_with", value="products", reason=why)
    for table, bound in candidate.bounds.items():
        why = "long enough for products to tell from the first step which ids are the same"
        key = f"tables.overrides.{toml_key(table)}"
        yield Key(section=key, name="initial_bound", value=bound, reason=why)


def _rates(facts: Facts, candidate: Candidate) -> Iterator[Key]:
    name, rate = candidate.rows
    yield Key(section="optimizer", name="name", value="adam")
    yield Key(section="optimizer", name="learning_rate", value=candidate.rate)
    visits = f"a row is looked up {facts.visits:,.0f} times in an epoch on average"
    yield Key(section="optimizer.embedding", name="name", value=name, reason=visits)
    yield Key(section="optimizer.embedding", name="learning_rate", value=rate)
    if candidate.decay:
        why = "pairs of ids are learned by heart less, rows of rare ids stay near 0"
        yield Key(section="optimizer.embedding", name="weight_decay", value=candidate.decay, reason=why)
    for table in candidate.frozen:
        key = f"optimizer.embedding.tables.{toml_key(table)}"
        yield Key(
            section=key, name="frozen", value=True, reason="small first values, so that its feature hardly counts"
        )


def _watch(facts: Facts, candidate: Candidate, steps: int) -> Iterator[Key]:
    every = max(_STEPS, steps // 6) if facts.examples < LARGE else steps // 16
    batches = min(-(-facts.valid // 8192), 25)
    yield Key(section="evaluate", name="every_steps", value=every)
    yield Key(
        section="evaluate", name="batches", value=batches, reason=f"of the valid split's {facts.valid:,} examples"
    )
    metric = facts.metric
    stop = {"metric": metric.key, "patience": _PATIENT if candidate.decay else 6}
    of_metric = f"{metric.name}, whatever the click rate" if metric.calibrated else metric.name
    why = f"{of_metric}; {stop['patience']} evaluations without a better one end training"
    yield Key(section="evaluate", name="early_stopping", value=stop, reason=why)
    yield Key(section="checkpoint", name="keep_best", value=True, reason="the report is of the best step")
