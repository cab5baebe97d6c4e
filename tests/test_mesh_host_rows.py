"""Plans that keep rows in host memory train as one device does, whatever the pipeline's queues, and move."""

import dataclasses

import jax
import mesh_runs
import numpy as np
import pytest
from checkpoint_state import flatten, whole_stack_checkpoint
from flax import nnx
from host_runs import pipeline_threads
from jax.sharding import Mesh
from mesh_plans import scattered, some_plan
from mesh_run_cases import CONFIG
from mesh_runs import OPTIMIZERS
from run_cases import configuring, quickstart
from whole_stacks import host_addresses, whole_stack

from jrec.app.build import build_layout
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.app.loop import train
from jrec.checkpoint import Checkpoints, HostRows
from jrec.checkpoint.writer import Writer
from jrec.data.schema import Schema
from jrec.errors import CheckpointError
from jrec.host import HostTable
from jrec.run.options import HostOptions
from jrec.run.placement.checkpoint import MeshSource, saved_stack
from jrec.run.placement.host_owners import ALONE
from jrec.run.placement.plan import default_plan
from jrec.run.placement.rows import based
from jrec.run.placement.sharded_tier import load_host_rows, placed_host_table
from jrec.sharding import save_plan
from jrec.sharding.contents import host_ranges


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=800)


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


LAYOUT = mesh_runs.layout(tt=False)
STACK = LAYOUT.members[0]
OPTIMIZER = OPTIMIZERS["rowwise_adagrad"]


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    yield
    assert pipeline_threads() == []


def host_plan(devices, **kwargs):
    return some_plan(devices, **{"seed": devices, "replicate": 0.3, "host": 0.4, "tt": False, **kwargs})


# Rows at rest.


class PlacedRows:
    """A stack's rows and slots as a plan places them, and their checkpoints."""

    def __init__(self, folder, plan, source):
        self.folder, self.plan = folder, plan
        mesh = Mesh(np.array(jax.devices()[: plan.devices]), ("devices",))
        key = nnx.Rngs(params=0).params()
        self.tables = {}
        if plan.rows_in("host"):
            self.tables = {STACK.name: placed_host_table(STACK, plan, OPTIMIZER, key, HostOptions(), ALONE)}
        self.checkpoints = Checkpoints(folder, keep=9)
        self.rows = {STACK.name: saved_stack(source, STACK, plan, mesh, OPTIMIZER)}
        for table in self.tables.values():
            load_host_rows(table, plan, source, ALONE)
        on_devices = MeshSource(STACK, plan, mesh, OPTIMIZER, lambda: self.rows[STACK.name])
        self.sources = [on_devices, *(HostRows(table) for table in self.tables.values())]

    def saved(self, step):
        """A checkpoint."""
        self.checkpoints.save(step, arrays={}, sources=self.sources)
        return self.checkpoints.open(step)

    def whole(self):
        values, slots = whole_stack(STACK, self.plan, self.rows[STACK.name], self.tables.get(STACK.name))
        return {"values": values, **slots}


