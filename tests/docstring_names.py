"""What an example in a docstring may assume: the modules of ``MODULES``, and the small ready-made objects of ``READY``.

Beside them an example sees the names of its own module, as doctest has it, and a folder "data" with a prepared log.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec

MODULES = {"functools": functools, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "nnx": nnx, "jrec": jrec}
EXAMPLES = 8


def layout():
    """Tables "user" and "item", looked up by one id an example."""
    tables = [jrec.TableConfig(name="user", rows=1000, dim=8), jrec.TableConfig(name="item", rows=500, dim=8)]
    return jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name=t.name, table=t.name) for t in tables])


def model(tables=None, **options):
    """A DLRM on ``layout`` with one dense feature."""
    config = jrec.nn.DLRMConfig(num_dense=1, bottom_mlp=(8,), top_mlp=(1,))
    return jrec.nn.DLRM(config, tables or layout(), rngs=nnx.Rngs(0), **options)


def optimizer(of):
    """SGD for a model's dense parameters, row-wise Adagrad for its rows."""
    return jrec.nn.SparseOptimizer(of, dense=optax.sgd(0.1), embedding=jrec.ops.RowWiseAdagrad(learning_rate=0.1))


def columns(seed):
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, 1000, EXAMPLES), rng.integers(0, 500, EXAMPLES)
    return {"label": users % 2, "price": rng.random(EXAMPLES, np.float32), "user": users, "item": items}


def tables():
    """One table of 100 rows, as the ops take them."""
    return {"items": jnp.zeros((100, 8))}


def bags():
    """Two bags of ``tables``."""
    return {"items": jrec.Bags(ids=jnp.array([[0, 5], [5, -1]], jnp.int32))}


def ready(wanted):
    """The ready-made objects that an example names, which share the model and the batch.

    ``layout``, ``model``, ``optimizer``, ``batches`` (columns) and ``batch`` (packed), ``counts`` of 10,000 examples,
    ``plan`` of 4 devices; ``tt_model`` and ``tt_optimizer``, whose table "item" is a tensor train with a cache. In an
    example that names ``tables``, they are the ops' ones, with ``bags``, ``optimizer`` (SGD), ``slots``, ``residuals``,
    ``gradients`` and ``dense_gradients``. ``users``, ``ids`` are row numbers; ``labels``, ``price``, ``users`` are
    columns of two examples; ``folder`` is the working folder.
    """
    made = {
        "layout": layout(),
        "tables": tables(),
        "bags": bags(),
        "users": np.array([5, 7], np.uint32),
        "ids": np.array([3, 9]),
    }
    made["batches"] = [columns(seed) for seed in range(2)]
    made |= {"labels": np.array([0, 1], np.uint8), "price": np.ones(2, np.float32), "folder": pathlib.Path()}
    of_layout = {"model", "optimizer", "batch"}
    if wanted & of_layout and "tables" not in wanted:
        made["model"] = model(made["layout"])
        made["optimizer"] = optimizer(made["model"])
        made["batch"] = jrec.data.pack_batch(made["layout"], made["batches"][0], dense=["price"])
    if "tt_model" in wanted:
        shape = jrec.TTShape.search(500, 8, ranks=2)
        item = jrec.TableConfig(name="item", rows=500, dim=8, tier="tt", tt_shape=shape)
        cached = jrec.nn.TTOptions(caches={"item": jrec.ops.TTCacheConfig(cache_rows=16)})
        compressed = jrec.EmbeddingLayout.build([item], [jrec.FeatureConfig(name="item", table="item")])
        made["tt_model"] = model(compressed, tt=cached)
        made["tt_optimizer"] = optimizer(made["tt_model"])
    if "tables" in wanted:
        looked_up, made["residuals"] = jrec.lookup(made["tables"], made["bags"])
        made["gradients"] = jax.tree.map(jnp.ones_like, looked_up)
        made["dense_gradients"] = {"weights": jnp.ones(3)}
        made["optimizer"] = jrec.ops.SGD(learning_rate=0.1)
        made["slots"] = jrec.init_slots(made["optimizer"], made["tables"])
    if wanted & {"counts", "plan"}:
        made["counts"] = jrec.access.power_law_profile({"user": 1000, "item": 500}, examples=10_000)
    if "plan" in wanted:
        made["plan"] = jrec.sharding.plan(
            made["layout"], counts=made["counts"], hardware="h200x8", devices=4, batch_size=64
        )
    return made


def prepare_data(folder: pathlib.Path):
    """Prepares a log of users and items under FOLDER/data, and gives its layout."""
    from jrec.prepare.prepare import prepare
    from jrec.prepare.prepare_options import PrepareOptions
    from jrec.prepare.readers import Delimited, load_schema

    rows = "".join(f"{i % 2},u{i % 20},i{i % 7}\n" for i in range(60))
    (folder / "log.csv").write_text("label,user,item\n" + rows)
    columns = "".join(f'[[categorical]]\ncolumn = "{name}"\n' for name in ("user", "item"))
    (folder / "columns.toml").write_text('[label]\ncolumn = "label"\n' + columns)
    source = Delimited(load_schema(str(folder / "columns.toml")))
    schema = prepare(source, [str(folder / "log.csv")], folder / "data", PrepareOptions(min_count=1, threads=1))
    tables = [jrec.TableConfig(name=table.name, rows=table.rows, dim=8) for table in schema.tables]
    return jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name=t.name, table=t.name) for t in tables])
