"""The native kernels inside jit: errors through XLA, availability, the compile cache, concurrency, thread counts."""

import concurrent.futures
import importlib.util
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrec import ops
from jrec.native import xla
from jrec.ops import dispatch


@pytest.fixture
def fresh():
    """Availability is decided once; tests that change what it sees start and end afresh."""
    xla.unavailable.cache_clear()
    dispatch.native_unavailable.cache_clear()
    yield
    xla.unavailable.cache_clear()
    dispatch.native_unavailable.cache_clear()


def test_malformed_casts_are_errors():
    cast = ops.tensor_cast(jnp.zeros((5, 2), jnp.int32), num_rows=4, implementation="xla")
    bad = ops.Cast(
        rows=cast.rows,
        offsets=cast.offsets + 3,
        sources=cast.sources,
        positions=cast.positions,
        num_unique=jnp.int32(3),
    )
    with pytest.raises(Exception, match="a cast's offsets must ascend"):
        jax.block_until_ready(
            ops.casted_update(
                ops.SGD(learning_rate=0.1), jnp.ones((4, 8)), {}, bad, jnp.ones((5, 8)), implementation="native"
            )
        )


def test_results_do_not_depend_on_threads(monkeypatch):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 3000, (40_000, 1)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.4] = 5
    table, gradients = rng.normal(size=(3000, 40)).astype(np.float32), rng.normal(size=(40_000, 40)).astype(np.float32)
    optimizer = ops.Adagrad(learning_rate=0.1)

    def run():
        def step(table, ids, gradients):
            cast = ops.tensor_cast(ids, num_rows=3000, implementation="native")
            new = ops.casted_update(optimizer, table, optimizer.init(table), cast, gradients, implementation="native")
            return cast, new, ops.gather_reduce(gradients, cast.sources, cast.offsets, implementation="native")

        return jax.jit(step)(table, ids, gradients)

    results = []
    for num_threads in ("1", "2", "2"):
        monkeypatch.setenv("JREC_NUM_THREADS", num_threads)
        results.append(jax.block_until_ready(run()))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


def test_concurrent_callers_do_not_disturb_each_other():
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(2000, 48)), jnp.float32)
    batches = [jnp.asarray(rng.integers(0, 2000, (6000, 4)), jnp.int32) for _ in range(6)]
    run = jax.jit(lambda t, i: (ops.gather_reduce(t, i, implementation="native"), ops.tensor_cast(
        i, num_rows=2000, implementation="native")))  # fmt: skip
    want = [jax.block_until_ready(run(table, batch)) for batch in batches]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            got = list(pool.map(lambda batch: jax.block_until_ready(run(table, batch)), batches))
            jax.tree.map(np.testing.assert_array_equal, got, want)


def test_programs_keep_no_tracers():
    optimizer, table, ids = ops.RowWiseAdagrad(learning_rate=0.1), jnp.ones((5, 2)), jnp.ones((3, 2), jnp.int32)

    @jax.jit
    def step(table, slots, ids):
        sums, residuals = ops.lookup({"t": table}, {"t": ops.Bags(ids=ids)})
        return ops.apply_gradients(optimizer, {"t": table}, slots, residuals, sums, step=0)

    with jax.checking_leaks():
        step(table, ops.init_slots(optimizer, {"t": table}), ids)


def test_default_is_native_on_cpu():
    lowered = jax.jit(lambda t, i: ops.gather_reduce(t, i)).lower(jnp.ones((4, 8)), jnp.zeros((2, 3), jnp.int32))
    assert "jrec_gather_reduce" in lowered.as_text()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("version", [(1, 0), (0, 3), None])
def test_another_ffi_version_falls_back_to_xla_with_the_reason(version, monkeypatch):
    monkeypatch.setattr(xla, "_api_version", lambda: version)
    reason = "FFI version" if version is None else f"speaks FFI version {version[0]}.{version[1]}"
    assert reason in xla.unavailable()
    with pytest.warns(UserWarning, match=reason):
        lowered = jax.jit(lambda t, i: ops.gather_reduce(t, i)).lower(jnp.ones((4, 8)), jnp.zeros((2, 3), jnp.int32))
    assert "jrec_gather_reduce" not in lowered.as_text()
    with pytest.raises(NotImplementedError, match=reason), warnings.catch_warnings():
        ops.gather_reduce(jnp.ones((4, 8)), jnp.zeros((2, 3), jnp.int32), implementation="native")


def test_the_installed_header_is_found():
    assert xla.unavailable() is None
    assert xla._api_version() >= (0, 4)


def test_more_threads_than_cores_do_every_chunk_once():
    code = """
import jax, jax.numpy as jnp, numpy as np
from jrec import ops
from jrec.native import threads

rng = np.random.default_rng(0)
table = jnp.asarray(rng.standard_normal((5000, 16)), jnp.float32)
ids = jnp.asarray(rng.integers(-1, 5000, (40_001, 3)), jnp.int32)
sgd, found = ops.SGD(learning_rate=0.1), []
for count in (1, 7):
    threads.num_threads = lambda count=count: count

    def step(table, ids):
        pooled = ops.gather_reduce(table, ids, implementation="native")
        cast = ops.tensor_cast(ids, num_rows=5000, implementation="native")
        return pooled, ops.casted_update(sgd, table, {}, cast, pooled, implementation="native")

    text = jax.jit(step).lower(table, ids).as_text()
    assert f"threads = {count} " in text, text
    found.append(jax.tree.map(np.asarray, jax.jit(step)(table, ids)))
jax.tree.map(np.testing.assert_array_equal, *found)
expected = np.where((ids >= 0)[..., None], np.asarray(table)[ids], 0).sum(1)
np.testing.assert_allclose(found[1][0], expected, rtol=1e-5, atol=1e-5)
"""
    environment = os.environ | {"NPROC": "7"}  # of XLA's pool
    call = {"env": environment, "capture_output": True, "text": True, "timeout": 300}  # a chunk left out is waited for
    done = subprocess.run([sys.executable, "-c", code], check=False, **call)
    assert done.returncode == 0, done.stderr


def test_importing_ops_does_not_import_numba():
    code = "import sys, jrec.ops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_kernels_run_where_no_cache_can_be_written(tmp_path):
    source = pathlib.Path(importlib.util.find_spec("jrec").origin).parent / "native" / "compile.py"
    code = (
        "from numba import types\n"
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from jrec.native import ffi\n"
        "assert ffi.pool_task.address\n"
        "print('compiled')"
    )
    assert source.is_file()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "compiled"
