"""Verdicts on GPU kernels: what they hold for, and that the ops choose by them and by nothing else."""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrec import ops
from jrec.environment import CACHE_VARIABLE
from jrec.errors import ConfigError
from jrec.ops import dispatch, verdicts
from jrec.ops.verdicts import KernelClass, Verdict, gpu_choice

MACHINE = "NVIDIA Test GPU, driver 580.1"
GATHER = KernelClass(kernel="gather_reduce", dtype="float32", dim=16)
UPDATE = KernelClass(kernel="casted_update", dtype="float32", dim=16, optimizer="SGD")
ROWS = dataclasses.replace(UPDATE, kernel="row_update")
PRODUCTS = KernelClass(kernel="tt_products", dtype="float32", dim=(1, 4, 2, 4))
FAST = Verdict(right=True, ratio=0.5)
BAD = (
    Verdict(right=True, ratio=1.0),
    Verdict(right=True, why="not timed"),
    Verdict(right=False, why="wrong: row 3"),
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
    monkeypatch.setattr(verdicts, "local_machine", lambda: MACHINE)


def keep(*fast, slow=()):
    found = dict.fromkeys(fast, FAST) | dict.fromkeys(slow, BAD[0])
    verdicts.keep_verdicts(MACHINE, verdicts.read_verdicts(MACHINE) | found)


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
def test_a_class_and_its_verdict_survive_their_file(of):
    assert KernelClass.parse(str(of)) == of
    for verdict in (FAST, *BAD):
        verdicts.keep_verdicts(MACHINE, {of: verdict})
        assert verdicts.read_verdicts(MACHINE) == {of: verdict}


@pytest.mark.parametrize(
    ("of", "run"), [(GATHER, _gather), (UPDATE, _update), (ROWS, _rows)], ids=lambda v: getattr(v, "kernel", "")
)
def test_the_kernel_is_in_the_program_where_its_verdict_says_so(gpu, of, run):
    others = [one for one in (GATHER, UPDATE, ROWS) if one != of]
    keep(of, slow=others)
    assert has_kernel(run, TABLE, IDS)
    keep(*others, slow=[of])
    assert not has_kernel(run, TABLE, IDS)
    assert "mosaic" not in lowered(run, TABLE, IDS, platform="cpu")


@pytest.mark.parametrize("verdict", BAD, ids=str)
def test_no_other_verdict_lets_a_kernel_in(gpu, verdict):
    verdicts.keep_verdicts(MACHINE, {GATHER: verdict})
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

    keep(PRODUCTS)
    assert {"_pallas", "_pallas_transpose", "tt_reduce_short"} <= set(re.findall(r"name=(\w+)", traced()))
    keep(slow=[PRODUCTS])
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
    keep(GATHER, UPDATE, *others)
    program = lowered(_steps, *_tables())
    assert program.count("@mosaic_gpu") == 2
    keep(slow=others)
    assert lowered(_steps, *_tables()).count("@mosaic_gpu") == 2
    keep(slow=[GATHER, UPDATE])
    assert lowered(_steps, *_tables()).count("@mosaic_gpu") == 0
    on_cpu = lowered(_steps, *_tables(), platform="cpu")
    assert "mosaic" not in on_cpu


def test_tables_looked_up_together_get_what_they_get_alone(gpu):
    """Whatever the choice for a GPU, the CPU computes the same bits."""
    tables, bags = _tables()
    want = _steps(tables, bags)
    keep(*[dataclasses.replace(of, dim=dim) for of in (GATHER, UPDATE) for dim in (8, 16)])
    got = jax.jit(lambda *given: _steps(*given))(tables, bags)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_table_that_no_kernel_covers_leaves_the_others_theirs(gpu, monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "pallas")
    tables = {"wide": jnp.ones((4, 2048)), "narrow": jnp.ones((4, 16))}
    bags = {name: ops.Bags(ids=jnp.zeros((3, 1), jnp.int32)) for name in tables}
    program = lowered(lambda *given: ops.lookup(*given)[0], tables, bags)
    assert program.count("@mosaic_gpu") == 1


def test_a_verdict_is_lost_with_its_machine(gpu, monkeypatch, caplog):
    keep(GATHER)
    assert gpu_choice(GATHER) == "pallas"
    other = MACHINE.replace("580", "590")
    monkeypatch.setattr(verdicts, "local_machine", lambda: other)
    assert gpu_choice(GATHER) == "xla"
    assert "never checked" in caplog.text
    # Not even where its file takes the other's place.
    verdicts.verdict_file(MACHINE).rename(verdicts.verdict_file(other))
    verdicts.reread()
    assert gpu_choice(GATHER) == "xla"
    assert "is of another machine" in caplog.text


def test_a_verdict_says_nothing_of_another_class(gpu):
    keep(GATHER)
    for change in ({"dim": 32}, {"dtype": "bfloat16"}, {"kernel": "row_update"}, {"optimizer": "SGD"}):
        assert gpu_choice(dataclasses.replace(GATHER, **change)) == "xla"


def test_changed_sources_change_the_digest(tmp_path, monkeypatch):
    digests = [verdicts.sources_digest()]
    monkeypatch.setattr(verdicts, "__file__", str(tmp_path / "ops" / "verdicts.py"))
    for name in ("pallas/tile.py", "ops/tt/row.py", "selfcheck/child.py", "row_optimizers.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        for content in ("one", "two"):
            (tmp_path / name).write_text(content)
            verdicts.sources_digest.cache_clear()
            digests.append(verdicts.sources_digest())
    verdicts.sources_digest.cache_clear()
    assert len(set(digests)) == 9


def test_without_a_verdict_xla_computes_and_one_line_names_the_command(gpu, caplog):
    with caplog.at_level(logging.INFO, "jrec"):
        assert not has_kernel(_gather, TABLE, IDS)
        assert not has_kernel(_update, TABLE, IDS)
    (record,) = caplog.records
    assert "`jrec kernels check`" in record.message
    assert "NVIDIA Test GPU" in record.message
    assert "gather_reduce float32 16" in record.message


def test_without_a_gpu_xla_computes_and_nothing_is_said(caplog):
    jax.devices()
    assert verdicts.local_machine() is None
    keep(GATHER)
    assert not has_kernel(_gather, TABLE, IDS)
    assert not caplog.records
    assert verdicts.choices() == {}


VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"


class _Gpu:
    device_kind = "NVIDIA H200 MIG 1g.18gb"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Tells what machine this is, were JAX running on a GPU here."""
    monkeypatch.setattr(verdicts, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(jax, "local_devices", lambda *, backend: [_Gpu()] if backend == "cuda" else [])
    (tmp_path / "version").write_text(VERSION)

    def tell():
        verdicts._started_machine.cache_clear()
        return verdicts.local_machine()

    yield tell
    verdicts._started_machine.cache_clear()


def test_every_part_of_a_machine_counts(machine, monkeypatch):
    seen = {machine()}
    assert "NVIDIA H200 MIG 1g.18gb, driver 580.95.05, jax " in machine()
    monkeypatch.setattr(_Gpu, "device_kind", "NVIDIA H200")
    seen.add(machine())
    verdicts.DRIVER.write_text(VERSION.replace("580", "590"))
    seen.add(machine())
    monkeypatch.setattr("jrec.__version__", "99")
    seen.add(machine())
    monkeypatch.setattr(verdicts, "sources_digest", lambda: "other")
    seen.add(machine())
    for other in ("jax", "jaxlib"):
        monkeypatch.setattr(verdicts.importlib.metadata, "version", lambda package, other=other: str(package == other))
        seen.add(machine())
    assert len(seen) == 7


def test_no_machine_is_known_by_half(machine, monkeypatch):
    """Without a driver's version a verdict could outlive it; and nobody is to start JAX by asking."""
    for said in ("", "Open Kernel Module"):
        verdicts.DRIVER.write_text(said)
        assert machine() is None
    verdicts.DRIVER.unlink()
    assert machine() is None
    verdicts.DRIVER.write_text(VERSION)
    monkeypatch.setattr(verdicts.xla_bridge, "backends_are_initialized", lambda: False)
    assert machine() is None


def _with(text, other):
    def change(content):
        assert text in content
        return content.replace(text, other)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "",
        lambda content: content[:-9],
        lambda content: '{"format": "other", "version": 1}',
        _with('"ratio": 1.0', '"ratio": 0.5'),
        _with('"version": 2', '"version": 3'),
    ],
    ids=["empty", "cut", "other", "edited", "newer"],
)
def test_a_damaged_file_is_ignored_with_one_warning(gpu, caplog, change):
    keep(UPDATE, slow=[GATHER])
    path = verdicts.verdict_file(MACHINE)
    path.write_text(change(path.read_text()))
    verdicts.reread()
    for of in (GATHER, UPDATE):
        assert gpu_choice(of) == "xla"
    damaged = [r.message for r in caplog.records if "ignored" in r.message]
    assert len(damaged) == 1
    assert str(path) in damaged[0]
    assert "jrec kernels check" in damaged[0]
    keep(GATHER)
    assert gpu_choice(GATHER) == "pallas"


