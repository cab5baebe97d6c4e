"""Plans that place rows of tables of 2^31 rows and more: devices have offsets, and addresses modulo 2^32."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from checkpoint_state import latest
from flax import nnx
from jax.sharding import Mesh
from wide_data import ROWS, numbers_of, widened

from jrec import ops
from jrec.app.build import build_layout
from jrec.app.config import load_config
from jrec.app.loop import train
from jrec.app.recorder import Recorder
from jrec.data.schema import Schema
from jrec.host import HostTable
from jrec.ops import layout as layouts
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.run.placement import sharded_tier
from jrec.run.placement.plan import default_plan
from jrec.run.placement.rows import based, initial_stack
from jrec.sharding import save_plan
from jrec.sharding.contents import host_ranges, replicated_addresses, shard_addresses
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED
from jrec.sharding.plans import Located
from jrec.sharding.stack_ranges import StackRanges, within

DEVICES = 2
# Of the wide table: where each range begins, its tier, and its owner. Most of it is in host memory.
RANGES = [
    (0, REPLICATED, -1),
    (500, SHARDED, 0),
    (3000, HOST, -1),
    (2**31 - 700, SHARDED, 1),
    (2**31 - 3, REPLICATED, -1),
    (2**31 + 4, SHARDED, 0),
    (2**31 + 900, HOST, -1),
    (ROWS - 800, SHARDED, 1),
]
SYNTHETIC = 2_000  # rows of the table of which examples read rows of the wide one
SPREAD = np.concatenate([np.arange(400), np.arange(2**31 - 600, 2**31 + 600), np.arange(ROWS - 200, ROWS)])
NUMBERS = np.sort(np.concatenate([SPREAD, 10_000 + numbers_of(SYNTHETIC - SPREAD.size, seed=1)[:-1] // 2, [5_000]]))


def ranged(plan, name, ranges):
    """The plan with a table's rows in these ranges."""
    number, devices = plan.number(name), plan.devices
    low, high = plan.first[number], plan.first[number + 1]
    start, tier, owner = (np.array(column) for column in zip(*ranges, strict=True))
    way = np.where(tier == HOST, devices + 1, np.where(tier == REPLICATED, devices, owner))
    path = np.vstack(
        [np.repeat(np.arange(devices)[:, None], devices, axis=1), np.arange(devices), np.full(devices, -1)]
    )
    assert (plan.tier == SHARDED).all()  # so that rows go the way of their owners
    fields = {
        "start": (plan.start, start, np.int64),
        "tier": (plan.tier, tier, np.uint8),
        "owner": (plan.owner, owner, np.int16),
        "way": (plan.owner, way, np.int32),
    }
    changed = {
        field: np.concatenate([array[:low], new, array[high:]]).astype(dtype)
        for field, (array, new, dtype) in fields.items()
    }
    first = plan.first.copy()
    first[number + 1 :] += len(ranges) - (high - low)
    return dataclasses.replace(plan, first=first, path=path.astype(np.int16), **changed).laid_out()


def wide_layout():
    tables = [TableConfig(name="t", rows=ROWS, dim=4)]
    return EmbeddingLayout.build(tables, [FeatureConfig(name="f", table="t")], planned=True)


def wide_plan():
    return ranged(default_plan(wide_layout(), DEVICES, baseline="table-wise"), "t", RANGES)


