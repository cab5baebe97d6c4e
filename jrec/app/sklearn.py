"""``JrecClassifier`` and ``JrecRegressor``: ``jrec.fit`` as estimators of scikit-learn, which has to be installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from jrec.app.fit import FittedModel, fit, with_index
from jrec.data.schema import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa


class _Estimator(BaseEstimator):
    """What both estimators take, and how they train."""

    def __init__(
        self,
        *,
        time: str = "",
        epochs: int | None = None,
        seed: int | None = None,
        quick: bool = False,
        config: Mapping[str, object] | None = None,
        quiet: bool = True,
    ):
        self.time, self.epochs, self.seed = time, epochs, seed
        self.quick, self.config, self.quiet = quick, config, quiet

    def __getstate__(self) -> Any:
        if hasattr(self, "model_"):
            name = type(self).__name__
            raise TypeError(
                f"a fitted {name} is not pickled or copied, since its model is files; keep it by"
                " estimator.model_.save(FOLDER), which jrec.serving.load reads"
            )
        return super().__getstate__()

    def _fitted(self, X: object, labels: np.ndarray, sample_weight: ArrayLike | None, *, numeric: bool) -> Self:
        table = _table(X)
        if len(labels) != table.num_rows:
            raise DatasetError(f"X has {table.num_rows:,} rows, but y has {len(labels):,}; give a label for each row")
        self.feature_names_in_, self.n_features_in_ = np.array(table.column_names, object), table.num_columns
        table, label, weight = *_appended(table, "label", labels), ""
        if sample_weight is not None:
            weights = np.asarray(sample_weight, np.float64).reshape(-1)
            if len(weights) != table.num_rows:
                raise DatasetError(
                    f"X has {table.num_rows:,} rows, but sample_weight has {len(weights):,}; give one each"
                )
            table, weight = _appended(table, "weight", weights)
        own = self.get_params(deep=False)
        self.model_: FittedModel = fit(table, label=label, numeric=numeric, weight=weight, **own)
        return self


class JrecClassifier(ClassifierMixin, _Estimator):
    """Two classes by ``jrec.fit``, for cross-validation, grids and pipelines of scikit-learn.

    Args:
      time: The column of X that says when a row was; "" for none, and early stopping by rows drawn at random.
      epochs, seed, quick, config, quiet: As of ``jrec.fit``.

    Attributes:
      classes_: The two labels, ascending.
      model_: The fitted model, whose temporary folder goes with the estimator.
      n_features_in_, feature_names_in_: The columns of X.

    Example:
      >>> from sklearn.model_selection import cross_val_score
      >>> cross_val_score(JrecClassifier(quick=True), X, y, scoring="roc_auc")  # doctest: +SKIP
      array([0.7381, 0.7402, 0.7376, 0.7411, 0.7369])
    """

    def fit(self, X: object, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Trains.

        Args:
          X: (rows, features): a DataFrame, an Arrow table, or an array, whose columns are called x0, x1, ….
          y: (rows,) of two distinct values.
          sample_weight: (rows,) finite numbers of at least 0, how much each row counts; None for all alike.

        Raises:
          DatasetError: If y has not two values, y or the weights have another length than X, or a weight is none.
        """
        labels = np.asarray(y).reshape(-1)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) != 2:
            raise DatasetError(f"y has {len(self.classes_)} distinct value(s), and JrecClassifier tells two apart")
        return self._fitted(X, codes, sample_weight, numeric=False)

    def predict_proba(self, X: object) -> np.ndarray:
        """Probabilities of both classes, (rows, 2) float32."""
        check_is_fitted(self)
        positive = self.model_.predict(_table(X))
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, X: object) -> np.ndarray:
        """The likelier class of each row."""
        likelier = self.predict_proba(X).argmax(axis=1)
        return self.classes_[likelier]


class JrecRegressor(RegressorMixin, _Estimator):
    """A number by ``jrec.fit``, such as a rating or a price; arguments and attributes as of ``JrecClassifier``.

    Example:
      >>> from sklearn.model_selection import cross_val_score
      >>> cross_val_score(JrecRegressor(quick=True), X, y, scoring="r2")  # doctest: +SKIP
      array([0.4012, 0.3987, 0.4055, 0.3961, 0.4020])
    """

    def fit(self, X: object, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Trains.

        Args:
          X: As of ``JrecClassifier.fit``, as ``sample_weight``.
          y: (rows,) finite numbers.

        Raises:
          DatasetError: If y or the weights have another length than X, or hold what is no finite number.
        """
        return self._fitted(X, np.asarray(y, np.float64).reshape(-1), sample_weight, numeric=True)

    def predict(self, X: object) -> np.ndarray:
        """The number of each row, (rows,) float32."""
        check_is_fitted(self)
        return self.model_.predict(_table(X))


def _table(rows: object) -> pa.Table:
    """Rows as an Arrow table."""
    import pyarrow as pa

    rows = with_index(rows)
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    array = np.asarray(rows)
    if array.ndim != 2:
        raise DatasetError(f"X is an array of {array.ndim} dimension(s); give (rows, features), or a DataFrame")
    return pa.table({f"x{number}": column for number, column in enumerate(array.T)})


def _appended(table: pa.Table, name: str, values: np.ndarray) -> tuple[pa.Table, str]:
    """The table with another column, and its name, which no other column has."""
    while name in table.column_names:
        name += "_"
    return table.append_column(name, [values]), name
