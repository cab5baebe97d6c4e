"""Kernels say where they cannot run, by the compute capability of JAX's default device."""

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax.extend import backend

from jrec import ops
from jrec.pallas.capability import capability, check_capability
from jrec.pallas.tt.product import grouped_products
from jrec.pallas.tt.wgmma import wgmma_products


@pytest.fixture
def on(monkeypatch):
    """Makes another device the default one."""

    def use(said, kind="a GPU"):
        device = types.SimpleNamespace(compute_capability=said, device_kind=kind)
        monkeypatch.setattr(backend, "get_default_device", lambda: device)

    return use


def test_without_a_gpu_kernels_are_hoppers():
    assert capability() == (9, 0)


@pytest.mark.parametrize(("said", "found"), [("8.0", (8, 0)), ("8.9", (8, 9)), ("9.0", (9, 0)), ("10.3", (10, 3))])
def test_gpus_that_kernels_are_compiled_for(on, said, found):
    on(said)
    check_capability()
    assert capability() == found


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("7.5", "Tesla T4", "of compute capability 8.0 to 10.3, and this one has 7.5"),
        ("12.0", "NVIDIA GeForce RTX 5090", "this one has 12.0"),
        ("gfx942", "AMD Instinct MI300X", r"run on NVIDIA GPUs, and this is AMD Instinct MI300X \(gfx942\)"),
    ],
)
def test_a_named_kernel_refuses_other_gpus(on, said, kind, words):
    on(said, kind)
    table, ids = jax.ShapeDtypeStruct((10, 8), jnp.float32), jax.ShapeDtypeStruct((4, 2), jnp.int32)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda table, ids: ops.gather_reduce(table, ids, implementation="pallas"), table, ids)


@pytest.mark.parametrize(("said", "tensor_cores"), [("8.0", False), ("9.0", True), ("10.0", False)])
def test_tensor_cores_are_left_to_hopper(on, said, tensor_cores):
    """Their products are multiplied in registers elsewhere."""
    on(said)
    left, right = jax.ShapeDtypeStruct((5, 4, 64), jnp.float32), jax.ShapeDtypeStruct((5, 64, 64), jnp.bfloat16)
    index, bounds = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((6,), jnp.int32)
    given = left, right, index, index, bounds
    # Functions of their own: JAX keeps what it traced by function and shapes.
    program = str(jax.make_jaxpr(lambda *given: grouped_products(*given))(*given))
    assert ("name=tt_products" in program, "wgmma" in program) == (not tensor_cores, tensor_cores)
    refused = contextlib.nullcontext() if tensor_cores else pytest.raises(NotImplementedError, match="of Hopper GPUs")
    with refused:
        jax.eval_shape(lambda *given: wgmma_products(*given, interpret=None), *given)
