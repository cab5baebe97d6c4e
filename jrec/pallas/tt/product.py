"""Products of entries that share right factors on a GPU: a tensor-train level's prefix products, slice by slice.

    out[u] = left[l(u)] @ right[r(u)]

Entries come sorted by right factor and are cut in runs; the left factors of a run lie below one another as one tall
matrix, so that a thread uses what it loads of the right factor on many rows. Float32 right factors are multiplied by
fused multiply-adds in registers; bfloat16 ones on a Hopper GPU's tensor cores where their tiles fit (``wgmma``).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Ref

from jrec.pallas.capability import HOPPER, capability
from jrec.pallas.interpret import interpret_params
from jrec.pallas.launch import Interpret, Job, launch
from jrec.pallas.tt.block import divide
from jrec.pallas.tt.engine import Engine, Spec
from jrec.pallas.tt.reduce import Products
from jrec.pallas.tt.runs import Runs, runs_of
from jrec.pallas.tt.tuning import ProductConfig, check_int32, fits_wgmma, tune_product
from jrec.pallas.tt.wgmma import wgmma_products


def grouped_products(
    left: jax.Array,
    right: jax.Array,
    left_index: jax.Array | None,
    order: jax.Array,
    bounds: jax.Array,
    *,
    config: ProductConfig | None = None,
) -> jax.Array:
    """The product of every entry, in float32; terms are added in ascending order.

    Args:
      left: (L, height, contraction) float32 or bfloat16.
      right: (M, contraction, width) float32 or bfloat16.
      left_index: (capacity,) int32, the left factor of each entry; None where it is the entry's number.
      order: (capacity,) int32, the entries by right factor.
      bounds: (M + 1,) int32, where each right factor's entries begin in ``order``.
      config: Tuning of multiply-adds in registers, or None for ``tune_product``'s, or the tensor cores.

    Returns:
      (capacity, height, width) float32; entries that no bounds hold stay unwritten.

    Raises:
      NotImplementedError: Where int32 does not number the rows of an operand or of the result.
    """
    height, capacity = left.shape[1], order.shape[0]
    shape = capacity, height, right.shape[2]
    if 0 in shape or 0 in left.shape or 0 in right.shape:
        return jnp.zeros(shape, jnp.float32)
    fits = right.dtype == jnp.bfloat16 and fits_wgmma(height=height, terms=right.shape[1], width=shape[2])
    check_int32("rows of left factors", left.shape[0] * height)
    check_int32("rows of right factors", right.shape[0] * right.shape[1])
    check_int32("rows of the result", capacity * height)
    if config is None and fits and capability()[0] == HOPPER:
        return wgmma_products(left, right, left_index, order, bounds, interpret=interpret_params())
    if config is None:
        config = tune_product(height=height, width=shape[2])
    products = Products(left, right, left_index, None).flat()
    spec = Spec(block=config.block, contraction=right.shape[1])
    runs = runs_of(order, bounds, config.entries)
    out = _products(products, runs, height=height, spec=spec, config=config, interpret=interpret_params())
    return out.reshape(shape)


@functools.partial(jax.jit, static_argnames=("height", "spec", "config", "interpret"))
def _products(
    products: Products, runs: Runs, *, height: int, spec: Spec, config: ProductConfig, interpret: Interpret
) -> jax.Array:
    block = spec.block

    def tt_products(item: jax.Array, active: Ref, products: Products, runs: Runs, out: Ref) -> None:
        del active  # Read by ``launch``.
        engine, run = Engine.at(spec, interpret, item)
        factor, begin, end = (
            engine.load_scalars(block.items, ref, run, fill=fill)
            for ref, fill in ((runs.factors, -1), (runs.begins, 0), (runs.ends, 0))
        )
        # Row ``r`` of the tall matrix is row ``r % height`` of the run's entry ``r // height``.
        number = divide(engine.rows, height)
        row = engine.rows - number * height
        position = engine.repeat(begin) + number
        position = jnp.where((engine.rows < block.height) & (position < engine.repeat(end)), position, -1)
        entry = engine.load_scalars(block.values, runs.order, position, fill=-1)
        left = entry
        if products.left_index is not None:
            left = engine.load_scalars(block.values, products.left_index, entry, fill=-1)
        real = (left >= 0) & (left * height < products.left.shape[0])
        values = engine.multiply_rows(
            products.left, products.right, jnp.where(real, left * height + row, 0), None, factor
        )
        out_row = jnp.where(real, entry * height + row, -1)
        engine.tt_ops.store_blocks(block, out, out_row, engine.columns, values)

    count = runs.factors.shape[0] * block.chunks
    # Runs that the batch does not have are behind the real ones, and are not walked.
    active = runs.count * jnp.int32(block.chunks)
    job = Job(
        body=tt_products,
        tile=block.items,
        count=count,
        operands=(active, products, runs),
        out_types=(jax.ShapeDtypeStruct((runs.order.shape[0] * height, block.width), jnp.float32),),
        blocks=config.blocks,
        active=0,
    )
    return launch([job], interpret=interpret)[0][0]
