"""Fits the baselines of a dataset and scores its splits; results are kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from jrec.app.baselines import logistic, popularity, value_means
from jrec.app.baselines.examples import Slots, Split
from jrec.app.report import numbers
from jrec.app.report.terminal import BASELINES
from jrec.data.blocks import LABEL, Column
from jrec.data.identity import digest_of
from jrec.data.schema import DatasetError, Schema
from jrec.environment import cache_folder
from jrec.errors import JrecError
from jrec.files import load_json, save_json
from jrec.json_values import JsonObject
from jrec.metrics import Scores, evaluate
from jrec.regression import NumberScores, evaluate_numbers

FORMAT, VERSION = "jrec-baselines", 2
SMALL = 10_000_000
"""Up to as many training examples, `evaluate.baselines = "auto"` computes them."""
_CHOOSING = 1_000_000  # examples at most
_MOMENTS = 64  # blocks at most
METRICS = ("auc", "log_loss", "normalized_entropy", "calibration", "calibration_error")
_Metrics = dict[str, float | None]


def measure(
    folder: str | os.PathLike[str], schema: Schema, splits: Sequence[str], *, cache: pathlib.Path | None = None
) -> JsonObject:
    """The baselines' metrics on some splits.

    They are fitted to the training split; what there is to choose (learning rate, L2, epochs, the feature of
    popularity) is the best on the valid split, or on the last tenth of the training split's blocks without one.

    Args:
      folder: The dataset.
      schema: Its description.
      splits: The splits to score, of which the dataset has examples.
      cache: Where results are kept, by the dataset's identity; None for the user's cache folder.

    Returns:
      JSON: by baseline ("logistic_regression", "popularity", or of numbers "mean" and "value_mean"), "splits" with
      metrics and how it was fitted; besides "seconds" it took, and whether the results are "cached".

    Raises:
      DatasetError: If the dataset cannot be used, or has no training split.
    """
    if not schema.with_examples(["train"]):
        raise DatasetError(f"{folder} has no examples in a 'train' split, to which baselines are fitted")
    key = digest_of([VERSION, schema.identity.digests])[:24]
    path = (cache or cache_folder() / "baselines") / f"{key}.json"
    kept = _kept(path)
    # All splits that were ever asked for, together: a run and its later evaluation of another split share one file.
    if kept is None or not all(split in kept["splits"] for split in splits):
        kept = _fitted(folder, schema, sorted({*splits, *({} if kept is None else kept["splits"])}))
        with contextlib.suppress(OSError):  # a cache folder that cannot be written to
            path.parent.mkdir(parents=True, exist_ok=True)
            save_json(path, kept, kind=FORMAT, version=VERSION, sealed=True)
        cached = False
    else:
        cached = True
    metrics = {
        name: {**kept[name], "splits": {split: kept[name]["splits"][split] for split in splits}}
        for name in BASELINES
        if kept.get(name) is not None
    }
    return {**metrics, "seconds": kept["seconds"], "cached": cached}


def wanted(mode: str, schema: Schema) -> bool:
    """Whether `evaluate.baselines` of this value has the baselines of a dataset computed."""
    train = schema.splits.get("train")
    if train is None or not train.examples:
        return False
    return mode == "on" or (mode == "auto" and train.examples <= SMALL)


def _kept(path: pathlib.Path) -> JsonObject | None:
    with contextlib.suppress(JrecError):
        return load_json(path, kind=FORMAT, version=VERSION, error=JrecError, remedy="delete it", sealed=True)
    return None


def _fitted(folder: str | os.PathLike[str], schema: Schema, splits: Sequence[str]) -> JsonObject:
    begin = time.perf_counter()
    training = Split(folder, schema, "train")
    blocks, chosen_by, choosing = training.blocks, "valid", list[Mapping[str, Column]]()
    if "valid" in schema.splits:
        valid = Split(folder, schema, "valid")
        choosing = list(valid.read(valid.blocks[: max(1, _CHOOSING // schema.block_size)]))
    counts = any(len(columns[LABEL]) for columns in choosing)
    if not counts and len(blocks) > 1:
        cut = len(blocks) - max(1, len(blocks) // 10)
        blocks, choosing = blocks[:cut], list(training.read(blocks[cut:][: max(1, _CHOOSING // schema.block_size)]))
        chosen_by = f"the last {len(training.blocks) - cut:,} of {len(training.blocks):,} blocks of train"
    elif not counts:
        choosing, chosen_by = list(training.read(blocks)), "train itself, which is one block"

    def scored(
        scores_of: Callable[[Iterator[Mapping[str, Column]]], Scores | NumberScores],
    ) -> dict[str, _Metrics]:
        wholes = {split: Split(folder, schema, split) for split in splits}
        return {split: _metrics(scores_of(whole.read(whole.blocks))) for split, whole in wholes.items()}

    about = {"splits": list(splits), "chosen_by": chosen_by}
    if schema.numbers is not None:
        mean, by_value = value_means.fit(schema, training.read(blocks), choosing)
        chosen = None if by_value is None or by_value.feature is None else by_value.feature.name
        return {
            "mean": {"splits": scored(mean.scores)},
            "value_mean": None if by_value is None else {"splits": scored(by_value.scores), "feature": chosen},
            **about,
            "seconds": time.perf_counter() - begin,
        }
    slots = Slots(schema, training.read(blocks[:: max(1, len(blocks) // _MOMENTS)]))
    sample = slots.of_block(next(training.read(blocks[:1])))
    visits = int(len(sample.slots) / max(1, len(sample.labels)) * schema.splits["train"].examples)
    epochs = logistic.TrainingBlocks(
        len(blocks), lambda number: slots.of_block(next(training.read([blocks[number]]))), visits=visits
    )
    linear = logistic.fit(slots.count, epochs, [slots.of_block(columns) for columns in choosing], visits=visits)
    popular = popularity.fit(schema, training.read(blocks), choosing)
    return {
        "logistic_regression": {
            "splits": scored(lambda columns: linear.scores(map(slots.of_block, columns))),
            "learning_rate": linear.alpha,
            "l2": linear.l2,
            "epochs": linear.epochs,
        },
        "popularity": None if popular is None else {"splits": scored(popular.scores), "feature": popular.feature.name},
        **about,
        "seconds": time.perf_counter() - begin,
    }


def _metrics(scores: Scores | NumberScores) -> _Metrics:
    if isinstance(scores, NumberScores):
        of_numbers = evaluate_numbers(scores)
        return {name: getattr(of_numbers, name) for name in numbers.METRICS}
    evaluation = evaluate(scores)
    return {name: getattr(evaluation, name) for name in METRICS}
