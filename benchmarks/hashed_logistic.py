"""The baseline that a click model must beat: scikit-learn's logistic regression on hashed Criteo features."""

from __future__ import annotations

import gzip
import math
import pathlib
from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

NUM_INTEGERS = 13
HASHED_FEATURES = 1 << 20


def read_hashed(path: pathlib.Path):
    """Reads a Criteo log into (labels (examples,) int8, hashed (examples, 2^20) sparse), in file order.

    Every column gives one binary feature, the hash of its number and value; integers above 2 are binned by the square
    of their logarithm, as the challenge's winners did.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        examples = [line.rstrip("\n").split("\t") for line in file]
    labels = np.array([int(example[0]) for example in examples], np.int8)
    hasher = FeatureHasher(HASHED_FEATURES, input_type="string", alternate_sign=False)
    tokens = ([_token(c, value) for c, value in enumerate(example[1:])] for example in examples)
    return labels, hasher.transform(tokens)


def _token(column: int, value: str) -> str:
    if column < NUM_INTEGERS and value and int(value) > 2:
        value = f"bin {int(math.log(int(value)) ** 2)}"
    return f"{column}={value}"


def fit_and_score(labels: np.ndarray, features, *, train: int, test: int, regularization: float) -> dict[str, float]:
    """Fits on the first ``train`` examples, scores on those from ``test`` on: {"auc": ..., "log_loss": ...}."""
    model = LogisticRegression(C=regularization, solver="liblinear").fit(features[:train], labels[:train])
    predicted = model.predict_proba(features[test:])[:, 1]
    return {
        "auc": float(roc_auc_score(labels[test:], predicted)),
        "log_loss": float(log_loss(labels[test:], predicted)),
    }


def choose_regularization(
    labels: np.ndarray, features, candidates: Sequence[float], *, train: int, valid: int
) -> float:
    """The inverse strength with the greatest AUC on examples ``train`` to ``valid`` after fitting on those before."""
    scores = {
        c: fit_and_score(labels[:valid], features[:valid], train=train, test=train, regularization=c)["auc"]
        for c in candidates
    }
    return max(scores, key=scores.__getitem__)
