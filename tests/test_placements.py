"""Every placement of rows trains the same model: losses, logits, rows, slots, cores and dense parameters of one trace.

The trace is ``placement_reference``: float64 and plain NumPy. ``PLACEMENTS`` of ``placement_cases`` is the table of
what is trained; by default each of them with one optimizer, and some in 16 bits.
"""

import numpy as np
import pytest
from mesh_cases import ragged_on_cpu
from placement_cases import HOST_ITEM, OPTIMIZERS, PLACEMENTS, STEPS, TT_WARMUP, Placement, PlanOf
from placement_runs import Workplace

from jrec.app.report.logs import read_records
from jrec.sharding import BASELINES

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # sums of float32 in another order, over all steps
GAP = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # between neighbours, by the power of two below them
# Half a minute each.
LONG = (
    *(name for name, placement in PLACEMENTS.items() if placement.processes > 1),
    *("plan-eight", "plan-four-tiers-all", "fae-tt-cache"),
)
FIFTY = (
    *("device", "mesh-send", "plan-host", "fae-four-tiers"),
    *("processes-whole", "processes-four-host", "processes-four-fae"),
)
PLAIN = ("device", "tt", "host", "mesh-send", "plan-host", "fae")  # what the others are made of


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("placements"))


# Rows on one device are stepped by every optimizer, wherever else they lie by one without slots, by one with a number
# a row and by one with two numbers an element: tiers differ in where slots lie.
STEPPED = dict.fromkeys(PLAIN, ("sgd", "rowwise_adagrad", "adam")) | {"device": tuple(OPTIMIZERS)}


def grid():
    """Each placement with an optimizer, in turn; those of which the others are made with those of ``STEPPED``, too."""
    for number, name in enumerate(PLACEMENTS):
        for other, optimizer in enumerate(OPTIMIZERS):
            if PLACEMENTS[name].processes > 1 and name in FIFTY:
                continue  # of which the first are these steps
            if other == number % len(OPTIMIZERS):
                late = name in LONG or PLACEMENTS[name].late
                yield pytest.param(name, optimizer, marks=pytest.mark.slow if late else ())
            elif optimizer in STEPPED.get(name, ()):
                yield pytest.param(name, optimizer, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "optimizer"), [*grid()])
def test_a_placement_follows_the_trace(place, name, optimizer):
    placement, found = PLACEMENTS[name], place.trace(name, optimizer)
    if placement.trace == name:
        follows_until_rows_are_cached(place, name, optimizer)
    elif placement.trace is not None:
        follows_a_run(found, place.trace(placement.trace, optimizer), exact=placement.exact)
    else:
        follows_the_reference(place, found, placement, optimizer)


def rest():
    """The other optimizers of the placements of which the others are made."""
    tried = {param.values for param in grid()}
    return [(name, optimizer) for name in PLAIN for optimizer in OPTIMIZERS if (name, optimizer) not in tried]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), rest())
def test_every_optimizer_follows_the_trace(place, name, optimizer):
    test_a_placement_follows_the_trace(place, name, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIFTY)
def test_fifty_steps(place, name):
    placement = PLACEMENTS[name]
    steps = 50 if placement.hot is None else 0  # hot and cold batches to the end of an epoch
    found = place.run(placement, "adagrad", "float32", "epochs=9", f"max_steps={steps}", out=f"fifty {name}")
    follows_the_reference(place, found, placement, "adagrad", steps=steps)
    assert len(found.losses) >= 50


@pytest.mark.slow
@pytest.mark.parametrize("baseline", BASELINES)
def test_every_baseline_plan(place, baseline):
    placement = Placement(keys=("mesh.devices=4",), plan=PlanOf(baseline=baseline))
    found = place.run(placement, "adam", "float32", out=f"baseline {baseline}")
    follows_the_reference(place, found, placement, "adam")


@pytest.mark.slow
def test_lines_that_travel_without_padding_give_the_same_bits(place, monkeypatch):
    """The ragged all-to-all emulated; it would give NaN where sizes disagree."""
    monkeypatch.setattr("jrec.run.placement.setup.check_kind", lambda kind, platform: None)
    for name in ("mesh-retrieve", "mesh-send"):
        with ragged_on_cpu():
            ragged = place.run(PLACEMENTS[name], "adagrad", "float32", "mesh.exchange=ragged", out=f"ragged {name}")
        follows_a_run(ragged, place.trace(name, "adagrad"), exact=True)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("device", "mesh-send") else pytest.mark.slow) for name in PLAIN
])  # fmt: skip
def test_gradients_of_bags_are_rounded_wherever_rows_lie(place, name):
    key = "optimizer.embedding.bag_gradients=bfloat16"
    found = place.run(PLACEMENTS[name], "adagrad", "float32", key, out=f"rounded {name}")
    exact = place.trace(name, "adagrad")
    np.testing.assert_allclose(found.losses, exact.losses, rtol=2e-3)
    for array, values in exact.arrays.items():
        # Adagrad's step is 0.1 times a gradient's share of its root mean square, which rounding moves by 2^-8 or less.
        np.testing.assert_allclose(found.arrays[array], values, rtol=2e-2, atol=STEPS * 0.1 * 2.0**-8, err_msg=array)
    assert np.any(found.arrays["site"] != exact.arrays["site"])


