"""What a checkpoint is of: its tables and, where the run says so, its model and dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jrec.checkpoint import Saved
from jrec.errors import CheckpointError
from jrec.json_values import JsonMapping, JsonObject
from jrec.nn import SparseOptimizer
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.row_optimizers import ROW_OPTIMIZERS

_SHOWN = 5  # differences that a message names
Description = JsonMapping
"""JSON. Checkpoints of two runs that both have a key here go together only where its values are equal."""


def identity_of(layout: EmbeddingLayout, optimizer: SparseOptimizer, description: Description) -> JsonObject:
    """What a checkpoint records of its run, JSON; ``check_identity`` compares it.

    Args:
      layout: The tables.
      optimizer: The row optimizers, whose slots the rows have.
      description: What else the run knows of itself, such as its model and its dataset.
    """

    def trained_by(stack: Stack) -> str:
        own = optimizer.of(stack.name)
        return "frozen" if own is None else type(own).__name__

    return {**description, "tables": _described(layout, trained_by)}


def identity_in(layout: EmbeddingLayout, saved: Saved) -> JsonObject:
    """What a checkpoint records of its run, with its tables as ``layout`` has them; see ``identity_of``."""
    stored = _converted(saved.manifest.fingerprint)
    tables = stored["tables"]
    return {**stored, "tables": _described(layout, lambda stack: tables[stack.tables[0].name]["optimizer"])}


def _described(layout: EmbeddingLayout, trained_by: Callable[[Stack], str]) -> JsonObject:
    """The tables, or parts of them, each with the name of its row optimizer."""
    tables: JsonObject = {}
    for stack in layout.members:
        for table in stack.tables:
            shape = table.tt_shape
            described: JsonObject = {"rows": table.rows, "dim": table.dim, "dtype": table.dtype}
            described["optimizer"] = trained_by(stack)
            if shape is not None:
                described |= {"row_factors": list(shape.row_factors), "dim_factors": list(shape.dim_factors)}
                described["ranks"] = list(shape.ranks)
            tables[f"{table.name}[{table.first_row}:]" if table.first_row else table.name] = described
    return tables


def check_identity(saved: Saved, own: JsonMapping, *, optimizers: bool) -> None:
    """Refuses a checkpoint of another model.

    Args:
      saved: The checkpoint.
      own: What it is to be of (``identity_of``).
      optimizers: Whether the optimizers must agree too; they need not for predictions.

    Raises:
      CheckpointError: Naming what differs.
    """
    stored = _converted(saved.manifest.fingerprint)
    shared = [key for key in own if key in stored and key != "tables" and (optimizers or key != "dense_optimizer")]
    differing = [text for key in shared for text in _differences(stored[key], own[key], key)]
    differing += _of_tables(stored.get("tables", {}), own["tables"], optimizers=optimizers)
    if differing:
        more = f"; and {len(differing) - _SHOWN:,} more" if len(differing) > _SHOWN else ""
        raise CheckpointError(
            f"{saved.folder} is a checkpoint of another model: {'; '.join(differing[:_SHOWN])}{more}."
            " Use its own configuration, or another run folder"
        )


def meta_of(saved: Saved) -> JsonObject:
    """What a run gave with its checkpoint."""
    meta = saved.manifest.meta
    if "meta" in meta:
        return dict(meta["meta"])
    return {key: value for key, value in meta.items() if key != "forms"}  # `jrec train` of earlier versions


def _converted(stored: JsonMapping) -> JsonMapping:
    """What a checkpoint records; of one that `jrec train` of earlier versions wrote, what it knew of its tables."""
    if not isinstance(optimizer := stored.get("optimizer"), Mapping):
        return stored
    by_table, tables = optimizer.get("tables", {}), {}
    for name, entry in stored["tables"].items():
        described = dict(entry) if isinstance(entry, Mapping) else {"rows": entry}
        described.pop("cache_rows", None)  # a cache's arrays are of that size
        own = by_table.get(name, optimizer["embedding"])
        described["optimizer"] = "frozen" if own == "frozen" else ROW_OPTIMIZERS[own].__name__
        if (whole := described.pop("whole_rows", 0)) or "ranks" in described:
            described["rows"] -= whole
        if whole:
            tables[name] = {"rows": whole, "optimizer": described["optimizer"]}
        tables[f"{name}[{whole}:]" if whole else name] = described
    kept = {key: value for key, value in stored.items() if key not in ("optimizer", "tables")}
    return {**kept, "dense_optimizer": optimizer["dense"], "tables": tables}


def _of_tables(stored: JsonMapping, own: JsonMapping, *, optimizers: bool) -> list[str]:
    """How tables differ in what is known of both."""
    texts = [f"tables.{name} exists only in the checkpoint" for name in stored if name not in own]
    texts += [f"tables.{name} exists only in this run" for name in own if name not in stored]
    for name in own.keys() & stored.keys():
        shared = [key for key in own[name] if key in stored[name] and (optimizers or key != "optimizer")]
        before, now = ({key: side[name][key] for key in shared} for side in (stored, own))
        texts += _differences(before, now, f"tables.{name}")
    return sorted(texts)


def _differences(stored: object, own: object, prefix: str) -> list[str]:
    """Human-readable differences of two JSON-like values; tuples equal lists."""
    if isinstance(stored, Mapping) and isinstance(own, Mapping):
        keys = sorted({*stored, *own})
        return [text for key in keys for text in _differences(stored.get(key), own.get(key), f"{prefix}.{key}")]
    if isinstance(own, tuple | list) and isinstance(stored, tuple | list):
        return [] if list(own) == list(stored) else [f"{prefix} was {list(stored)} and is {list(own)}"]
    return [] if stored == own else [f"{prefix} was {stored!r} and is {own!r}"]
