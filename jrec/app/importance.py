"""Permutation importance: how much worse a run scores when the values of a feature go to other examples.

Breiman, "Random Forests", 2001, section 10, for models that are trained already: nothing is fitted again. The columns
of a random sample of a split are held in memory, so that a value can go to any other example of it. Permuting within
a batch would understate features by which a log is sorted, such as a day: near examples have the same value of them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import difflib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jrec.app.loaders import eval_batch_size
from jrec.app.report.ranking import evaluated, evaluated_by_task
from jrec.data.blocks import Column, ShardReader, weight_column
from jrec.data.columns import concatenate, gather, gather_all
from jrec.data.loader import check_split
from jrec.data.packers import packed
from jrec.data.packing_kernels import permutation
from jrec.errors import ConfigError
from jrec.json_values import JsonMapping, JsonObject

if TYPE_CHECKING:
    from jrec.app.config import TrainConfig
    from jrec.app.models.reading import Reading
    from jrec.app.progress import TrainingProgress
    from jrec.app.report.ranking import AnyScores
    from jrec.data.dataset_packer import PackerOptions
    from jrec.data.packers import AnyPacker
    from jrec.data.schema import Schema

SAMPLE = 100_000
REPEATS = 5
_SEED = 0x1F  # of the sample and the permutations, whatever the run's: two runs are compared on the same ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportanceOptions:
    """What is permuted, and how often.

    Attributes:
      repeats: Permutations of each feature.
      groups: Features that are permuted together, by one permutation, and not each by itself.
      sample: The most examples of the split to score, a random sample; 0 for all.
    """

    repeats: int = REPEATS
    groups: tuple[tuple[str, ...], ...] = ()
    sample: int = SAMPLE


def permuted_features(
    config: TrainConfig, schema: Schema, groups: Sequence[Sequence[str]] = ()
) -> dict[str, tuple[str, ...]]:
    """By name the features that are permuted together: each group's, and each other one that predictions read.

    Args:
      config: The run's configuration.
      schema: What its model reads.
      groups: As of ``ImportanceOptions``.

    Raises:
      ConfigError: If a group names what predictions do not read, or a feature twice.
    """
    names = config.model.of_kind.inputs(config.model, schema)
    for group in groups:
        if unread := [name for name in group if name not in names]:
            near = difflib.get_close_matches(unread[0], names, n=1)
            advice = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"a group of features names {unread[0]!r}, but predictions read {', '.join(names)}{advice}"
            )
        if len(set(group)) < len(group):
            raise ConfigError(f"the group of features {', '.join(group)} names one twice; name each once")
    grouped = {name for group in groups for name in group}
    return {"+".join(group): tuple(group) for group in groups} | {
        name: (name,) for name in names if name not in grouped
    }


def feature_importance(
    reading: Reading,
    split: str,
    *,
    options: ImportanceOptions | None = None,
    limit: int = 0,
    progress: TrainingProgress,
) -> JsonObject:
    """The section ``importance`` of a report, in JSON types; every process computes it.

    A change of a metric is positive where the permuted values make it worse. Its mean over the repeats is the
    importance, and its standard deviation says how much that depends on the permutations.

    Args:
      reading: The run, whose rows in host memory are flushed.
      split: "train", "valid" or "test".
      options: What is permuted; None for the defaults.
      limit: Batches at the beginning of the split, from which the examples are drawn; 0 for all of it.
      progress: Shows the batches.

    Returns:
      "split", "examples" (how many were scored), "drawn_from" (how many there are), "repeats", "seconds", "columns" (by
      metric a heading and a unit); "metrics" (of the values as they are); and "features": of each "feature", "kind", by
      metric the mean change, and under "METRIC_deviation" its standard deviation, None of one repeat. Features descend
      by the first metric. Of several labels the last three are the first label's, and under "tasks" each label's own.

    Raises:
      ConfigError: As ``permuted_features``.
      DatasetError: If the split cannot be used, has no example to score, or the examples have no labels.
      DivergedError: If a logit is NaN or infinite.
    """
    begin, options = time.perf_counter(), options or ImportanceOptions()
    config, schema, kind = reading.config, reading.schema, reading.config.model.of_kind
    units = permuted_features(config, schema, options.groups)
    if kind.needs_labels:
        schema.check_labels()
    batch_size = eval_batch_size(config)
    chosen, total = _sample(schema, split, options.sample, limit * batch_size)
    scoring = _Scoring(reading, batch_size)
    columns = _read(schema, split, scoring.packer.columns, chosen, config.data.threads)
    passes = 1 + len(units) * options.repeats
    with progress.evaluating(f"importance on {split}", passes * -(-len(chosen) // batch_size)) as advance:
        before = _metrics(scoring.scores(columns, advance))
        after: dict[str, list[_Metrics]] = {unit: [] for unit in units}
        for unit, names in units.items():
            moved = {name: columns[name] for name in _columns_of(schema, names) if name in columns}
            for repeat in range(options.repeats):
                # The same order for every feature, so that a feature's figures do not depend on which others there are.
                order = permutation(len(chosen), _SEED, repeat)
                permuted = gather_all(moved, order)
                after[unit].append(_metrics(scoring.scores({**columns, **permuted}, advance)))
    kinds = {unit: " + ".join(dict.fromkeys(_kind(schema, name) for name in names)) for unit, names in units.items()}
    by_task = {task: _described(task, before, after, kinds, kind.importance_metrics(config, task)) for task in before}
    first, *_ = by_task.values()
    return {
        "split": split,
        "examples": len(chosen),
        "drawn_from": total,
        "repeats": options.repeats,
        "seconds": time.perf_counter() - begin,
        **first,
        **({"tasks": by_task} if len(by_task) > 1 else {}),
    }


_Metrics = Mapping[str, JsonMapping]
"""By task, "" where there is one label, the metrics by key."""


class _Scoring:
    """Scores columns of a dataset, all of them by one compiled program.

    Args:
      reading: The run.
      batch_size: Examples that are predicted at once.
    """

    def __init__(self, reading: Reading, batch_size: int):
        config, self._run, self._size = reading.config, reading.run, batch_size
        growing = self._run.predictions.loading.get("growing")
        options: PackerOptions = {"growing": growing} if growing else {}
        kind = config.model.of_kind
        self.packer: AnyPacker = kind.packer(config, reading.schema, self._run.layout, training=False, **options)
        self._scorer = kind.scorer(reading)

    def scores(self, columns: Mapping[str, Column], on_batch: Callable[[], None]) -> AnyScores:
        """The scores of all examples of the columns."""
        batches = packed(self.packer, self.packer.prepare(columns), self._size)
        pairs = ((self._run.predictions.of_batch(batch), batch) for batch in batches)
        return self._scorer(pairs, check=True, on_batch=on_batch)


def _sample(schema: Schema, split: str, sample: int, first: int) -> tuple[np.ndarray, int]:
    """The numbers of the examples to score, ascending, and of how many they are."""
    assert schema.folder is not None  # ``Schema.load`` names it
    check_split(schema.folder, schema, split)
    total = schema.splits[split].examples
    total = min(total, first) if first else total
    if not sample or sample >= total:
        return np.arange(total), total
    return np.sort(np.random.default_rng(_SEED).choice(total, sample, replace=False, shuffle=False)), total


def _read(schema: Schema, split: str, names: Collection[str], chosen: np.ndarray, threads: int) -> dict[str, Column]:
    """The columns of some examples, whose numbers in the split ascend; threads read the blocks side by side."""
    assert schema.folder is not None  # as ``_sample`` has checked
    wanted: list[tuple[ShardReader, int, np.ndarray]] = []  # a block of a shard, and which of its examples
    begin = 0
    for shard in schema.splits[split].shards:
        reader = ShardReader(schema.folder, shard)
        for block in range(shard.blocks):
            end = begin + min(schema.block_size, shard.examples - block * schema.block_size)
            low, high = np.searchsorted(chosen, (begin, end))
            if low < high:
                wanted.append((reader, block, chosen[low:high] - begin))
            begin = end

    def read(reader: ShardReader, block: int, examples: np.ndarray) -> dict[str, Column]:
        columns = reader.read(block)
        return {name: gather(columns[name], examples) for name in names}

    # A sample of a large split has examples of nearly every block, and these take most of the time to decode.
    with concurrent.futures.ThreadPoolExecutor(max(1, threads)) as pool:
        parts = list(pool.map(read, *zip(*wanted, strict=True)))
    return {name: concatenate([part[name] for part in parts]) for name in names}


def _columns_of(schema: Schema, names: Sequence[str]) -> list[str]:
    """The blocks' columns of some features: their values, and the weights or ages beside these, which not all read."""
    weights = {feature.name: weight_column(feature) for feature in schema.categorical}
    return [column for name in names for column in (name, weights.get(name)) if column is not None]


