"""What the forms of ids cost ``jrec.data.pack_batch``: microseconds per 1,000 ids, by the form.

    python -m benchmarks.packing --out packing.jsonl

One feature of one id an example, 4,096 examples, and one of up to 20, 1,024 examples; a dataset's loader packs unsigned
integers. A packer is made once, as for serving; "a new packer" is ``pack_batch`` as it is called for one batch.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import harness
from jrec.data.blocks import ListColumn
from jrec.data.packing import Packer, pack_batch
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

ROWS, EXAMPLES, LISTS, LENGTH = 1_000_000, 4096, 1024, 20
SECONDS, QUICK_SECONDS = 2.0, 0.3
CALLS = 10


def main() -> None:
    """Measures every form."""
    arguments = harness.parser(__doc__).parse_args()
    rng = np.random.default_rng(0)
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    one, lists = rng.integers(0, ROWS, EXAMPLES), rng.integers(0, ROWS, (LISTS, LENGTH))
    with harness.Report(arguments, "packing") as report:
        for case, forms, ids in (
            ("one id an example", _forms_of_one(one), EXAMPLES),
            (f"{LENGTH} ids an example", _forms_of_lists(lists), LISTS * LENGTH),
        ):
            layout = _layout(LENGTH if ids > EXAMPLES else 1)
            runs = {form: _packing(layout, column, vocabulary) for form, (column, vocabulary) in forms.items()}
            column, _ = forms["NumPy, int64"]
            runs["NumPy, int64, a new packer"] = functools.partial(pack_batch, layout, {"f": column}, label=None)
            for form, run in runs.items():
                measured = harness.alternate(harness.timed(run, calls=CALLS), seconds=seconds)
                report.add(case, form, 1e9 * statistics.median(measured.ours) / ids, "µs per 1,000 ids")


def _layout(length: int) -> EmbeddingLayout:
    return EmbeddingLayout.build(
        [TableConfig(name="t", rows=ROWS, dim=16)], [FeatureConfig(name="f", table="t", max_length=length)]
    )


def _packing(layout: EmbeddingLayout, column: Any, vocabulary: Any) -> Callable[[], object]:
    packer = Packer(layout, label=None, vocabularies=None if vocabulary is None else {"t": vocabulary})

    def run() -> object:
        prepared = packer.prepare({"f": column})
        return packer.pack(prepared, prepared.examples)

    return run


def _forms_of_one(ids: np.ndarray) -> dict[str, tuple[Any, Any]]:
    texts = [f"user-{i}" for i in ids.tolist()]
    numbered = {text: int(i) for text, i in zip(texts, ids, strict=True)}
    return {
        "NumPy, uint32": (ids.astype(np.uint32), None),
        "NumPy, int64": (ids, None),
        "NumPy, int64, 1 % absent": (np.where(np.arange(ids.size) % 100, ids, -1), None),
        "Arrow, int64": (pa.array(ids), None),
        "Python integers": (ids.tolist(), None),
        "Arrow texts, hashed": (pa.array(texts), "hash"),
        "Python texts, hashed": (texts, "hash"),
        "NumPy's object texts, hashed": (np.array([t.encode() for t in texts], object), "hash"),
        "Python texts, by a mapping": (texts, numbered),
        "NumPy, int64, hashed": (ids, "hash"),
    }


def _forms_of_lists(ids: np.ndarray) -> dict[str, tuple[Any, Any]]:
    offsets = np.arange(LISTS + 1, dtype=np.int64) * LENGTH
    texts = [[f"user-{i}" for i in one] for one in ids.tolist()]
    return {
        "a list column, uint32": (ListColumn(offsets, ids.reshape(-1).astype(np.uint32)), None),
        "a list column, int64": (ListColumn(offsets, ids.reshape(-1)), None),
        "NumPy, int64": (ids, None),
        "NumPy, int64, half absent": (np.where(np.arange(LENGTH) % 2, ids, -1), None),
        "Arrow lists": (pa.array(ids.tolist()), None),
        "Python lists": (ids.tolist(), None),
        "arrays in a list": (list(ids), None),
        "Arrow lists of texts, hashed": (pa.array(texts), "hash"),
        "Python lists of texts, hashed": (texts, "hash"),
    }


if __name__ == "__main__":
    main()
