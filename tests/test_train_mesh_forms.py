"""A mesh trains as one device does where lookups are sent to the rows' owners, or some are sent and some retrieved."""

import mesh_runs
import numpy as np
import pytest
from mesh_plans import some_plan
from run_cases import configuring

from jrec.app.build import build_layout
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.make_run import make_run
from jrec.app.report.logs import FORMS, METRICS_FILE, read_records
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.mesh.exchange import Links
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.run.feeds.partitioned_batch import BatchPartitioner
from jrec.run.placement.lookup_modes import LookupModes
from jrec.run.placement.part_lookups import PartLookups, poolable
from jrec.run.placement.rows import based
from jrec.sharding.contents import shard_addresses
from jrec.sharding.stack_ranges import StackRanges

FORMS_OF_RUNS = ("retrieve", "send", "auto")


def test_forms_are_chosen_by_bytes():
    """Bags of many ids that hardly repeat are sent; one-hot features and ids that repeat are not."""
    layout = mesh_runs.layout(tt=False)
    plan = some_plan(2, tt=False)
    cut = BatchPartitioner(layout, plan, devices=range(2), first=0, count=2, cast=True)
    stack = layout.planned_stacks[0]
    ranges = StackRanges(plan, based(stack))
    lookups = [
        {
            stack.name: [
                PartLookups.of(part.bags[stack.name], ranges, device=device, devices=2)
                for device, part in enumerate(cut(batch).parts)
            ]
        }
        for batch in mesh_runs.batches(layout, 4)
    ]
    forms, narrow = LookupModes(layout), LookupModes(layout, links=Links(rows="float16", gradients="bfloat16"))
    assert not forms.decided
    for modes in (forms, narrow):
        modes.decide(lookups, mesh_runs.EXAMPLES // 2)
    assert forms.decided
    features = {f.config.name for f in poolable(stack)}
    assert features == {"site", "user", "item", "word"}
    for table in forms.tables:
        assert table.bytes == min(table.retrieve_bytes, table.send_bytes)  # one candidate a table
        assert bool(table.send) == (table.send_bytes < table.retrieve_bytes)
    by_table = {table.table: table for table in forms.tables}
    assert by_table.keys() == {"user", "item", "word"}
    # By hand: what device 0 asks of 1 and 1 of 0 for the table "user".
    kept = [set(shard_addresses(plan, based(stack), device).tolist()) for device in range(2)]
    rows = lookups = bags = 0
    (feature,) = [f for f in stack.features if f.config.name == "user"]
    for batch in mesh_runs.batches(layout, 4):
        of, n = batch.bags[stack.name], mesh_runs.EXAMPLES
        ids, offsets = np.asarray(of.ids), np.asarray(of.offsets)
        for device in range(2):
            read = set()
            for example in range(device * n // 2, (device + 1) * n // 2):
                bag = feature.first_bag * n + example
                away = [i for i in ids[offsets[bag] : offsets[bag + 1]].tolist() if i not in kept[device]]
                read |= set(away)
                lookups, bags = lookups + len(away), bags + bool(away)
            rows += len(read)
    assert by_table["user"].retrieve_bytes == rows * (4 + 32 + 32) / 4
    assert by_table["user"].send_bytes == (lookups * (4 + 4) + bags * (4 + 32 + 32)) / 4  # ids with weights
    (halved,) = [table for table in narrow.tables if table.table == "user"]
    assert halved.retrieve_bytes == rows * (4 + 16 + 16) / 4
    assert halved.send_bytes == (lookups * (4 + 4) + bags * (4 + 16 + 16)) / 4
    assert LookupModes(layout, "send").send == features
    assert LookupModes(layout, "retrieve").send == frozenset()


# Runs from a configuration.

CONFIG = """
seed = 3
max_steps = 6
[data]
batch_size = 64
eval_batch_size = 250
window_blocks = 2
[model]
embedding_dim = 16
bottom_mlp = [16]
top_mlp = [1]
[optimizer]
learning_rate = 0.05
[optimizer.embedding]
name = "adagrad"
learning_rate = 0.05
[evaluate]
final_splits = ["test"]
[log]
tensorboard = false
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """RM1's form: sums of 80 ids; tables of a thousand rows."""
    folder = tmp_path_factory.mktemp("data") / "bags"
    synthesize(shape_like("rm1", table_rows=1000), folder, SynthOptions(rows=800, seed=1))
    return folder


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


@pytest.mark.slow
def test_runs_of_any_form_score_alike_and_their_checkpoints_move(configure, dataset):
    one = train(configure(out="one")).scores["test"].logits
    outcomes = {form: train(configure("mesh.devices=2", f"mesh.form={form!r}", out=form)) for form in FORMS_OF_RUNS}
    for outcome in outcomes.values():
        np.testing.assert_allclose(outcome.scores["test"].logits, one, rtol=1e-4, atol=1e-5)
    assert "forms" not in outcomes["send"].sections
    chosen = outcomes["auto"].sections["forms"]
    records = list(read_records(outcomes["auto"].folder / METRICS_FILE))
    assert records[0] == {"step": 0, "split": FORMS, "tables": chosen}
    assert sum(r["split"] == FORMS for r in records) == 1
    assert all(t["megabytes"] == min(t["send_megabytes"], t["retrieve_megabytes"]) > 0 for t in chosen.values())
    for first, then in (("retrieve", "send"), ("send", "auto")):
        train(configure("mesh.devices=2", f"mesh.form={first!r}", "max_steps=3", out=f"{first}-{then}"))
        moved = configure("mesh.devices=4", f"mesh.form={then!r}", out=f"{first}-{then}")
        np.testing.assert_allclose(train(moved, resume=True).scores["test"].logits, one, rtol=1e-4, atol=1e-5)
    for devices in (1, 3):
        scores = evaluate_checkpoint(outcomes["send"].folder, dataset, split="test", devices=devices).scores
        np.testing.assert_allclose(scores.logits, one, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_chooses_alike_and_gives_the_same_bits(configure):
    run = ("mesh.devices=2", "evaluate.every_steps=2")
    whole = train(configure(*run, out="whole"))
    train(configure(*run, "max_steps=4", out="parts"))
    parts = train(configure(*run, out="parts"), resume=True)
    assert parts.sections["forms"] == whole.sections["forms"]
    np.testing.assert_array_equal(parts.scores["test"].logits, whole.scores["test"].logits)
    read = [list(read_records(run.folder / METRICS_FILE)) for run in (whole, parts)]
    assert read[0] == read[1]


def test_an_exchange_that_the_platform_lacks_is_refused(configure, dataset):
    config, schema = configure("mesh.devices=2", "mesh.exchange='ragged'"), Schema.load(dataset)
    with pytest.raises(ConfigError, match=r"mesh\.exchange.*lacks on CPUs; use 'padded'"):
        make_run(config, schema, build_layout(config, schema), total_steps=1)
