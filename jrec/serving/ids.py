"""The ids of a request, and the door at which they and dense features are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.serving.format import Feature

ABSENT = np.int32(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids:
    """The ids of a feature for some examples, rows of its table.

    Attributes:
      values: int32, or other integers: (examples, length) with up to ``max_length`` ids each or, with ``offsets``,
        (capacity,). -1 is absent.
      offsets: (examples + 1,) int32, ascending from 0, or None.
      weights: float32 of the shape of ``values``, of weighted features; None of others.
    """

    values: np.ndarray
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None

    def padded(self, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids and weights, (examples, length), absent ones -1; longer examples raise ValueError."""
        if self.offsets is None:
            values, weights = self.values, self.weights
            if values.shape[1] > length:
                raise ValueError(f"examples have {values.shape[1]} ids, but at most {length} fit")
            width = ((0, 0), (0, length - values.shape[1]))
            return np.pad(values, width, constant_values=ABSENT), None if weights is None else np.pad(weights, width)
        lengths = np.diff(self.offsets)
        if lengths.size and lengths.max() > length:
            raise ValueError(f"an example has {lengths.max()} ids, but at most {length} fit")
        values = np.full((lengths.size, length), ABSENT, np.int32)
        # A mask goes by rows, as the flat ids do: each example's land at the begin of its own row.
        held = np.arange(length) < lengths[:, None]
        values[held] = self.values[self.offsets[0] : self.offsets[-1]]
        if self.weights is None:
            return values, None
        weights = np.zeros(values.shape, np.float32)
        weights[held] = self.weights[self.offsets[0] : self.offsets[-1]]
        return values, weights


