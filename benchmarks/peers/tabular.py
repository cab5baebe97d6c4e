"""Logistic regression (scikit-learn), LightGBM and CatBoost on the columns of a click log; this side runs in the peer.

A split's arrays are ``SPLIT.labels`` (n,) bool, ``SPLIT.dense`` (n, d) float32, ``SPLIT.ids`` (n, c) int32, and of
list feature number k ``SPLIT.k.offsets`` (n + 1,) and ``SPLIT.k.values``; SPLIT is train, valid or test. All models
are fitted to train; whatever there is to choose is the best log loss on valid. ``predict`` gives (n,) float64 logits
of valid and test, and the number of the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import catboost  # pyright: ignore[reportMissingImports]
import lightgbm  # pyright: ignore[reportMissingImports]
import numpy as np
import scipy.sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder, StandardScaler

from benchmarks.peers.protocol import Actions, serve

Arrays = Mapping[str, np.ndarray]
Logits = dict[str, np.ndarray]
SPLITS = ("train", "valid", "test")
STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""scikit-learn's C, the reciprocal of L2's strength."""
BINS = 20
TREES: tuple[dict[str, Any], ...] = (
    {"num_leaves": 31},
    {"num_leaves": 63, "min_data_in_leaf": 50},
    {"num_leaves": 15, "cat_smooth": 100.0, "cat_l2": 50.0},
    {"num_leaves": 31, "encoded": True},
)
"""LightGBM's parameters that are tried; "encoded" has a category's mean label in place of its number."""
_COMMON = {
    "objective": "binary",
    "learning_rate": 0.05,
    "feature_fraction": 0.8,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "verbosity": -1,
}
ORDERED: tuple[dict[str, Any], ...] = ({"depth": 6}, {"depth": 8}, {"depth": 6, "one_hot_max_size": 20})
"""CatBoost's parameters that are tried; its learning rate is its own choice, and pairs of categories are among its
features."""
_FOLDS, _PRIOR = 5, 20.0
_WIDE = 100  # rows of a list feature's table up to which LightGBM has a column for each


def logistic(arrays: dict[str, np.ndarray], options: dict[str, Any]) -> Actions:
    """Logistic regression on one-hot ids and dense features, as values alone and also in bins."""
    labels = {split: arrays[f"{split}.labels"] for split in SPLITS}

    def tried() -> Iterator[tuple[int, Logits]]:
        for number, matrices in enumerate(_designs(arrays)):
            model = LogisticRegression(max_iter=300, warm_start=True)  # from the stronger L2's solution
            for at, strength in enumerate(STRENGTHS):
                model.set_params(C=strength).fit(matrices["train"], labels["train"])
                logits = {split: model.decision_function(matrices[split]) for split in SPLITS[1:]}
                yield number * len(STRENGTHS) + at, logits

    return {"predict": lambda: _best(labels["valid"], tried())}


def trees(arrays: dict[str, np.ndarray], options: dict[str, Any]) -> Actions:
    """LightGBM with ``options["seed"]``; ``options["choice"]`` names the parameters, None tries all."""
    labels = {split: arrays[f"{split}.labels"] for split in SPLITS}

    def tried() -> Iterator[tuple[int, Logits]]:
        for choice in _choices(TREES, options):
            own = dict(TREES[choice])
            columns, categories = _columns(arrays, encoded=own.pop("encoded", False))
            parameters = {**_COMMON, **own, "seed": options["seed"], "num_threads": options["threads"]}
            train = lightgbm.Dataset(columns["train"], labels["train"], categorical_feature=categories)
            valid = lightgbm.Dataset(columns["valid"], labels["valid"], reference=train)
            stop = lightgbm.early_stopping(50, verbose=False)
            model = lightgbm.train(parameters, train, 1000, valid_sets=[valid], callbacks=[stop])
            yield choice, {split: model.predict(columns[split], raw_score=True) for split in SPLITS[1:]}

    return {"predict": lambda: _best(labels["valid"], tried())}


def ordered(arrays: dict[str, np.ndarray], options: dict[str, Any]) -> Actions:
    """CatBoost with ``options["seed"]``, ids as its own categories; ``options["choice"]`` as of ``trees``."""
    labels = {split: arrays[f"{split}.labels"] for split in SPLITS}

    def tried() -> Iterator[tuple[int, Logits]]:
        columns, categories = _columns(arrays, encoded=False)
        pools = {split: _pool(columns[split], labels[split], categories) for split in SPLITS}
        for choice in _choices(ORDERED, options):
            model = catboost.CatBoostClassifier(
                iterations=2000, od_type="Iter", od_wait=100, random_seed=options["seed"], allow_writing_files=False,
                thread_count=options["threads"], verbose=False, **ORDERED[choice],
            )  # fmt: skip
            model.fit(pools["train"], eval_set=pools["valid"])
            yield choice, {s: model.predict(pools[s], prediction_type="RawFormulaVal") for s in SPLITS[1:]}

    return {"predict": lambda: _best(labels["valid"], tried())}


def _pool(columns: np.ndarray, labels: np.ndarray, categories: list[int]) -> Any:
    first = columns.shape[1] - len(categories)
    features = catboost.FeaturesData(
        num_feature_data=columns[:, :first].astype(np.float32) if first else None,
        cat_feature_data=columns[:, first:].astype(np.int64).astype(np.bytes_).astype(object) if categories else None,
    )
    return catboost.Pool(features, labels.astype(np.float32))


