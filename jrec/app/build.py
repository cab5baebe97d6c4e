"""Makes the layout, model and optimizers of a configuration and a dataset's schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import jax
from flax import nnx

from jrec import ops
from jrec.app.config import EmbeddingOptimizerConfig, ModelConfig, TrainConfig, TTSection
from jrec.app.config.typed_toml import MOST
from jrec.app.models.factory import made_by_factory
from jrec.app.models.kind import FACTORY_KEYS
from jrec.app.tables import tt_options
from jrec.data.identity import Identity
from jrec.data.schema import Schema
from jrec.errors import value_errors_are_config_errors
from jrec.json_values import JsonObject
from jrec.nn import EmbeddingCollection, SparseOptimizer
from jrec.nn.optimizer import Loss, SparseModel
from jrec.ops.layout import EmbeddingLayout
from jrec.run.identity import identity_of
from jrec.run.run import Run
from jrec.sharding import Plan

if TYPE_CHECKING:
    from jrec.app.models.kind import EmbeddingOptions

_STREAMS = 0x64726F70  # "drop": sets other streams, such as of dropout, apart from the parameters of the same seed


def build_layout(config: TrainConfig, schema: Schema, plan: Plan | None = None) -> EmbeddingLayout:
    """The tables of a model on this dataset, each in its tier (``plan_tables``).

    Raises:
      ConfigError: If ``[model.features]`` names a feature that the dataset lacks, or the tables cannot be placed.
    """
    return config.model.of_kind.layout(config, schema, plan)


def build_model(config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> SparseModel:
    """A freshly initialized model, seeded by ``config.seed``.

    Raises:
      ConfigError: If the MLPs, the interaction and the features do not fit together, or ``model.factory`` does not make
        a model of them.
    """
    model, tables = config.model, config.tables
    rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(config.seed), _STREAMS), params=config.seed)
    embeddings: EmbeddingOptions = {
        "implementation": None if tables.implementation == "auto" else tables.implementation,
        "tt": tt_options(config, layout),
        "key": rngs.params(),  # the first of the stream, as ``table_key`` draws it
        "rngs": rngs,
    }
    if model.factory:
        collection = EmbeddingCollection(layout, **embeddings)
        return made_by_factory(model, collection, num_dense=len(schema.dense), rngs=rngs)
    with value_errors_are_config_errors("the [model] section does not fit the dataset"):
        return model.of_kind.network(model, schema, layout, embeddings)


def build_loss(model: ModelConfig, schema: Schema) -> Loss:
    """What a step makes smaller; of several labels the weighted sum of their losses."""
    return model.of_kind.loss(model, schema)


def check_model(config: TrainConfig, schema: Schema, layout: EmbeddingLayout) -> None:
    """Refuses what ``build_model`` refuses, in no time and memory: no value is made."""
    nnx.eval_shape(lambda: build_model(config, schema, layout))


def table_key(config: TrainConfig) -> jax.Array:
    """The key of the initial rows of a run's tables, wherever they live."""
    return nnx.Rngs(params=config.seed).params()


def build_optimizer(
    config: TrainConfig, model: SparseModel, total_steps: int, *, first_step: int = 0
) -> SparseOptimizer:
    """Dense and row optimizers; learning rates follow ``[lr_schedule]``, or a table's own, over ``total_steps``.

    Steps before ``first_step``, which a run has that begins with another's optimizer, do not count.
    """
    factor = config.lr_schedule.build(total_steps, first_step=first_step)
    rows, tt = config.optimizer.embedding, config.tables.tt
    embedding, cores = rows.build(factor), _of_cores(rows, tt).build(factor)
    groups: dict[str, ops.RowOptimizer | None] = {"": embedding}  # one object per group: a schedule equals only itself
    own_cores: dict[str, ops.RowOptimizer] = {}
    for table, own in rows.tables.items():
        key = f"optimizer.embedding.tables.{table}.lr_schedule"
        schedule = (
            factor if own.lr_schedule is None else own.lr_schedule.build(total_steps, first_step=first_step, key=key)
        )
        trained, group = rows.of(table), rows.group(table)
        if group not in groups:
            groups[group] = None if trained is None else trained.build(schedule)
        if trained is not None:
            own_cores[table] = _of_cores(trained, tt, own_keys=own.given()).build(schedule)
    trains = [stack.tables[0].name for stack in model.embeddings.layout.tt_stacks]
    with value_errors_are_config_errors("optimizer.embedding"):
        return SparseOptimizer(
            model,
            dense=config.optimizer.build(factor),
            embedding=embedding,
            cores={name: own_cores.get(name, cores) for name in trains} if rows.tables else cores,
            tables={table: groups[rows.group(table)] for table in rows.tables},
            max_global_norm=config.optimizer.max_global_norm,
            rounding_seed=config.seed if rows.stochastic_rounding else None,
            bag_gradients=rows.bag_gradients,
        )


