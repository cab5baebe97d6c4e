"""Verdicts on GPU kernels: what they hold for, and that the ops choose by them and by nothing else."""

import dataclasses
import json
import logging
import multiprocessing
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrec import ops
from jrec.environment import CACHE_VARIABLE
from jrec.errors import ConfigError
from jrec.ops import dispatch, local_gpu, verdicts
from jrec.ops.local_gpu import Gpu
from jrec.ops.verdicts import KernelClass, Machine, Verdict, gpu_choice
from jrec.selfcheck import store

GPU = Gpu(kind="NVIDIA Test GPU", driver="580.1")
GATHER = KernelClass(kernel="gather_reduce", dtype="float32", dim=16)
UPDATE = KernelClass(kernel="casted_update", dtype="float32", dim=16, optimizer="SGD")
ROWS = dataclasses.replace(UPDATE, kernel="row_update")
PRODUCTS = KernelClass(kernel="tt_products", dtype="float32", dim=(1, 4, 2, 4))
BAD = ("slower", "wrong", "crashed", "timed out", "does not compile", "not covered", "not timed")


def make_verdict(of=GATHER, reason="faster"):
    right = reason in ("faster", "slower", "not timed")
    return Verdict(
        kernel_class=of, right=right, reason=reason, kernel_seconds=1e-5, xla_seconds=2e-5, date="2026-01-01"
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a process that knows nothing yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE, raising=False)
    verdicts.reread()
    yield tmp_path / "cache"
    verdicts.agree(None)
    verdicts.reread()


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as the choice goes."""
    monkeypatch.setattr(verdicts, "local_gpu", lambda: GPU)


def keep(*kept, machine=None):
    store.record(verdicts.verdict_file(), Machine.of(GPU) if machine is None else machine, kept)
    verdicts.reread()


def lowered(function, *arguments, platform="cuda"):
    fresh = jax.jit(lambda *given: function(*given))  # the choice is made while tracing, and traces are kept
    return fresh.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def has_kernel(function, *arguments):
    return "@mosaic_gpu" in lowered(function, *arguments)


TABLE, IDS = jax.ShapeDtypeStruct((50, 16), jnp.float32), jax.ShapeDtypeStruct((6, 3), jnp.int32)
SGD = ops.SGD(learning_rate=1.0)


def _gather(table, ids):
    return ops.gather_reduce(table, ids)


def _update(table, ids):
    cast = ops.tensor_cast(ids, num_rows=50)
    return ops.casted_update(SGD, table, {}, cast, jnp.ones((6, 16)))


def _rows(table, ids):
    return ops.row_update(SGD, table, {}, ids[:, 0], jnp.ones((6, 16)))


@pytest.mark.parametrize("of", [GATHER, UPDATE, PRODUCTS, verdicts.CAST], ids=str)
def test_a_class_and_its_verdict_survive_their_text(of):
    assert KernelClass.parse(str(of)) == of
    verdict = dataclasses.replace(make_verdict(of, "wrong"), error=3.5, detail="row 3")
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict


def test_a_wrong_kernel_cannot_be_called_faster():
    with pytest.raises(ValueError, match="right=False cannot have the reason 'faster'"):
        Verdict(kernel_class=GATHER, right=False, reason="faster")
    with pytest.raises(ValueError, match="right=True cannot have the reason 'crashed'"):
        Verdict(kernel_class=GATHER, right=True, reason="crashed")


@pytest.mark.parametrize(
    ("of", "run"), [(GATHER, _gather), (UPDATE, _update), (ROWS, _rows)], ids=lambda v: getattr(v, "kernel", "")
)
def test_the_kernel_is_in_the_program_where_its_verdict_says_so(gpu, of, run):
    others = [make_verdict(one) for one in (GATHER, UPDATE, ROWS) if one != of]
    keep(make_verdict(of), *[dataclasses.replace(one, reason="slower") for one in others])
    assert has_kernel(run, TABLE, IDS)
    keep(dataclasses.replace(make_verdict(of), reason="slower"), *others)
    assert not has_kernel(run, TABLE, IDS)
    assert "mosaic" not in lowered(run, TABLE, IDS, platform="cpu")


@pytest.mark.parametrize("reason", BAD)
def test_no_other_verdict_lets_a_kernel_in(gpu, reason):
    keep(make_verdict(GATHER, reason))
    assert gpu_choice(GATHER) == "xla"
    assert not has_kernel(_gather, TABLE, IDS)


def test_products_of_a_tensor_train_level_have_a_verdict_of_their_own(gpu):
    from jrec.ops.tt import index, products

    level = index.Level(
        parents=jnp.zeros(8, jnp.int32), digits=jnp.zeros(8, jnp.int32), count=jnp.asarray(8, jnp.int32)
    )

    def run(below, core):
        out = products.expand(below, core, level, method="grouped")
        below_count = jnp.asarray(3, jnp.int32)
        of = products.expand_transpose(out, below, core, level, below_count=below_count, method="grouped")
        return out, of

    def traced():
        return str(jax.make_jaxpr(lambda *given: run(*given))(jnp.ones((3, 1, 4)), jnp.ones((5, 4, 2, 4))))

    keep(make_verdict(PRODUCTS))
    assert {"_pallas", "_pallas_transpose", "tt_reduce_short"} <= set(re.findall(r"name=(\w+)", traced()))
    keep(make_verdict(PRODUCTS, "wrong"))
    assert "tt_reduce_short" not in traced()


def _tables():
    tables = {"a": jnp.ones((50, 16)), "b": jnp.ones((30, 8)), "c": jnp.ones((20, 16), jnp.bfloat16)}
    bags = {name: ops.Bags(ids=jnp.arange(12, dtype=jnp.int32).reshape(6, 2)) for name in tables}
    return tables, bags


def _steps(tables, bags):
    activations, residuals = ops.lookup(tables, bags)
    slots = {name: {} for name in tables}
    return activations, ops.apply_gradients(SGD, tables, slots, residuals, activations)


def test_tables_whose_kernels_are_chosen_share_launches(gpu):
    """Of three tables the verdicts let two in: one launch for them forward and one update; XLA serves the third."""
    others = [dataclasses.replace(of, dim=8) for of in (GATHER, UPDATE)]
    keep(*[make_verdict(of) for of in (GATHER, UPDATE, *others)])
    program = lowered(_steps, *_tables())
    assert program.count("@mosaic_gpu") == 2
    keep(*[make_verdict(of, "slower") for of in others])
    assert lowered(_steps, *_tables()).count("@mosaic_gpu") == 2
    keep(*[make_verdict(of, "slower") for of in (GATHER, UPDATE)])
    assert lowered(_steps, *_tables()).count("@mosaic_gpu") == 0
    on_cpu = lowered(_steps, *_tables(), platform="cpu")
    assert "mosaic" not in on_cpu


def test_tables_looked_up_together_get_what_they_get_alone(gpu):
    """Whatever the choice for a GPU, the CPU computes the same bits."""
    tables, bags = _tables()
    want = _steps(tables, bags)
    keep(*[make_verdict(dataclasses.replace(of, dim=dim)) for of in (GATHER, UPDATE) for dim in (8, 16)])
    got = jax.jit(lambda *given: _steps(*given))(tables, bags)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_table_that_no_kernel_covers_leaves_the_others_theirs(gpu, monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "pallas")
    tables = {"wide": jnp.ones((4, 2048)), "narrow": jnp.ones((4, 16))}
    bags = {name: ops.Bags(ids=jnp.zeros((3, 1), jnp.int32)) for name in tables}
    program = lowered(lambda *given: ops.lookup(*given)[0], tables, bags)
    assert program.count("@mosaic_gpu") == 1


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Machine)])
def test_a_verdict_is_lost_with_any_part_of_its_machine(gpu, field):
    keep(make_verdict())
    assert gpu_choice(GATHER) == "pallas"
    everything = store._read(verdicts.verdict_file())
    ((machine, found),) = everything.items()
    store._write(verdicts.verdict_file(), {dataclasses.replace(machine, **{field: "another"}): found})
    verdicts.reread()
    assert gpu_choice(GATHER) == "xla"


def test_a_verdict_says_nothing_of_another_class(gpu):
    keep(make_verdict())
    for change in ({"dim": 32}, {"dtype": "bfloat16"}, {"kernel": "row_update"}, {"optimizer": "SGD"}):
        assert gpu_choice(dataclasses.replace(GATHER, **change)) == "xla"


def test_changed_sources_change_the_digest(tmp_path, monkeypatch):
    before = verdicts.sources_digest()
    root = tmp_path / "jrec"
    for folder in ("pallas", "ops"):
        (root / folder).mkdir(parents=True)
    digests = [before]
    monkeypatch.setattr(verdicts, "__file__", str(root / "ops" / "verdicts.py"))
    for name in ("pallas/tile.py", "ops/row_update.py"):
        for content in ("one", "two"):
            (root / name).write_text(content)
            verdicts.sources_digest.cache_clear()
            digests.append(verdicts.sources_digest())
    verdicts.sources_digest.cache_clear()
    assert len(set(digests)) == 5


def test_without_a_verdict_xla_computes_and_one_line_names_the_command(gpu, caplog):
    with caplog.at_level(logging.INFO, "jrec"):
        assert not has_kernel(_gather, TABLE, IDS)
        assert not has_kernel(_update, TABLE, IDS)
    (record,) = caplog.records
    assert "`jrec kernels check`" in record.message
    assert "NVIDIA Test GPU" in record.message
    assert "gather_reduce float32 16" in record.message


def test_without_a_gpu_xla_computes_and_nothing_is_said(caplog):
    assert local_gpu.local_gpu() is None
    keep(make_verdict())
    assert not has_kernel(_gather, TABLE, IDS)
    assert not caplog.records
    assert verdicts.choices() == {}


@pytest.mark.parametrize("content", ["", "{", '{"format": "other", "version": 1}', '{"machines": 3}'])
def test_a_damaged_file_is_ignored_with_one_warning(gpu, caplog, cache, content):
    cache.mkdir()
    verdicts.verdict_file().write_text(content)
    for of in (GATHER, UPDATE):
        assert gpu_choice(of) == "xla"
    damaged = [r.message for r in caplog.records if "ignored" in r.message]
    assert len(damaged) == 1
    assert str(verdicts.verdict_file()) in damaged[0]
    assert "jrec kernels check" in damaged[0]
    keep(make_verdict())
    assert gpu_choice(GATHER) == "pallas"


def test_the_file_is_read_once(gpu, monkeypatch):
    keep(make_verdict())
    reads = []
    real = verdicts.read_all
    monkeypatch.setattr(verdicts, "read_all", lambda path: reads.append(path) or real(path))
    for _ in range(5):
        gpu_choice(GATHER)
        gpu_choice(UPDATE)
    assert len(reads) == 1


@pytest.mark.parametrize("found", ["faster", "wrong", None])
@pytest.mark.parametrize("mode", ["xla", "pallas"])
def test_the_environment_overrides_verdicts(gpu, monkeypatch, caplog, mode, found):
    if found:
        keep(make_verdict(GATHER, found))
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, mode)
    assert gpu_choice(GATHER) == mode
    assert has_kernel(_gather, TABLE, IDS) == (mode == "pallas")
    assert not caplog.records
    assert verdicts.choices() == {GATHER: mode}


def test_the_environment_overrides_no_name(gpu, monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "xla")
    assert has_kernel(lambda t, i: ops.gather_reduce(t, i, implementation="pallas"), TABLE, IDS)
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "pallas")
    assert not has_kernel(lambda t, i: ops.gather_reduce(t, i, implementation="xla"), TABLE, IDS)


def test_an_unknown_value_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "fast")
    with pytest.raises(ConfigError, match="JREC_KERNELS is 'fast' in the environment; set it to one of auto, xla, pal"):
        ops.gather_reduce(jnp.ones((3, 16)), jnp.zeros((2, 2), jnp.int32))


def test_what_a_kernel_does_not_cover_falls_to_xla_unless_it_was_named(monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "pallas")
    long = jax.ShapeDtypeStruct((5, 1025), jnp.float32)
    assert not has_kernel(_gather, long, IDS)
    with pytest.raises(NotImplementedError, match="dims from 1 to 1024"):
        lowered(lambda t, i: ops.gather_reduce(t, i, implementation="pallas"), long, IDS)

    class Mine(ops.SGD):
        """No kernel knows its step."""

        def step_rows(self, *arguments, **options):
            return super().step_rows(*arguments, **options)

    mine = Mine(learning_rate=1.0)
    assert not has_kernel(lambda t, i: ops.row_update(mine, t, {}, i[:, 0], jnp.ones((6, 16))), TABLE, IDS)


def test_inside_a_shard_map_that_tracks_axes_xla_computes(monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "pallas")
    monkeypatch.setattr(dispatch, "native_unavailable", lambda: "the FFI tracks no axes")
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("x",))
    spec = jax.sharding.PartitionSpec("x")

    def mapped(check_vma):
        return jax.shard_map(_gather, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=check_vma)

    single = jax.ShapeDtypeStruct((6, 1), jnp.int32)
    assert has_kernel(mapped(False), TABLE, single)
    assert not has_kernel(mapped(True), TABLE, single)


def test_under_vmap_xla_computes(monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "pallas")
    many = jax.ShapeDtypeStruct((4, *IDS.shape), jnp.int32)
    assert not has_kernel(jax.vmap(_gather, in_axes=(None, 0)), TABLE, many)


def test_processes_use_only_kernels_that_all_agreed_on(gpu):
    keep(make_verdict(), make_verdict(UPDATE))
    verdicts.agree([UPDATE])
    assert (gpu_choice(GATHER), gpu_choice(UPDATE)) == ("xla", "pallas")
    verdicts.agree(None)
    assert gpu_choice(GATHER) == "pallas"


def test_the_newest_verdict_on_a_class_counts_and_others_stay(gpu):
    keep(make_verdict(), make_verdict(UPDATE))
    keep(make_verdict(GATHER, "wrong"))
    assert (gpu_choice(GATHER), gpu_choice(UPDATE)) == ("xla", "pallas")


def test_verdicts_are_forgotten(gpu):
    keep(make_verdict(), make_verdict(UPDATE))
    assert store.forget(verdicts.verdict_file(), [GATHER]) == 1
    verdicts.reread()
    assert (gpu_choice(GATHER), gpu_choice(UPDATE)) == ("xla", "pallas")
    assert store.forget(verdicts.verdict_file()) == 1
    assert store.read_all(verdicts.verdict_file()) == {}


_process = multiprocessing.get_context("spawn").Process


def _record_many(path, kernel, count):
    for dim in range(1, count + 1):
        of = KernelClass(kernel=kernel, dtype="float32", dim=dim)
        store.record(path, Machine.of(GPU), [make_verdict(of)])


@pytest.mark.parametrize("make", [threading.Thread, pytest.param(_process, marks=pytest.mark.slow)])
def test_writers_at_once_lose_nothing(cache, make):
    """Threads with a lock file of their own each exclude one another as processes do, which take long to start."""
    writers = [make(target=_record_many, args=(verdicts.verdict_file(), kind, 15)) for kind in ("one", "two")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert not writer.is_alive()
    ((_, found),) = store.read_all(verdicts.verdict_file()).items()
    assert len(found) == 30


def test_a_lock_is_waited_for_and_not_forever(tmp_path):
    lock = tmp_path / "x.lock"
    with store.locked(lock, seconds=1), pytest.raises(store.LockTimeoutError, match=r"has held .*x\.lock for 0.2 s"), \
            store.locked(lock, seconds=0.2):  # fmt: skip
        pass
    with store.locked(lock, seconds=0):
        pass


def test_the_oldest_machines_are_dropped():
    machines = [dataclasses.replace(Machine.of(GPU), sources=str(i)) for i in range(store.KEPT_MACHINES + 2)]
    for machine in machines:
        keep(make_verdict(), machine=machine)
    assert list(store.read_all(verdicts.verdict_file())) == machines[2:]