def of_one_device(seed=0):
    """Rows of which the last ones are still as they began."""
    rng = np.random.default_rng(seed)
    untouched, fresh = slice(STACK.rows // 2, None), HostTable(STACK, OPTIMIZER, nnx.Rngs(params=0).params())
    whole = {
        "values": rng.normal(size=(STACK.rows, STACK.dim)).astype(np.float32),
        "sum": rng.uniform(size=STACK.rows).astype(np.float32),
    }
    first, slots = fresh.fetch(np.arange(STACK.rows, dtype=np.int32))
    whole["values"][untouched], whole["sum"][untouched] = first[untouched], slots["sum"][untouched]
    return whole


PLANS = [host_plan(2), host_plan(4, host=0.7), host_plan(2, host=0.0), host_plan(3, host=1.0), host_plan(2, seed=9)]


def test_rows_and_slots_move_between_one_device_and_any_plans(tmp_path):
    whole = of_one_device()
    source, every = whole_stack_checkpoint(tmp_path / "one", STACK, OPTIMIZER, whole), np.arange(STACK.rows)
    for step, plan in enumerate(PLANS):
        placed = PlacedRows(tmp_path, plan, source)
        source = placed.saved(step + 2)
        for array, expected in whole.items():
            np.testing.assert_array_equal(placed.whole()[array], expected)
            np.testing.assert_array_equal(source.read(STACK, array, every[::-1]), expected[::-1])
        for table in placed.tables.values():  # rows as they began take no memory
            held = host_addresses(plan, STACK)
            assert table.num_made == (held < STACK.rows // 2).sum()


def test_increments_are_read_by_address_and_damage_is_named(tmp_path):
    whole = of_one_device()
    placed = PlacedRows(tmp_path / "c", PLANS[0], whole_stack_checkpoint(tmp_path / "one", STACK, OPTIMIZER, whole))
    placed.saved(1)
    table, held = placed.tables[STACK.name], host_addresses(PLANS[0], STACK)
    for step, some in ((2, held[::9]), (3, held[1::10])):
        values, slots = table.fetch(some)
        table.store(some, values + step, {"sum": slots["sum"] + step})
        whole["values"][some] += step
        whole["sum"][some] += step
        source = placed.saved(step)
    pieces = {n: [p.folder for p in table.pieces] for n, table in source.manifest.tables.items()}
    assert any(folders == ["0000", "0001", "0002", "0003"] for folders in pieces.values())
    for array, expected in whole.items():
        np.testing.assert_array_equal(source.read(STACK, array, held), expected[held])
    name = STACK.tables[0].name
    values = source.folder / "tables" / name / "0001" / "values"  # those in host memory
    for chunk in (values / "c.0.0", values / "zarr.json", values.parent / "rows" / "c.0"):
        content = chunk.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged, reason in (
            (flipped, "its checksum differs"),
            (content[:-1], r"it has [\d,]+ bytes"),
            (None, "No such file"),
        ):
            chunk.unlink()
            if damaged is not None:
                chunk.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"{chunk.name} is damaged: {reason}"):
                Checkpoints(tmp_path / "c").open(3).read(STACK, "values", held)
        chunk.write_bytes(content)
    tables = tuple(dataclasses.replace(t, rows=t.rows + 1) for t in STACK.tables)
    with pytest.raises(CheckpointError, match=r"table '.*' is [\d,]+ x 8 of float32 there"):
        source.read(dataclasses.replace(STACK, tables=tables), "values", held)


def test_files_have_room_for_host_rows_alone(tmp_path):
    """The ranges that a plan keeps in host memory, and no other byte, are reserved."""
    plan = default_plan(LAYOUT, 2, baseline="table-wise")
    ranges = host_ranges(host_plan(2), based(STACK))
    held = np.concatenate([np.arange(*of) for of in ranges])
    np.testing.assert_array_equal(held, host_addresses(host_plan(2), STACK))
    assert (ranges[1:, 0] > ranges[:-1, 1]).all()
    assert host_ranges(plan, based(STACK)).shape == (0, 2)
    rows = 1 << 20
    big = dataclasses.replace(STACK, rows=rows, tables=(dataclasses.replace(STACK.tables[0], rows=rows),), bases=(0,))
    key = jax.random.key(0)
    reserved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.posix_fallocate", lambda _, begin, size: reserved.append((begin, begin + size)))
        table = HostTable(big, OPTIMIZER, key, folder=tmp_path, written=np.array([[5, 9], [rows - 2, rows]]))
    row = 4 * STACK.dim
    assert set(reserved) == {(5 * row, 9 * row), ((rows - 2) * row, rows * row), (20, 36), (4 * rows - 8, 4 * rows)}
    some = np.array([6, rows - 1], np.int32)
    values, slots = table.fetch(some)
    table.store(some, values + 1, slots)
    np.testing.assert_array_equal(table.read(some), values + 1)


# Runs from a configuration.


@pytest.fixture
def plan_file(configure, dataset, tmp_path):
    """What writes a plan with host rows for the run's tables, and its override."""

    def write(devices, *overrides, seed=1, host=0.6, **changes):
        config = configure(f"mesh.devices={max(2, devices)}", *overrides)  # one device has a plan only if it is given
        layout = build_layout(config, Schema.load(dataset))
        plan = dataclasses.replace(
            scattered(default_plan(layout, devices), seed=seed, replicate=0.2, host=host), **changes
        )
        path = tmp_path / f"plan-{devices}-{seed}"
        save_plan(plan, path)
        return f"plan={str(path)!r}"

    return write


def bits(folder):
    """Everything a run trained, as a single device reads it."""
    return {path: np.asarray(leaf).tobytes() for path, leaf in flatten(restore_run(folder, slots=True).state).items()}


@pytest.mark.slow
def test_a_plan_on_one_device_changes_no_bit(configure, plan_file):
    overrides = ("max_steps=7", "evaluate.every_steps=0", "checkpoint.every_steps=3")
    plain = train(configure(*overrides, out="plain"))
    planned = train(configure(*overrides, plan_file(1), out="planned"))
    assert planned.sections["pipeline"]["rows"]["d4_float32"]["fetched"] > 0
    assert bits(planned.folder) == bits(plain.folder)
    np.testing.assert_array_equal(planned.scores["test"].logits, plain.scores["test"].logits)


@pytest.mark.slow
def test_runs_are_those_of_one_device_and_queues_change_no_bit(configure, plan_file, dataset):
    one = train(configure(out="one"))
    with_plan = ("mesh.devices=2", plan_file(2))
    queued = train(configure(*with_plan, "evaluate.every_steps=2", out="queued"))
    np.testing.assert_allclose(queued.scores["test"].logits, one.scores["test"].logits, rtol=1e-4, atol=1e-5)
    assert queued.sections["pipeline"]["rows"]["d4_float32"]["fetched"] > 0
    sizes = queued.parameters["d4_float32"]
    assert 0 < sizes["host_rows"] < sizes["rows"]
    assert sizes["host_bytes"] == 16 * sizes["host_rows"]
    expected = restore_run(one.folder, slots=True).state
    for path, leaf in flatten(restore_run(queued.folder, slots=True).state).items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(flatten(expected)[path]), rtol=2e-4, atol=2e-5)
    other = train(configure(*with_plan, "tables.host.queue=1", "tables.host.threads=1", out="sequential"))
    assert bits(other.folder) == bits(queued.folder)
    np.testing.assert_array_equal(other.scores["test"].logits, queued.scores["test"].logits)
    serving = plan_file(4, seed=5, purpose="inference").split("'")[1]
    for devices, plan in ((1, ""), (3, ""), (4, serving)):
        scores = evaluate_checkpoint(queued.folder, dataset, split="test", devices=devices, plan=plan).scores
        np.testing.assert_allclose(scores.logits, queued.scores["test"].logits, rtol=1e-5, atol=1e-6)