def build_modules(
    config: TrainConfig,
    schema: Schema,
    layout: EmbeddingLayout,
    total_steps: int,
    *,
    first_step: int = 0,
    abstract: bool = False,
) -> tuple[SparseModel, SparseOptimizer]:
    """The model and its optimizer (``build_model``, ``build_optimizer``).

    Args:
      config: The run's configuration.
      schema: The dataset's schema.
      layout: The tables (``build_layout``).
      total_steps: Steps over which learning rates follow ``[lr_schedule]``.
      first_step: Steps that the optimizer took before the run.
      abstract: Whether to make no values: every array is a ``jax.ShapeDtypeStruct``, to be filled from a checkpoint.
        Tables and slots then take neither time nor memory, and a state split from these modules (``compile_run``) has
        the structure that the compiled functions expect.

    Raises:
      ConfigError: If the MLPs, the interaction and the features do not fit together.
    """

    def build() -> tuple[SparseModel, SparseOptimizer]:
        model = build_model(config, schema, layout)
        return model, build_optimizer(config, model, total_steps, first_step=first_step)

    return nnx.eval_shape(build) if abstract else build()


def _of_cores(
    config: EmbeddingOptimizerConfig, tt: TTSection, *, own_keys: Collection[str] = ()
) -> EmbeddingOptimizerConfig:
    """The optimizer of cores whose rows ``config`` would train; the table's ``own_keys`` go before ``tt``."""
    of_cores = {"learning_rate": tt.learning_rate, "weight_decay": tt.weight_decay}
    chosen = {key: value for key, value in of_cores.items() if value is not None and key not in own_keys}
    return dataclasses.replace(config, **chosen)


def described(config: TrainConfig, schema: Schema, *, trained_on: Identity | None = None) -> JsonObject:
    """What checkpoints record of a run beside its tables (``jrec.run.identity``): model, optimizer, dataset.

    Args:
      config: The run's configuration.
      schema: The dataset.
      trained_on: The dataset that the run was trained on, where ``schema`` is another one to evaluate on.
    """
    return {
        "model": _model_description(config.model, len(schema.dense)),
        "num_dense": len(schema.dense),
        "dense_optimizer": config.optimizer.name,
        "dataset": (trained_on or schema.identity).digests,
    }


def run_identity(
    config: TrainConfig, schema: Schema, layout: EmbeddingLayout, *, trained_on: Identity | None = None
) -> JsonObject:
    """What a checkpoint of the configuration's run records; arguments as of ``described``."""
    _, optimizer = build_modules(config, schema, layout, total_steps=MOST, abstract=True)
    return identity_of(layout, optimizer, described(config, schema, trained_on=trained_on))


def _model_description(model: ModelConfig, num_dense: int) -> JsonObject:
    """The model's keys, less those that it does not read, which checkpoints of earlier versions lack."""
    if not model.factory:
        return model.of_kind.identity(model, num_dense)
    keys = dataclasses.asdict(model)
    return {key: keys[key] for key in FACTORY_KEYS} | keys["sections"]


def parameter_counts(model: SparseModel) -> dict[str, dict[str, int]]:
    """Parameters and bytes of the dense part and of every stack, for the report; the model may be abstract."""
    dense = jax.tree.leaves(nnx.state(model, nnx.Param))
    counts: dict[str, dict[str, int]] = {"dense": {"parameters": sum(x.size for x in dense), "bytes": _bytes(dense)}}
    for name, array in model.embeddings.arrays().items():
        rows, dim = array.shape[0], model.embeddings.dims[name]
        counts[name] = {"parameters": rows * dim, "bytes": _bytes([array]), "rows": rows}
    for name, stack in model.embeddings.tt.items():
        arrays = [*stack.arrays(), *(x.get_value() for kind, x in stack.cached.items() if kind == "rows")]
        rows = stack.shape.rows
        counts[name] = {"parameters": sum(x.size for x in arrays), "bytes": _bytes(arrays), "rows": rows}
    layout = model.embeddings.layout
    for stack in (*layout.host_stacks, *layout.planned_stacks):
        parameters = stack.rows * stack.dim
        size = jax.numpy.dtype(stack.dtype).itemsize
        counts[stack.name] = {"parameters": parameters, "bytes": size * parameters, "rows": stack.rows}
    return counts


def run_parameters(run: Run) -> dict[str, dict[str, int]]:
    """``parameter_counts`` of a run's model, with the rows of planned stacks in host memory, and their bytes."""
    counts = parameter_counts(run.modules()[0])
    for stack in run.layout.planned_stacks:
        if run.plan is not None and (rows := run.plan.host_rows(stack.name)):
            size = rows * stack.dim * jax.numpy.dtype(stack.dtype).itemsize
            counts[stack.name] |= {"host_rows": rows, "host_bytes": size}
    return counts


def _bytes(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)
