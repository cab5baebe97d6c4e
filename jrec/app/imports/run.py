"""Makes a run folder of a DLRM's weights, for ``jrec eval``, ``jrec export`` and ``jrec train --resume``."""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile
import tokenize
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jrec.app.build import build_layout, run_identity
from jrec.app.compress import fresh_arrays
from jrec.app.config import DataConfig, ModelConfig, TrainConfig, load_config, save_config
from jrec.app.imports.dlrm import DLRMWeights, Joined, read_dlrm
from jrec.app.imports.torch_file import read_state_dict
from jrec.app.initial_rows import RowsByValue
from jrec.app.loaders import train_loader
from jrec.app.report.running_auc import RunningAuc
from jrec.app.run_folder import new_run_folder
from jrec.app.run_record import TrainedRun
from jrec.checkpoint import Checkpoints
from jrec.checkpoint.manifest import VALUES, TableShape
from jrec.checkpoint.sources import FixedRows, HostPiece, Piece
from jrec.data.schema import Schema, Table
from jrec.data.vocabulary_file import buckets_file
from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout
from jrec.prepare.readers import tables
from jrec.row_optimizers import RowOptimizer
from jrec.run.checkpoint import dense_arrays

if TYPE_CHECKING:
    from jrec.app.config.model import Dtype

_STATE = "state.0."
_VALUES = ("parquet", "arrow", "feather", "jsonl")
"""Endings of files of --rows with values."""


def import_dlrm(
    path: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    rows: str | os.PathLike[str] | None = None,
    interaction: Joined | None = None,
    overwrite: bool = False,
) -> TrainConfig:
    """Makes a run of a DLRM that facebookresearch/dlrm or TorchRec trained; its logits are PyTorch's.

    Table ``N`` of the checkpoint belongs to the dataset's ``N``-th categorical feature, unless the checkpoint names its
    tables as the dataset does. Row ``i`` of a table is PyTorch's id ``i``, unless ``rows`` says otherwise. Tables go
    from file to file in pieces, and are never in memory whole.

    Args:
      path: A file of ``torch.save`` or safetensors; see ``read_state_dict``. Nothing in it is run.
      data: A dataset with the model's features, each with a table of its own.
      out: The run's folder, with a checkpoint of step 0.
      overrides: ``section.key=value`` of the run's configuration, such as its optimizers; not of ``[model]``.
      rows: A folder for tables whose rows are numbered differently, as ``prepare`` numbers them. ``TABLE.parquet`` (or
        ``.arrow``, ``.jsonl``), of one column: the values of the checkpoint's rows, in their order. Or ``TABLE.npy``,
        (rows,) integers: the row of the checkpoint's table for each row of the dataset's. Rows of no value, or -1, are
        zeros.
      interaction: "dot" or "concat" where the widths of the layers do not tell.
      overwrite: Replaces an existing run in ``out``.

    Returns:
      The run's configuration.

    Raises:
      CheckpointError: If the file cannot be read or holds no such model, or the run cannot be written.
      ConfigError: If model and dataset do not fit, or ``out`` holds a run.
      DatasetError: If the dataset cannot be used.
    """
    weights = read_dlrm(read_state_dict(path), interaction=interaction)
    schema = Schema.load(data)
    schema.check_numbered("`jrec import-dlrm` takes rows in the dataset's order")
    config = _configuration(weights, data, out, overrides)
    layout = build_layout(config, schema)
    if layout.tt_stacks:
        raise ConfigError("tables.tt asks for tensor trains; import whole tables, then use `jrec compress`")
    numbers = _tables(weights, schema)
    row_numbers = {table: _rows(rows, schema, table) for table in numbers}
    sources = []
    for table, number in numbers.items():
        source = list(weights.tables.values())[number]
        if row_numbers[table] is None:
            _check_own_numbers(schema, table)
        _check_rows(table, source, schema.table(table).rows, row_numbers[table])
        sources.append(source)
    order = [numbers[feature.table] for feature, _ in layout.features]
    learned = {f"{_STATE}{name}.value": array for name, array in weights.parameters(order).items()}
    arrays = {**fresh_arrays(config, schema, layout), **dense_arrays({}, RunningAuc.empty().state(), layout)}
    if other := [name for name in learned if name not in arrays or arrays[name].shape != learned[name].shape]:
        raise ConfigError(
            f"the model has another {other[0].removeprefix(_STATE)} than the checkpoint; leave out [model]"
        )
    held = dict(zip(numbers, sources, strict=True))
    about = {"command": "jrec import-dlrm", "checkpoint": str(path)}
    with new_run_folder(config, about, overwrite=overwrite, inputs=[path, data, *([rows] if rows else [])]) as folder:
        record = TrainedRun(folder)
        record.keep_dataset(schema.identity)
        loader = train_loader(config, schema, layout)
        Checkpoints(record.checkpoints, fingerprint=run_identity(config, schema, layout)).save(
            0,
            arrays={**arrays, **learned},
            sources=[_source(config, layout, held, row_numbers)],
            # As of a run that has taken no step yet, so that --resume begins with the first batch.
            meta={"meta": {"loader": loader.state(), "losses": [], "hits": {}}},
        )
    return config