def _choices(grid: Sequence[Any], options: dict[str, Any]) -> Sequence[int]:
    """The parameters to try: those that an earlier seed chose, or all."""
    return range(len(grid)) if options["choice"] is None else [options["choice"]]


def _best(valid: np.ndarray, tried: Iterable[tuple[int, Logits]]) -> dict[str, np.ndarray]:
    """The logits by split of the least log loss on valid, and the number of their choice."""
    choice, logits = min(tried, key=lambda one: _loss(valid, one[1]["valid"]))
    return {**logits, "choice": np.array(choice)}


def _loss(labels: np.ndarray, logits: np.ndarray) -> float:
    return float(log_loss(labels, 1 / (1 + np.exp(-np.asarray(logits)))))


def _lists(arrays: Arrays) -> list[int]:
    return sorted(int(name.split(".")[1]) for name in arrays if name.startswith("train.") and name.endswith(".offsets"))


def _multi_hot(arrays: Arrays, split: str, number: int, rows: int) -> scipy.sparse.csr_matrix:
    """(n, rows), the share of each id in its example's list."""
    offsets, values = arrays[f"{split}.{number}.offsets"], arrays[f"{split}.{number}.values"]
    lengths = np.diff(offsets)
    shares = np.repeat(1 / np.maximum(lengths, 1), lengths)
    return scipy.sparse.csr_matrix((shares, np.minimum(values, rows - 1), offsets), (len(lengths), rows))


def _rows(arrays: Arrays, number: int) -> int:
    return 1 + max(int(arrays[f"{split}.{number}.values"].max(initial=0)) for split in SPLITS)


def _designs(arrays: Arrays) -> list[dict[str, scipy.sparse.csr_matrix]]:
    """The matrices of logistic regression by split: with dense features as values, and where there are some in bins."""
    parts: dict[str, list[Any]] = {split: [] for split in SPLITS}
    if arrays["train.ids"].shape[1]:
        encoder = OneHotEncoder(handle_unknown="ignore").fit(arrays["train.ids"])
        for split in SPLITS:
            parts[split].append(encoder.transform(arrays[f"{split}.ids"]))
    for number in _lists(arrays):
        rows = _rows(arrays, number)
        for split in SPLITS:
            parts[split].append(_multi_hot(arrays, split, number, rows))
    if not arrays["train.dense"].shape[1]:
        return [_stacked(parts)]
    scaler = StandardScaler().fit(arrays["train.dense"])
    bins = KBinsDiscretizer(BINS, quantile_method="averaged_inverted_cdf").fit(arrays["train.dense"])
    for split in SPLITS:
        parts[split].append(scipy.sparse.csr_matrix(np.clip(scaler.transform(arrays[f"{split}.dense"]), -6, 6)))
    values = _stacked(parts)
    for split in SPLITS:
        parts[split].append(bins.transform(arrays[f"{split}.dense"]))
    return [values, _stacked(parts)]


def _stacked(parts: Mapping[str, list[Any]]) -> dict[str, scipy.sparse.csr_matrix]:
    return {split: scipy.sparse.csr_matrix(scipy.sparse.hstack(parts[split])) for split in SPLITS}


def _columns(arrays: Arrays, *, encoded: bool) -> tuple[dict[str, np.ndarray], list[int]]:
    """LightGBM's columns by split, and which of them are categories."""
    parts = {split: [arrays[f"{split}.dense"]] for split in SPLITS}
    for number in _lists(arrays):
        rows = min(_rows(arrays, number), _WIDE)
        for split in SPLITS:
            parts[split].append(_multi_hot(arrays, split, number, rows).toarray())
    first, count = sum(part.shape[1] for part in parts["train"]), arrays["train.ids"].shape[1]
    for column in range(count):
        for split, values in (_encoded(arrays, column) if encoded else _numbers(arrays, column)).items():
            parts[split].append(values[:, None])
    joined = {split: np.concatenate(parts[split], axis=1).astype(np.float64) for split in SPLITS}
    return joined, [] if encoded else list(range(first, first + count))


def _numbers(arrays: Arrays, column: int) -> dict[str, np.ndarray]:
    return {split: arrays[f"{split}.ids"][:, column] for split in SPLITS}


def _encoded(arrays: Arrays, column: int) -> dict[str, np.ndarray]:
    """Smoothed means of the label by category; those of training examples without their own fold."""
    ids, labels = _numbers(arrays, column), arrays["train.labels"].astype(np.float64)
    rows, mean = 1 + max(int(values.max(initial=0)) for values in ids.values()), labels.mean()
    fold = np.random.default_rng(0).integers(0, _FOLDS, len(labels))

    def means(kept: np.ndarray) -> np.ndarray:
        seen = np.bincount(ids["train"][kept], minlength=rows)
        clicked = np.bincount(ids["train"][kept], labels[kept], minlength=rows)
        return (clicked + _PRIOR * mean) / (seen + _PRIOR)

    whole, own = means(np.ones(len(labels), bool)), np.empty(len(labels))
    for number in range(_FOLDS):
        own[fold == number] = means(fold != number)[ids["train"][fold == number]]
    return {split: own if split == "train" else whole[ids[split]] for split in SPLITS}


if __name__ == "__main__":
    serve(
        {"logistic": logistic, "trees": trees, "ordered": ordered},
        distributions=("scikit-learn", "lightgbm", "catboost"),
    )