def _kind(schema: Schema, name: str) -> str:
    """What a feature is, for the table."""
    if name in schema.crosses:
        return "cross"
    dense = next((feature for feature in schema.dense if feature.name == name), None)
    if dense is not None:
        return "number" if dense.statistic is None else f"target {dense.statistic.kind}"
    feature = next(feature for feature in schema.categorical if feature.name == name)
    return "value" if feature.one_hot else "list"


def _metrics(scores: AnyScores) -> _Metrics:
    each = evaluated_by_task(scores) or {"": evaluated(scores)}
    return {task: evaluation.to_dict() for task, evaluation in each.items()}


def _described(
    task: str,
    before: _Metrics,
    after: Mapping[str, Sequence[_Metrics]],
    kinds: Mapping[str, str],
    changes: Mapping[str, tuple[int, str, str]],
) -> JsonObject:
    """The columns, the metrics and the features of a task, in the order of their importance."""
    features: list[JsonObject] = []
    for unit, repeats in after.items():
        line: JsonObject = {"feature": unit, "kind": kinds[unit]}
        for metric, (sign, _, _) in changes.items():
            values = [_difference(sign, before[task][metric], metrics[task][metric]) for metrics in repeats]
            known = [value for value in values if value is not None]
            line[metric] = float(np.mean(known)) if known else None
            line[f"{metric}_deviation"] = float(np.std(known, ddof=1)) if len(known) > 1 else None
        features.append(line)
    decisive = next(iter(changes))
    features.sort(key=lambda line: -(line[decisive] or 0.0))
    return {
        "columns": {metric: [heading, unit] for metric, (_, heading, unit) in changes.items()},
        "metrics": {metric: before[task][metric] for metric in changes},
        "features": features,
    }


def _difference(sign: int, before: float | None, after: float | None) -> float | None:
    """How much worse a metric became; None where it is not defined, as AUC where all labels are the same."""
    return None if before is None or after is None else sign * (after - before)