def _configuration(
    weights: DLRMWeights, data: str | os.PathLike[str], out: str | os.PathLike[str], overrides: Sequence[str]
) -> TrainConfig:
    dtypes = {str(table.dtype) for table in weights.tables.values()}
    stored = dtypes.pop() if len(dtypes) == 1 else "float32"
    dtype: Dtype = stored if stored in ("bfloat16", "float16") else "float32"
    model = ModelConfig(**weights.model(), table_dtype=dtype)
    config = TrainConfig(data=DataConfig(path=str(data)), name="imported", out=str(out), model=model)
    with tempfile.TemporaryDirectory() as folder:
        save_config(config, path := pathlib.Path(folder) / "imported.toml")
        return load_config(path, overrides)


def _tables(weights: DLRMWeights, schema: Schema) -> dict[str, int]:
    """By the dataset's table, the number of the checkpoint's.

    Raises:
      ConfigError: If features or tables do not fit.
    """
    if len(schema.dense) != weights.num_dense:
        raise ConfigError(f"the dataset has {len(schema.dense)} dense features, but the model {weights.num_dense}")
    tables = [feature.table for feature in schema.categorical]
    if len(set(tables)) < len(tables) or len(tables) != len(weights.tables):
        raise ConfigError(
            f"the dataset's {len(tables)} categorical features have {len(set(tables))} tables, but the model has"
            f" {len(weights.tables)}, one a feature"
        )
    names = list(weights.tables)
    if set(names) == set(tables):
        return {table: names.index(table) for table in tables}
    if names != [str(number) for number in range(len(names))]:
        raise ConfigError(f"the model's tables are {', '.join(names)}, but the dataset's {', '.join(tables)}")
    return {table: number for number, table in enumerate(tables)}


def _rows(folder: str | os.PathLike[str] | None, schema: Schema, table: str) -> np.ndarray | None:
    """By row of the dataset's table, the row of the checkpoint's, or -1; None where the folder does not say."""
    if folder is None:
        return None
    if values := [path for ending in _VALUES if (path := pathlib.Path(folder) / f"{table}.{ending}").is_file()]:
        return _numbers_of_values(values[0], schema, schema.table(table))
    if not (path := pathlib.Path(folder) / f"{table}.npy").is_file():
        return None
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, tokenize.TokenError) as error:  # NumPy reads the header as Python's tokens
        raise ConfigError(f"{path} cannot be read as a NumPy array: {error}") from error


def _numbers_of_values(path: pathlib.Path, schema: Schema, table: Table) -> np.ndarray:
    """``_rows`` by the values of the checkpoint's rows, in their order.

    Raises:
      ConfigError: If the file has several columns, a value twice or none of the table's, or its values have no rows.
    """
    types = tables.column_types(str(path))
    if len(types) != 1:
        raise ConfigError(
            f"{path} of --rows has the columns {', '.join(types)}; give one, the values of PyTorch's rows"
        )
    if table.vocabulary is None:
        raise ConfigError(
            f"{path} of --rows has values, but table {table.name!r} has no vocabulary; give {table.name}.npy"
        )
    by_value, numbers, at = RowsByValue.of(schema, table, str(path)), np.full(table.rows, -1, np.int64), 0
    for batch in tables.read_batches(str(path), list(types), 1 << 16):
        chosen, rows = by_value.rows(batch.column(0))
        numbers[rows] = at + chosen
        at += batch.num_rows
    by_value.check()
    return numbers