def checked_dense(dense: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """(examples, num_dense) float32, C-contiguous, of such numbers.

    Raises:
      ValueError: If it has another shape, or holds what is no finite float32; the message names the feature.
    """
    numbers = np.asarray(dense)
    if numbers.ndim != 2 or numbers.shape[1] != len(names) or numbers.dtype.kind not in "fiu":
        raise ValueError(
            f"dense is {numbers.dtype}{list(numbers.shape)}; give float32 of (examples, {len(names)}), a column"
            f" for each of {', '.join(names) or 'no features'}"
        )
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(numbers, np.float32)
    if not (finite := np.isfinite(floats)).all():
        example, column = (int(place) for place in np.argwhere(~finite)[0])
        raise ValueError(
            f"dense feature {names[column]!r} is {numbers[example, column]} in example {example}; give finite float32"
        )
    return floats


def checked_features(
    ids: Mapping[str, Ids], features: Sequence[Feature], rows: Mapping[str, int], examples: int | None
) -> dict[str, Ids]:
    """The ids of all features as the kernels take them.

    Args:
      ids: By feature.
      features: The model's.
      rows: By table.
      examples: How many examples there must be; None for as many as the first feature has.

    Raises:
      ValueError: If a feature is missing or unknown, or its ids are not as ``Ids`` says; the message names it.
    """
    names = [feature.name for feature in features]
    if odd := sorted(map(str, set(names) ^ set(ids))):
        fault = "are missing; give Ids of all" if odd[0] in names else "are of no feature of the model; its"
        raise ValueError(f"ids of feature {odd[0]!r} {fault} features: {', '.join(names)}")
    checked: dict[str, Ids] = {}
    for feature in features:
        checked[feature.name] = one = _checked(feature, ids[feature.name], rows[feature.table])
        count = len(one.values) if one.offsets is None else len(one.offsets) - 1
        examples = count if examples is None else examples
        if count != examples:
            raise ValueError(f"feature {feature.name!r} has ids of {count:,} examples, but there are {examples:,}")
    held = [_held(one.values, one.offsets).reshape(-1) for one in checked.values()]
    starts = np.cumsum([0, *map(len, held)])[:-1]
    every = np.concatenate([*held, [ABSENT]])  # one more, since ``reduceat`` wants every start to be a place
    bounds = [rows[feature.table] for feature in features]
    # At once for all features: two reductions of each took a third of the time of a request of one row. Where a feature
    # has no ids, this looks at one of the next, which may be past its table; then each is looked at by itself.
    if every.min() < ABSENT or (np.maximum.reduceat(every, starts) >= bounds).any():
        for feature in features:
            one = checked[feature.name]
            _check_within(feature, _held(one.values, one.offsets), rows[feature.table])
    return checked


def _checked(feature: Feature, ids: Ids, rows: int) -> Ids:
    subject = f"feature {feature.name!r}"
    if not isinstance(ids, Ids):
        raise ValueError(f"{subject} has a {type(ids).__name__}; give jrec.serving.Ids(values=...)")
    values, offsets = np.asarray(ids.values), None if ids.offsets is None else np.asarray(ids.offsets)
    if values.ndim != (2 if offsets is None else 1) or values.dtype.kind not in "iu":
        form = f"(examples, up to {feature.max_length:,})" if offsets is None else "(capacity,) beside offsets"
        raise ValueError(f"{subject} has ids of {values.dtype}{list(values.shape)}; give int32 of {form}")
    if offsets is None:
        longest = values.shape[1]
    else:
        offsets = _checked_offsets(subject, offsets, values.size)
        longest = int(np.diff(offsets).max(initial=0))
    if longest > feature.max_length:
        raise ValueError(f"{subject} has {longest:,} ids in an example, but at most {feature.max_length:,} fit")
    weights = ids.weights
    if weights is not None or feature.weighted:
        weights = _checked_weights(feature, weights, values, len(_held(values, offsets)))
    if values.dtype != np.int32:
        _check_within(feature, _held(values, offsets), rows)  # before they are made int32
    elif values is ids.values and offsets is ids.offsets and weights is ids.weights and values.flags.c_contiguous:
        return ids
    return Ids(values=np.ascontiguousarray(values, np.int32), offsets=offsets, weights=weights)


def _held(values: np.ndarray, offsets: np.ndarray | None) -> np.ndarray:
    """The ids of examples, without those behind the last one's."""
    return values if offsets is None else values[: offsets[-1]]


def _check_within(feature: Feature, held: np.ndarray, rows: int) -> None:
    low, high = (held.min(), held.max()) if held.size else (0, 0)
    if low < ABSENT or high >= rows:
        raise ValueError(
            f"feature {feature.name!r} has id {high if high >= rows else low:,}, but table {feature.table!r} has"
            f" {rows:,} rows; give -1 (absent) to {rows - 1:,}"
        )


def _checked_offsets(subject: str, offsets: np.ndarray, size: int) -> np.ndarray:
    if offsets.ndim != 1 or not offsets.size or offsets.dtype.kind not in "iu":
        raise ValueError(
            f"{subject} has offsets of {offsets.dtype}{list(offsets.shape)}; give int32 of (examples + 1,)"
        )
    if offsets[0] != 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{subject} has offsets that do not ascend from 0 to at most {size:,}, the number of ids")
    return np.ascontiguousarray(offsets, np.int32)


def _checked_weights(feature: Feature, weights: np.ndarray | None, values: np.ndarray, used: int) -> np.ndarray | None:
    """Weights as the kernels take them; those past the first ``used`` entries are padding."""
    subject = f"feature {feature.name!r}"
    if weights is None or not feature.weighted:
        if weights is not None:
            raise ValueError(f"{subject} has weights, but it is not a weighted feature; leave them out")
        if feature.weighted:
            raise ValueError(f"{subject} is weighted; give weights of float32{list(values.shape)}, one an id")
        return None
    numbers = np.asarray(weights)
    if numbers.shape != values.shape or numbers.dtype.kind not in "fiu":
        raise ValueError(
            f"{subject} has weights of {numbers.dtype}{list(numbers.shape)}; give float32{list(values.shape)}, one"
            " an id"
        )
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(numbers, np.float32)
    # Kernels skip absent ids, so that their weights, and those of padding, may be anything.
    if not np.isfinite(floats).all() and (bad := ~np.isfinite(floats[:used]) & (values[:used] >= 0)).any():
        raise ValueError(f"{subject} has weight {numbers[:used][bad][0]}; give finite float32")
    return floats


def masks(features: Sequence[Feature], ids: Mapping[str, Ids]) -> dict[str, np.ndarray]:
    """Which positions of the features of pooling "none" hold an id, (examples, max_length) bool by feature."""
    return {f.name: ids[f.name].padded(f.max_length)[0] >= 0 for f in features if f.pooling == "none"}
