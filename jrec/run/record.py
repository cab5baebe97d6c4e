"""What made a run's model: recorded in its checkpoints, so that commands open them without the run's program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jrec.checkpoint import Saved
from jrec.data.identity import Identity
from jrec.errors import CheckpointError
from jrec.files import decode
from jrec.json_values import JsonMapping, JsonObject
from jrec.nn import DLRM, TBSM
from jrec.nn.optimizer import SparseModel
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.row_init import is_threefry, key_words

RECORD = "made"
"""The key of a checkpoint's meta."""
_OF_DLRM = (
    *("bottom_mlp", "top_mlp", "interaction", "compute_dtype"),
    *("dropout", "batch_norm", "dense_boundaries", "calibrate"),
)
"""Keys that ``[model]`` of a configuration has for a DLRM and a TBSM alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What made a model.

    Attributes:
      model: The model as keys of ``[model]`` of a configuration: of a DLRM or TBSM, or ``factory`` and ``options``.
      tables, features: The layout (``EmbeddingLayout.build``).
      dense: Names of the float features, in the order the model takes them.
      key: The words of the key of the initial rows.
      dataset: The dataset whose rows the tables have; None where it is not known.
    """

    model: JsonObject
    tables: tuple[TableConfig, ...]
    features: tuple[FeatureConfig, ...]
    dense: tuple[str, ...]
    key: tuple[int, int]
    dataset: Identity | None

    def layout(self, *, planned: bool) -> EmbeddingLayout:
        """The layout of the model, or of its tables under a plan."""
        return EmbeddingLayout.build(self.tables, self.features, planned=planned)

    def table_key(self) -> jax.Array:
        """The key of the initial rows."""
        return jax.random.wrap_key_data(jnp.array(self.key, jnp.uint32), impl="threefry2x32")

    def of(self, dense: tuple[str, ...], dataset: Identity | None) -> Record:
        """The record of a run that has been fed."""
        dense, model = dense or self.dense, self.model
        pieces = model.get("dense_boundaries", {})
        if not isinstance(pieces, Mapping) and len(pieces) in (0, len(dense)):  # a model has no names of features
            model = {**model, "dense_boundaries": {name: own for name, own in zip(dense, pieces, strict=False) if own}}
        return dataclasses.replace(self, dataset=dataset or self.dataset, dense=dense, model=model)

    def meta(self) -> JsonObject:
        """For a checkpoint, JSON."""
        return {RECORD: dataclasses.asdict(self)}


def record_of(
    model: SparseModel, key: jax.Array, *, factory: str | None = None, options: JsonMapping | None = None
) -> Record | None:
    """The record of a run that begins; None of a model that neither is jrec's own nor has a factory.

    Args:
      model: The model.
      key: The key of its initial rows.
      factory: The function that made it, as "package.module:function".
      options: The factory's own keyword arguments, JSON.
    """
    caches = any(stack.cache_config is not None for stack in model.embeddings.tt.values())
    described = {"factory": factory, "options": dict(options or {})} if factory else _described(model)
    if described is None or caches or not is_threefry(key):
        return None
    layout = model.embeddings.layout
    first, second = (int(word) for word in key_words(key))
    return Record(
        model=described,
        tables=layout.tables,
        features=tuple(config for config, _ in layout.features),
        dense=(),
        key=(first, second),
        dataset=None,
    )


def recorded(saved: Saved) -> Record:
    """The record in a checkpoint.

    Raises:
      CheckpointError: If it has none.
    """
    if (content := saved.manifest.meta.get(RECORD)) is None:
        raise CheckpointError(
            f"{saved.folder} does not say what made its model, which is neither DLRM nor TBSM, or has caches of tensor"
            " trains; give jrec.distribute the factory that makes it, and its options"
        )
    return decoded(content, where=str(saved.folder))


def decoded(content: object, *, where: str) -> Record:
    """The record of a checkpoint's JSON."""
    return decode(content, Record, where=where, error=CheckpointError, remedy="copy the checkpoint again")


def _described(model: SparseModel) -> JsonObject | None:
    """Keys of ``[model]`` for a DLRM or TBSM."""
    if type(model) is not DLRM and type(model) is not TBSM:
        return None
    keys: JsonObject = dataclasses.asdict(model.config)
    del keys["num_dense"]
    keys["calibrate"] = keys.pop("calibrated")
    heads = keys.pop("multi_task")
    if heads is not None and any(str(heads[key]) != str(keys[key]) for key in ("compute_dtype", "dropout")):
        return None  # a configuration has one of each for the whole model
    if isinstance(model, TBSM):
        own = {key: value for key, value in keys.items() if key not in _OF_DLRM}
        own["histories"] = dict(own["histories"])
        keys = {"kind": "tbsm", "tbsm": own, **{key: keys[key] for key in _OF_DLRM}}
    if heads is not None:
        keys["top_mlp"] = (*heads["expert_mlp"], 1)
        keys["multi_task"] = {key: heads[key] for key in ("tasks", "experts", "tower_mlp")}
    (dim, *_) = {dim for _, dim in model.embeddings.layout.features}
    return {"embedding_dim": dim // keys.get("members", 1) - bool(keys.get("wide")), **keys}