def test_the_file_is_read_once(gpu, monkeypatch):
    keep(GATHER)
    reads = []
    real = verdicts.load_json
    monkeypatch.setattr(verdicts, "load_json", lambda path, **how: reads.append(path) or real(path, **how))
    for _ in range(5):
        gpu_choice(GATHER)
        gpu_choice(UPDATE)
    assert len(reads) == 1


@pytest.mark.parametrize("found", [FAST, BAD[2], None], ids=str)
@pytest.mark.parametrize("mode", ["xla", "pallas"])
def test_the_environment_overrides_verdicts(gpu, monkeypatch, caplog, mode, found):
    if found:
        verdicts.keep_verdicts(MACHINE, {GATHER: found})
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, mode)
    assert gpu_choice(GATHER) == mode
    assert has_kernel(_gather, TABLE, IDS) == (mode == "pallas")
    assert not caplog.records
    assert verdicts.choices()[str(GATHER)]["chosen"] == mode


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
    keep(GATHER, UPDATE)
    verdicts.agree([UPDATE])
    assert (gpu_choice(GATHER), gpu_choice(UPDATE)) == ("xla", "pallas")
    verdicts.agree(None)
    assert gpu_choice(GATHER) == "pallas"


def test_several_processes_use_no_kernel_before_they_agreed(gpu, monkeypatch, caplog):
    keep(GATHER)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert gpu_choice(GATHER) == "xla"
    assert "jrec.ops.verdicts.agree" in caplog.text
    verdicts.agree([GATHER])
    assert gpu_choice(GATHER) == "pallas"
