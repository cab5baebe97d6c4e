"""The dense part of a model for onnxruntime."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

from jrec.ops.layout import EmbeddingLayout
from jrec.optional_packages import remedy
from jrec.serving.format import ExportError
from jrec.serving.program import Parameters, dense_program, symbolic_inputs


def onnx_program(model: Parameters, layout: EmbeddingLayout, num_dense: int) -> bytes:
    """``dense_program`` as an ONNX model of any batch size, with the model's parameters inside.

    Its inputs are "dense", (batch, num_dense) float32, unless there are no dense features, and the vectors of each
    feature under the feature's name, (batch, dim) float32. Its output is "logits", (batch,) float32; of a model that
    returns several arrays, each under its path, such as "click" or "towers.0".

    Raises:
      ExportError: If jax2onnx is not installed, or the model has features of pooling "none", whose masks ONNX lacks.
    """
    try:
        import jax2onnx  # pyright: ignore[reportMissingImports]
    except ImportError as problem:
        raise ExportError(f"--onnx needs jax2onnx, which is not installed: {remedy('onnx')}") from problem
    if unpooled := [feature.name for feature, _ in layout.features if feature.pooling == "none"]:
        raise ExportError(f"feature {unpooled[0]} is not pooled; --onnx is for models whose features all are")
    names, program = [feature.name for feature, _ in layout.features], dense_program(model, layout)

    paths = jax.tree_util.tree_leaves_with_path(jax.eval_shape(program, {}, *symbolic_inputs(layout, num_dense)))
    outputs = [jax.tree_util.keystr(path, simple=True, separator=".") or "logits" for path, _ in paths]

    def logits(*inputs: jax.Array) -> jax.Array | list[jax.Array]:
        *dense, vectors = [inputs[:1], inputs[1:]] if num_dense else [inputs]
        numbers = dense[0][0] if dense else jnp.zeros((inputs[0].shape[0], 0), jnp.float32)
        leaves = jax.tree.leaves(program({}, numbers, dict(zip(names, vectors, strict=True)), {}))
        return leaves[0] if len(leaves) == 1 else leaves

    shapes = [("batch", num_dense)] if num_dense else []
    shapes += [("batch", dim) for _, dim in layout.features]
    inputs = (["dense"] if num_dense else []) + names
    talkative = logging.getLogger("onnx_ir")
    level = talkative.level
    talkative.setLevel(logging.ERROR)  # it warns of every value without a name of its own
    try:
        made = jax2onnx.to_onnx(logits, shapes, model_name="jrec", input_names=inputs, output_names=outputs)
    except NotImplementedError as problem:
        raise ExportError(f"the model cannot be written as ONNX: {problem}") from problem
    finally:
        talkative.setLevel(level)
    return made.SerializeToString()  # pyright: ignore[reportAttributeAccessIssue]