def _check_own_numbers(schema: Schema, table: str) -> None:
    """Refuses a table whose rows ``jrec prepare`` numbered, by frequency: a row's number is not PyTorch's id."""
    assert schema.folder is not None
    if schema.table(table).vocabulary is not None:
        where = f"vocabulary/{table}.parquet has the value of every row"
    elif (pathlib.Path(schema.folder) / buckets_file(table)).is_file():
        where = f"{buckets_file(table)} has the row of every hash bucket"
    else:
        return
    raise ConfigError(
        f"table {table!r} of {schema.folder} has rows that `jrec prepare` numbered by frequency, so that row i is not"
        f" PyTorch's id i; give the values of PyTorch's rows as {table}.parquet of a folder of --rows, or say in"
        f" {table}.npy of a folder of --rows which row of the checkpoint each row of the dataset is ({where}), or"
        f" np.arange({schema.table(table).rows}) where PyTorch was trained on the dataset's own rows"
    )


def _check_rows(table: str, source: np.ndarray, rows: int, row_numbers: np.ndarray | None) -> None:
    if row_numbers is None:
        if len(source) != rows:
            raise ConfigError(
                f"table {table!r} has {rows:,} rows in the dataset and {len(source):,} in the checkpoint; row i is"
                f" PyTorch's id i. Prepare the dataset with the same ids, or say in {table}.npy of a folder of --rows"
                " which row of the checkpoint each row of the dataset is"
            )
        return
    if row_numbers.shape != (rows,) or row_numbers.dtype.kind not in "iu":
        raise ConfigError(
            f"{table}.npy of --rows is {row_numbers.dtype} of {row_numbers.shape}; give integers of shape ({rows},)"
        )
    if rows and not (row_numbers.min() >= -1 and row_numbers.max() < len(source)):
        raise ConfigError(
            f"{table}.npy of --rows has values from {row_numbers.min()} to {row_numbers.max()}, but the checkpoint's"
            f" table has {len(source):,} rows (-1 stands for none)"
        )


def _source(
    config: TrainConfig,
    layout: EmbeddingLayout,
    sources: Mapping[str, np.ndarray],
    row_numbers: Mapping[str, np.ndarray | None],
) -> FixedRows:
    """Tables of memory-mapped rows, with fresh slots."""
    factor, shapes, pieces = config.lr_schedule.build(1), dict[str, TableShape](), list[Piece]()
    for t in (t for stack in layout.members for t in stack.tables):
        trained = config.optimizer.embedding.of(t.name)
        optimizer = None if trained is None else trained.build(factor)
        slots: dict[str, str] = {} if optimizer is None else dict(optimizer.slots)
        shape = TableShape(name=t.name, rows=t.rows, dim=t.dim, dtype=t.dtype, slots=slots)
        shapes[t.name] = shape
        read = functools.partial(_read, shape, sources[t.name], row_numbers[t.name], optimizer)
        pieces.append(HostPiece(table=t.name, rows=None, count=t.rows, read=read))
    return FixedRows(shapes, lambda: pieces)


def _read(
    shape: TableShape,
    source: np.ndarray,
    row_numbers: np.ndarray | None,
    optimizer: RowOptimizer | None,
    start: int,
    stop: int,
) -> dict[str, np.ndarray]:
    """Rows ``start`` to ``stop`` of a table and their fresh slots."""
    if row_numbers is None:
        rows = source[start:stop]
    else:
        numbers = np.asarray(row_numbers[start:stop], np.int64)
        rows = source[np.maximum(numbers, 0)]  # a copy
        rows[numbers < 0] = 0
    arrays = {VALUES: np.ascontiguousarray(rows, shape.array(VALUES)[1])}
    for slot in shape.slots:
        assert optimizer is not None  # whose slots they are
        tail, dtype = shape.array(slot)
        arrays[slot] = np.full((stop - start, *tail), optimizer.initial_slot(slot), dtype)
    return arrays