class Killed(BaseException):
    """As sudden as a kill: nothing in the loop handles it."""


@pytest.mark.slow
def test_a_run_killed_anywhere_resumes_to_the_same_bits(configure, plan_file, monkeypatch, tmp_path):
    run = ("mesh.devices=2", plan_file(2), "checkpoint.every_steps=2", "max_steps=7", f"tables.host.folder={tmp_path}")
    whole, rng = train(configure(*run, out="whole")), np.random.default_rng(0)
    write, seal = Writer._write, Writer._seal
    deaths, outcome = 0, None
    while outcome is None:
        budget = [int(rng.integers(2, 30))]

        def dying(of, budget=budget):
            def dies(self, *args):
                budget[0] -= 1
                if budget[0] < 0:
                    raise Killed
                of(self, *args)

            return dies

        monkeypatch.setattr(Writer, "_write", dying(write))
        monkeypatch.setattr(Writer, "_seal", dying(seal))
        try:
            queue = f"tables.host.queue={int(rng.integers(1, 4))}"
            outcome = train(configure(*run, queue), resume=True)
        except Killed:
            deaths += 1
            assert deaths < 30
    assert deaths >= 2
    assert bits(outcome.folder) == bits(whole.folder)
    np.testing.assert_array_equal(outcome.scores["test"].logits, whole.scores["test"].logits)