@pytest.mark.parametrize("name", ["mesh-send", pytest.param("mesh-retrieve", marks=pytest.mark.slow)])
def test_rows_and_gradients_that_travel_in_16_bits(place, name):
    keys = ("mesh.exchange_rows=bfloat16", "mesh.exchange_gradients=bfloat16")
    found, exact = (
        place.run(PLACEMENTS[name], "adagrad", "float32", *keys, out=f"narrow {name}"),
        place.trace(name, "adagrad"),
    )
    np.testing.assert_allclose(found.losses, exact.losses, rtol=5e-3)
    for array, values in exact.arrays.items():
        np.testing.assert_allclose(found.arrays[array], values, rtol=2e-2, atol=STEPS * 0.1 * 2.0**-7, err_msg=array)
    assert np.any(found.arrays["site"] != exact.arrays["site"])


def follows_the_reference(place, found, placement, optimizer, *, steps=0):
    reference, batches = place.reference(placement, optimizer, "float32"), place.batches(placement, found.folder)
    losses = [reference.step(batches[step % len(batches)]) for step in range(steps or len(batches))]
    assert len(losses) >= STEPS
    np.testing.assert_allclose(found.losses, losses, **CLOSE)
    expected = reference.everything()
    assert found.arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found.arrays[name], array, err_msg=name, **CLOSE)
    assert (min(reference.scales) < 0.9) == np.isfinite(placement.max_global_norm)
    if np.isfinite(limit := placement.max_global_norm):
        records = [r for r in read_records(found.folder / "metrics.jsonl") if r["split"] == "train"]
        norms = np.array([record["gradient_norm"] for record in records])
        np.testing.assert_allclose(np.minimum(1, limit / norms), reference.scales, **CLOSE)
        assert [record["clipped"] for record in records] == [float(norm > limit) for norm in norms]
    test = place.log_of(placement).test
    if found.logits is not None:
        np.testing.assert_allclose(found.logits, reference.predict(test), **CLOSE)
    else:
        signs = np.array([1 - 2 * example.label for example in test])
        log_loss = np.logaddexp(0, signs * reference.predict(test)).mean()
        np.testing.assert_allclose(found.log_loss, log_loss, **CLOSE)


def follows_a_run(found, other, *, exact):
    limits = {"rtol": 0, "atol": 0} if exact else CLOSE

    def compare(one, another, name=""):
        np.testing.assert_allclose(one, another, err_msg=name, **limits)

    compare(found.losses, other.losses)
    if found.logits is not None and other.logits is not None:
        compare(found.logits, other.logits)
    assert found.arrays.keys() == other.arrays.keys()
    for name, array in other.arrays.items():
        compare(found.arrays[name], array, name)


def follows_until_rows_are_cached(place, name, optimizer):
    """A cached row leaves its cores, and no reference knows when: ``test_tt_cache`` has one for the choice of rows."""
    placement, found = PLACEMENTS[name], place.trace(name, optimizer)
    reference = place.reference(placement, optimizer, "float32")
    losses = [reference.step(batch) for batch in place.batches(placement, found.folder)[:TT_WARMUP]]
    np.testing.assert_allclose(found.losses[:TT_WARMUP], losses, **CLOSE)
    assert np.unique(found.arrays["word.cached_ids"]).size > 1
    assert np.ptp(found.arrays["word.cached_rows"]) > 0


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in PLAIN else pytest.mark.slow) for name in PLACEMENTS
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_step_rounds_rows_to_a_neighbour(place, name, dtype):
    """Stochastically: up or down. Rows that no example reads keep their first values to the bit, wherever they lie."""
    placement = PLACEMENTS[name]
    if dtype == "float16" and placement.plan is not None and placement.plan.cores:
        pytest.skip("jrec plan makes no cores of float16 tables")
    found = place.trace(name, "rowwise_adagrad", dtype, steps=1)
    reference = place.reference(placement, "rowwise_adagrad", dtype)
    first = {name: array.copy() for name, array in reference.arrays.items()}
    (batch, *_) = place.batches(placement, found.folder)
    np.testing.assert_allclose(found.losses, [reference.step(batch)], **CLOSE)
    moved = nearest = 0
    for array, values in reference.arrays.items():
        if reference.is_dense(array) or (dtype == "float16" and ".core" in array):  # cores have no float16
            np.testing.assert_allclose(found.arrays[array], values, err_msg=array, **CLOSE)
            continue
        still = values == first[array]
        np.testing.assert_array_equal(found.arrays[array][still], first[array][still], err_msg=array)
        gap = np.maximum(GAP[dtype] * 2.0 ** np.floor(np.log2(np.abs(values))), 2.0**-24)
        off = np.abs(found.arrays[array] - values) / gap
        assert off.max() < 1.001, array
        moved, nearest = moved + (~still).sum(), nearest + (off[~still] <= 0.5).sum()
    assert 0.5 * moved < nearest < 0.95 * moved


@pytest.mark.slow
def test_a_table_that_moves_to_host_memory_keeps_all_16_bit_rows_to_the_bit(place):
    """Random bits are of the table and the row, not of the stack, which now is another for all tables."""
    whole = place.run(Placement(), "adagrad", "bfloat16", out="16 bits")
    mixed = place.run(Placement(keys=(HOST_ITEM,)), "adagrad", "bfloat16", out="16 bits, a host table")
    follows_a_run(mixed, whole, exact=True)
