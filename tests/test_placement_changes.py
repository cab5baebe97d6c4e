"""Runs that go on in another placement, and runs that are compressed: the model of one trace."""

import dataclasses

import numpy as np
import placement_cases as cases
import pytest
from checkpoint_state import latest
from feature_table import EXCLUSIVE, NAMES, PAGE, page_with, trained_pairs
from placement_runs import Workplace, arrays_of

from jrec.app.compress import Selection, compress_run
from jrec.app.config import load_config
from jrec.app.loop import train

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("changes"))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.MOVES)
def test_a_run_goes_on_in_another_placement(place, name):
    move = cases.MOVES[name]
    found, (first, *_) = place.moved(move, "adagrad", out=f"moved {name}"), move.placements()
    if move.trace is not None:
        uninterrupted = dataclasses.replace(cases.PLACEMENTS[move.trace], reordered=move.reordered)
        whole = place.run(uninterrupted, "adagrad", move.dtype, out=f"whole {name}")
        # Rounding moves a row of 16 bits to a neighbour in every step, up or down.
        limits = CLOSE if move.dtype == "float32" else {"rtol": 2**-5, "atol": 2**-8}
        np.testing.assert_allclose(found.losses, whole.losses, **limits)
        for array, values in whole.arrays.items():
            np.testing.assert_allclose(found.arrays[array], values, err_msg=array, **limits)
        if move.dtype != "float32":  # the same random bits: rows differ only where sums in another order do
            same = [np.mean(found.arrays[name] == whole.arrays[name]) for name in cases.ROWS]
            assert min(same) > 0.97, same
        return
    reference = place.reference(first, "adagrad", move.dtype)
    losses = [reference.step(batch) for batch in place.batches(first, found.folder)]
    np.testing.assert_allclose(found.losses, losses, **CLOSE)
    expected = reference.everything()
    assert found.arrays.keys() == expected.keys()
    for array, values in expected.items():
        np.testing.assert_allclose(found.arrays[array], values, err_msg=array, **CLOSE)
    if found.logits is not None:
        np.testing.assert_allclose(found.logits, reference.predict(place.log_of(first).test), **CLOSE)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "host" else pytest.mark.slow)
    for name in cases.COMPRESSED
])  # fmt: skip
def test_a_compressed_run_scores_and_trains_as_its_cores_say(place, name):
    placement, dtype = cases.PLACEMENTS[name], cases.COMPRESSED[name]
    run, out = place.trace(name, "adagrad", dtype), place.folder / f"compressed-{name}"
    found = compress_run(run.folder, out, Selection(tables=("site",), rank=2), splits=("test",))
    if run.logits is not None:
        np.testing.assert_allclose(found.before["test"].logits, run.logits, **CLOSE)
    arrays = arrays_of(latest(out))
    assert "site" not in arrays
    assert {f"site.core{k}" for k in range(3)} <= arrays.keys()
    dense = place.reference(placement, "adagrad", dtype)
    dense.take(arrays)
    dense.first_core_row = {**dense.first_core_row, "site": 0}
    if "cache" not in name:
        np.testing.assert_allclose(found.after["test"].logits, dense.predict(place.log_of(placement).test), **CLOSE)
    if name == "host":
        train(load_config(out / "config.toml", ["epochs=2"]), resume=True)
        further = place.read(out, None)
        losses = [dense.step(batch) for batch in place.batches(placement, out)]
        np.testing.assert_allclose(further.losses, losses, **CLOSE)
        for array, values in dense.everything().items():
            np.testing.assert_allclose(further.arrays[array], values, err_msg=array, **CLOSE)


def test_every_pair_of_features_is_trained():
    pairs = {frozenset({a, b}) for a in NAMES for b in NAMES if a != b} - EXCLUSIVE
    assert sorted(map(sorted, pairs - trained_pairs())) == []


def test_the_page_has_the_table_of_features():
    """``python tests/feature_table.py`` writes it."""
    text = PAGE.read_text()
    assert page_with(text) == text
