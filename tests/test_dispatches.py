"""Several steps in one dispatch: the bits of one by one, wherever dispatches end."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from distribute_cases import DENSE, columns, layout_of, mesh_of, modules
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from test_distribute import placed

import jrec
from jrec import nn, ops
from jrec.app.report.running_auc import RunningAuc
from jrec.app.schedule import Schedule
from jrec.data.schema import DatasetError
from jrec.errors import ConfigError
from jrec.run.placement.plan import default_plan


class Noisy(nn.DLRM):
    """With dropout and batch statistics, whose state goes on from step to step."""

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        self.noise, self.norm = nnx.Dropout(0.3, rngs=rngs), nnx.BatchNorm(1, rngs=rngs)

    def logits(self, dense, activations, bags):
        found = super().logits(dense, activations, bags)
        return self.norm(self.noise(found)[:, None])[:, 0]


def noisy_run():
    layout = layout_of()
    model = Noisy(nn.DLRMConfig(num_dense=2, bottom_mlp=(16, 8), top_mlp=(16, 1)), layout, rngs=nnx.Rngs(0))
    rows = ops.Adam(learning_rate=0.01)
    return jrec.distribute(model, nn.SparseOptimizer(model, dense=optax.sgd(0.05, momentum=0.9), embedding=rows))


def trained(run, items, **options):
    """Losses, logits and everything that the run holds after all items."""
    step, losses, logits, sizes = run.compile(), [], [], []
    for batch in run.feed(items, dense=DENSE, **options):
        loss, outputs = step(batch)
        losses.append(np.atleast_1d(loss))
        logits.append(np.asarray(outputs.logits).reshape(-1))
        sizes.append(len(batch.batches))
    held = [
        np.asarray(leaf) for leaf in jax.tree.leaves(run.state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    return np.concatenate(losses), np.concatenate(logits), held, sizes


@pytest.mark.parametrize("cast", ["host", "none"])
def test_dispatches_have_the_bits_of_steps_one_by_one(cast):
    def run():
        return jrec.distribute(*modules(layout_of()), cast=cast)

    one_by_one = trained(run(), map(columns, range(8)))
    together = trained(run(), map(columns, range(8)), steps=3)
    assert together[3] == [3, 3, 1, 1]  # what is left takes one dispatch each
    jax.tree.map(np.testing.assert_array_equal, together[:3], one_by_one[:3])
    assert np.unique(one_by_one[0]).size == 8


def test_dispatches_of_a_mesh_have_the_bits_of_steps_one_by_one():
    one_by_one, together = (
        trained(jrec.distribute(*modules(layout_of()), mesh=mesh_of(4)), map(columns, range(5)), steps=k)
        for k in (1, 2)
    )
    assert together[3] == [2, 2, 1]
    jax.tree.map(np.testing.assert_array_equal, together[:3], one_by_one[:3])


def test_a_monitored_plan_counts_every_batch_of_a_dispatch():
    layout, whole = layout_of(planned=True), default_plan(layout_of(planned=True), 4)
    plan = dataclasses.replace(whole, info={**whole.info, "hardware": {}})  # as those of `jrec plan` say
    counted = []
    for steps in (1, 3):
        run = jrec.distribute(*modules(layout), mesh=mesh_of(4), plan=plan)
        assert trained(run, map(columns, range(6)), steps=steps)[3] == [steps] * (6 // steps)
        monitor = run._state.setup.monitor
        counted.append((monitor._batches, monitor._monitor.examples))
    assert counted[0] == counted[1]
    assert counted[0][0] == 6


def test_an_error_comes_at_its_batch_of_a_dispatch():
    items = [columns(n) for n in range(4)]
    items[2] |= {"item": np.full(16, 99)}
    run = jrec.distribute(*modules(layout_of()))
    step, feed = run.compile(), run.feed(items, dense=DENSE, steps=4)
    for _ in range(2):
        step(next(feed))
    with pytest.raises(DatasetError, match="99"):
        next(feed)


def test_dropout_and_batch_statistics_go_on_within_a_dispatch():
    one_by_one, together = (
        trained(noisy_run(), map(columns, range(6))),
        trained(noisy_run(), map(columns, range(6)), steps=6),
    )
    assert together[3] == [6]
    jax.tree.map(np.testing.assert_array_equal, together[:3], one_by_one[:3])


def test_batches_of_unlike_shapes_take_a_dispatch_each():
    run = jrec.distribute(*modules(layout_of()))
    packed = [
        jrec.data.pack_batch(layout_of(), columns(n, size), dense=DENSE) for n, size in enumerate((16, 16, 12, 16))
    ]
    losses, _, _, sizes = trained(run, packed, steps=2)
    assert sizes == [2, 1, 1]
    plain, _, _, _ = trained(jrec.distribute(*modules(layout_of())), packed)
    np.testing.assert_array_equal(losses, plain)


def test_a_feed_stands_behind_the_steps_of_its_last_dispatch(tmp_path):
    expected = trained(jrec.distribute(*modules(layout_of())), map(columns, range(8)))
    run = jrec.distribute(*modules(layout_of()))
    step, feed = (
        run.compile(),
        run.feed(map(columns, itertools.count()), dense=DENSE, steps=lambda before: 2 + before // 2),
    )
    sizes, losses = [], []
    for _ in range(2):
        batch = next(feed)
        with pytest.raises(RuntimeError, match="take the step of the last batch"):
            next(feed)
        losses += np.asarray(step(batch)[0]).tolist()
        sizes.append(len(batch.batches))
        assert (run.steps, feed.position()["batches"]) == (len(losses), len(losses))
    assert sizes == [2, 3]
    run.save(tmp_path / "c", meta=feed.position())
    run.close()
    with jrec.distribute(*modules(layout_of())) as resumed:
        assert resumed.restore(tmp_path / "c")["batches"] == 5
        losses += trained(resumed, map(columns, range(5, 8)), steps=3)[0].tolist()
        np.testing.assert_array_equal(losses, expected[0])
        np.testing.assert_array_equal(resumed.table("user"), placed_table(range(8)))


def test_hot_batches_share_a_dispatch_where_other_rows_are_in_host_memory():
    def hot(number):
        found = columns(number)
        return found | {"user": found["user"] % 5, "tags": np.full((16, 4), -1)}

    def run(steps):
        with placed("plan-four") as run:
            return trained(run, map(hot, range(4)), hot=True, steps=steps)

    one_by_one, together = run(1), run(2)
    assert together[3] == [2, 2]
    jax.tree.map(np.testing.assert_array_equal, together[:3], one_by_one[:3])


def placed_table(steps):
    run = jrec.distribute(*modules(layout_of()))
    trained(run, map(columns, steps))
    return run.table("user")


@pytest.mark.parametrize(("name", "reason"), [("host", "host_"), ("plan-four", "in host memory")])
def test_batches_that_need_the_host_refuse_it(name, reason):
    with placed(name) as run, pytest.raises(ConfigError, match=f"several steps in one dispatch.*{reason}"):
        run.feed(map(columns, range(4)), dense=DENSE, steps=2)


@pytest.mark.parametrize("name", ["device", "plan-four"])
def test_metrics_count_the_examples_of_all_devices(name):
    with placed(name) as run:
        devices = None if run.mesh is None else run.mesh.devices.size
        step, expected = run.compile(metrics=RunningAuc.empty(devices=devices)), RunningAuc.empty()
        with placed(name) as plain:
            logits = plain.compile()
            for batch, same in zip(
                run.feed(map(columns, range(4)), dense=DENSE),
                plain.feed(map(columns, range(4)), dense=DENSE),
                strict=True,
            ):
                _, outputs = step(batch)
                assert outputs.logits is None
                _, seen = logits(same)
                expected = expected.updated(seen.logits, seen.labels, seen.mask)
                assert float(outputs.examples) == 16
        np.testing.assert_allclose(outputs.metrics.state()["histograms"].sum(0), expected.histograms, rtol=1e-6)
        assert outputs.metrics.value() == pytest.approx(expected.value(), abs=1e-6)


@given(st.integers(1, 20), st.integers(1, 120), st.tuples(*[st.integers(0, 40)] * 3))
def test_nothing_is_due_within_a_dispatch(most, total, every):
    schedule, step, dispatches = Schedule(total=total, log=every[0], evaluate=every[1], save=every[2]), 0, []
    while step < total:
        dispatches.append(schedule.dispatch(step, most))
        assert not any(schedule.at(within).any for within in range(step + 1, step + dispatches[-1]))
        step += dispatches[-1]
    assert step == total
    assert max(dispatches) <= most
    if not any(every) and total >= most:
        assert dispatches.count(most) == total // most


def test_a_size_that_leaves_no_steps_over_is_taken():
    schedule = Schedule(total=1000, log=100, evaluate=200)
    assert {schedule.dispatch(before, 16) for before in range(0, 1000, 10)} == {10}
    assert Schedule(total=1000, log=37).dispatch(0, 16) == 16


def test_what_is_due_after_a_step():
    schedule = Schedule(total=10, log=2, evaluate=3, evaluate_last=True)
    due = {step: (found.log, found.evaluate, found.save) for step in range(1, 11) for found in [schedule.at(step)]}
    assert {step for step, (log, _, _) in due.items() if log} == {2, 4, 6, 8, 10}
    assert {step for step, (_, evaluate, _) in due.items() if evaluate} == {3, 6, 9, 10}
    assert not any(save for _, _, save in due.values())
    assert not Schedule(total=10).at(10).any