class Lines:
    """Lines of as many as one likes, each of which holds its own number in NumPy's int64."""

    dtype = np.dtype(np.int64)

    def __init__(self, *shape):
        self.shape = shape

    def reshape(self, *shape):
        return Lines(*(size if size > 0 else self.shape[0] // shape[0] for size in shape))

    def __getitem__(self, places):
        places = places if isinstance(places, tuple) else (places,)
        flat = np.ravel_multi_index(places, self.shape[: len(places)])
        return np.repeat(flat[:, None], self.shape[-1], axis=1)


def test_rows_are_read_of_shards_that_together_have_more_lines_than_int32_numbers(monkeypatch):
    """Four devices of 2^30 lines each; nothing of that size is made."""
    shard, gather = 2**30, sharded_tier._gather
    monkeypatch.setattr(sharded_tier, "_gather", lambda *about: gather(*about).__wrapped__)
    owner = np.array([0, 1, 2, 3, 3], np.int16)
    offset = np.array([5, shard - 1, 0, 7, shard - 1])
    where = Located(np.full(5, SHARDED, np.uint8), owner, offset)
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    plan = types.SimpleNamespace(devices=4, locate=lambda table, rows: where)
    tier = object.__new__(sharded_tier.ShardedTier)
    tier.stack = types.SimpleNamespace(dim=2, bases=(0,), tables=(types.SimpleNamespace(name="t"),))
    tier._setup = types.SimpleNamespace(plan=plan, mesh=mesh)
    replicated = types.SimpleNamespace(addressable_shards=[types.SimpleNamespace(data=np.zeros((1, 2)))])
    arrays = {"sharded": Lines(4 * shard, 2), "replicated": replicated}
    tier._rows = types.SimpleNamespace(**arrays, sharded_slots={}, replicated_slots={})
    np.testing.assert_array_equal(tier.read(np.arange(5))[:, 0], owner.astype(np.int64) * shard + offset)


def test_rows_are_read_where_the_plan_keeps_them():
    [stack] = wide_layout().members
    assert stack.address_dtype == np.int64
    plan = wide_plan()
    ranges = StackRanges(plan, based(stack))
    held = [shard_addresses(plan, based(stack), d) for d in range(DEVICES)] + [replicated_addresses(plan, based(stack))]
    assert held[1][-1] == ROWS - 1
    tier, owner, expected = plan.locate("t", NUMBERS)
    begin, sources, shift = ranges.of_devices(range(DEVICES))
    of = np.searchsorted(begin[0].view(np.uint32), NUMBERS.astype(np.uint32), side="right") - 1
    for device in range(DEVICES):
        source, offset = ranges.located(NUMBERS, device)
        where = np.where(tier == SHARDED, owner, np.where(tier == REPLICATED, DEVICES, DEVICES + 1))
        np.testing.assert_array_equal(source, where)
        np.testing.assert_array_equal(offset[tier != HOST], expected[tier != HOST])
        for array, held_there in enumerate(held):
            np.testing.assert_array_equal(held_there[offset[source == array]], NUMBERS[source == array])
        # As devices count, modulo 2^32.
        np.testing.assert_array_equal(sources[device][of], source)
        words = NUMBERS.astype(np.int32) + shift[device][of]
        np.testing.assert_array_equal(words[tier != HOST], offset[tier != HOST])
    on_host = NUMBERS[tier == HOST]
    assert on_host.size > 50
    np.testing.assert_array_equal(NUMBERS[within(NUMBERS, host_ranges(plan, based(stack)))], on_host)
    assert host_ranges(plan, based(stack)).tolist() == [[3000, 2**31 - 700], [2**31 + 900, ROWS - 800]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_devices_make_the_first_values_of_wide_rows(dtype):
    tables = [TableConfig(name="t", rows=ROWS, dim=4, dtype=dtype)]
    layout, plan = EmbeddingLayout.build(tables, [FeatureConfig(name="f", table="t")], planned=True), wide_plan()
    [stack] = layout.members
    plan = dataclasses.replace(plan, tables=tuple(dataclasses.replace(t, dtype=dtype) for t in plan.tables))
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("devices",))
    key = nnx.Rngs(params=3).params()
    rows = initial_stack(stack, plan, mesh, key, ops.RowWiseAdagrad(learning_rate=0.1))
    table, capacity = HostTable(stack, ops.SGD(learning_rate=0.1), key), rows.sharded.shape[0] // DEVICES
    for device in range(DEVICES):
        held = shard_addresses(plan, based(stack), device)
        ours = np.asarray(rows.sharded)[device * capacity :][: held.size]
        np.testing.assert_array_equal(ours, table.read(held))
    held = replicated_addresses(plan, based(stack))
    np.testing.assert_array_equal(np.asarray(rows.replicated)[: held.size], table.read(held))


CONFIG = """
seed = 3
max_steps = 8
[data]
batch_size = 128
eval_batch_size = 256
window_blocks = 2
[model]
embedding_dim = 4
bottom_mlp = [8, 4]
top_mlp = [8, 1]
[optimizer.embedding]
name = "adam"
learning_rate = 0.01
[evaluate]
every_steps = 0
[checkpoint]
every_steps = 3
[log]
every_steps = 1
tensorboard = false
progress = "off"
"""


@pytest.fixture
def configure(tmp_path):
    synthesize(shape_like("quickstart"), tmp_path / "small", SynthOptions(rows=1500, seed=1))
    data = tmp_path / "wide"
    widened(tmp_path / "small", data, {"C8": NUMBERS})

    def load(*overrides, out):
        path = tmp_path / "config.toml"
        path.write_text(CONFIG)
        return load_config(path, [f"data.path={str(data)!r}", f"out={str(tmp_path / out)!r}", *overrides])

    return load


@pytest.mark.slow
def test_a_planned_stack_that_is_split_trains_as_one_that_is_not(tmp_path, monkeypatch):
    """Tables of one dim and dtype with too many rows for one stack, some of them wide: the same rows, trained alike."""
    synthesize(shape_like("quickstart"), tmp_path / "small", SynthOptions(rows=1500, seed=1))
    (tmp_path / "config.toml").write_text(CONFIG)

    def run(out):
        keys = (f"data.path={str(tmp_path / 'small')!r}", f"out={str(tmp_path / out)!r}", f"mesh.devices={DEVICES}")
        config = load_config(tmp_path / "config.toml", keys)
        return train(config), build_layout(config, Schema.load(config.data.path)).members

    whole, (stack,) = run("whole")
    monkeypatch.setattr(layouts, "MAX_ROWS", 700)
    split, stacks = run("split")
    assert len(stacks) > 2
    assert {s.address_dtype.name for s in stacks} == {"int32", "int64"}
    np.testing.assert_allclose(split.scores["test"].logits, whole.scores["test"].logits, rtol=2e-3, atol=2e-4)
    for table in stack.tables:
        one, other = (latest(outcome.folder).table(table.name) for outcome in (whole, split))
        for array in ("values", "mu", "nu"):
            rows = np.arange(table.rows)
            np.testing.assert_allclose(other.read(array, rows), one.read(array, rows), rtol=2e-3, atol=2e-4)


def rows_of(folder, array):
    return latest(folder).table("C8").read(array, NUMBERS)


@pytest.mark.slow
def test_a_plan_of_a_wide_table_trains_as_host_memory_and_resumes_to_its_bits(configure, tmp_path, monkeypatch):
    on_host = train(configure("tables.tier=host", out="host"))
    config = configure(f"mesh.devices={DEVICES}", out="layout")
    layout = build_layout(config, Schema.load(config.data.path))
    save_plan(ranged(default_plan(layout, DEVICES, baseline="table-wise"), "C8", RANGES), tmp_path / "plan")
    planned = [f"mesh.devices={DEVICES}", f"plan={str(tmp_path / 'plan')!r}"]
    whole = train(configure(*planned, out="whole"))
    for split, scores in on_host.scores.items():
        np.testing.assert_allclose(whole.scores[split].logits, scores.logits, rtol=2e-3, atol=2e-4)
    first = HostTable(
        next(s for s in build_layout(configure("tables.tier=host", out="x"), on_host.schema).members if s.rows == ROWS),
        ops.SGD(learning_rate=0.0),
        nnx.Rngs(params=3).params(),
    ).read(NUMBERS)
    changed = (rows_of(on_host.folder, "values") != first).any(axis=1)
    assert changed.sum() > 200
    for array in ("values", "mu", "nu"):
        np.testing.assert_allclose(
            rows_of(whole.folder, array), rows_of(on_host.folder, array), rtol=2e-3, atol=2e-4, err_msg=array
        )

    class Killed(BaseException):
        """As sudden as a kill: nothing in the loop handles it."""

    absorb = Recorder.absorb

    def dies(self, *results):
        if self.absorbed < 7 <= self.absorbed + len(results):
            raise Killed
        absorb(self, *results)

    monkeypatch.setattr(Recorder, "absorb", dies)
    with pytest.raises(Killed):
        train(configure(*planned, out="killed"))
    monkeypatch.undo()
    resumed = train(configure(*planned, out="killed"), resume=True)
    assert (resumed.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    for array in ("values", "mu", "nu"):
        assert rows_of(resumed.folder, array).tobytes() == rows_of(whole.folder, array).tobytes()
