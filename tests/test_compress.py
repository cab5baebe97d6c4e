"""Compressing a trained run: the same model with other tables, in a run folder that evaluates and trains on."""

import json

import jax
import numpy as np
import pytest
import shop_logs
from flax import nnx
from run_cases import CONFIG, quickstart

from jrec import cli
from jrec.app.compress import Selection, _balanced, compress_run
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint, open_run, restore_run
from jrec.app.loop import train
from jrec.data.schema import DatasetError
from jrec.errors import ConfigError
from jrec.metrics import evaluate
from jrec.ops.tt import TTDecomposition, TTShape, tt_svd, tt_to_dense


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"largest": 1}, "--rank, --relative-error"),
        ({"rank": 0, "largest": 1}, "--rank is 0"),
        ({"relative_error": 1.0, "largest": 1}, "--relative-error is 1.0"),
        ({"rank": 4}, "say which tables"),
        ({"rank": 4, "min_rows": -1}, "--min-rows is -1"),
    ],
)
def test_selections_that_say_too_little_or_nonsense_are_refused(choice, words):
    with pytest.raises(ConfigError, match=words):
        Selection(**choice)


def test_balanced_cores_have_one_scale_and_the_same_product():
    shape = TTShape.search(300, 8, ranks=4)
    found = tt_svd(np.random.default_rng(0).normal(size=(300, 8)), shape)
    balanced = _balanced(found)
    scales = [np.sqrt(np.mean(np.square(core))) for core in balanced]
    np.testing.assert_allclose(scales, scales[0], rtol=1e-5)
    np.testing.assert_allclose(tt_to_dense(balanced, shape), tt_to_dense(found.cores, shape), rtol=1e-4, atol=1e-5)
    nothing = TTDecomposition(cores=tuple(np.zeros_like(c) for c in found.cores), shape=shape, relative_error=0.0)
    assert not any(np.any(core) for core in _balanced(nothing))


def test_splits_without_examples_are_not_scored(tmp_path):
    shop_logs.write_log(tmp_path / "monday.csv", 300)
    monday = shop_logs.prepare(tmp_path, tmp_path / "monday.csv", "monday", "--split", "0.9,0,0.1")
    run = shop_logs.trained(tmp_path, monday, "max_steps=1")
    done = compress_run(run, tmp_path / "small", Selection(rank=1, largest=1))
    assert list(done.before) == list(done.after) == ["test"]
    monday.rename(tmp_path / "moved")
    with pytest.raises(DatasetError, match=r"was trained on .*monday, which is not there, .* where the dataset is now"):
        open_run(run)
    assert open_run(run, tmp_path / "moved").schema.splits["test"].examples == 30


def test_a_rank_beside_an_error_is_an_upper_limit(tmp_path):
    """Also one above what a table needs, which is refused where it is the rank."""
    shop_logs.write_log(tmp_path / "monday.csv", 2000)
    run = shop_logs.trained(tmp_path, shop_logs.prepare(tmp_path, tmp_path / "monday.csv", "monday"), "max_steps=1")
    name = max(tables := open_run(run).schema.tables, key=lambda t: t.rows).name
    assert len(tables) > 1
    found = [
        compress_run(run, tmp_path / f"{rank}", Selection(rank=rank, relative_error=0.9, tables=(name,)))
        for rank in (None, 5000)
    ]
    one, other = (done.tables[name] for done in found)
    assert one.shape == other.shape is not None
    assert one.note == other.note == ""
    with pytest.raises(ConfigError, match="already represents every table"):
        compress_run(run, tmp_path / "x", Selection(rank=5000, tables=(name,)))


@pytest.mark.slow
def test_a_trained_run_is_compressed_evaluated_and_trained_on(tmp_path, dataset, capsys):
    path, source, out = tmp_path / "tiny.toml", tmp_path / "run", tmp_path / "compressed"
    path.write_text(CONFIG)
    overrides = [f"data.path={str(dataset)!r}", "evaluate.every_steps=0", f"out={str(source)!r}"]
    train(load_config(path, overrides))
    old = restore_run(source, slots=True)
    tables = sorted((t for s in old.layout.members for t in s.tables), key=lambda t: -t.rows)
    first, second = tables[0].name, tables[1].name
    assert cli.main(["compress", str(source), "--rank", "6", "--tables", first, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    content = json.loads((out / "report" / "compression.json").read_text())

    new = restore_run(out, slots=True)
    (stack,) = new.model.embeddings.tt.values()
    rebuilt = tt_to_dense(stack.arrays(), stack.shape)
    rows = {t.name: _rows_of(old, t) for t in tables}
    error = np.linalg.norm(rebuilt - rows[first]) / np.linalg.norm(rows[first])
    assert content["tables"][first]["relative_error"] == pytest.approx(error, rel=1e-4)
    assert f"{error:.4f}" in printed
    for table in tables[1:]:
        np.testing.assert_array_equal(_rows_of(new, table), rows[table.name])
    for kind in (lambda run: nnx.state(run.model, nnx.Param), lambda run: nnx.state(run.run.modules()[1].dense)):
        for a, b in zip(jax.tree.leaves(kind(old)), jax.tree.leaves(kind(new)), strict=True):
            np.testing.assert_array_equal(a, b)
    assert new.saved.step == old.saved.step

    for split, name in (("test", "auc"), ("valid", "log_loss")):
        before, after = (evaluate_checkpoint(f, dataset, split=split).scores for f in (source, out))
        assert content["before"][split][name] == getattr(evaluate(before), name)
        assert content["after"][split][name] == getattr(evaluate(after), name)
    assert content["before"]["test"]["log_loss"] != content["after"]["test"]["log_loss"]

    # Again, another table: the first one's cores stay as they are. Then on for an epoch.
    again = tmp_path / "again"
    assert (
        cli.main(
            ["compress", str(out), "--relative-error", "0.8", "--rank", "6", "--tables", second, "--out", str(again)]
        )
        == 0
    )
    twice = restore_run(again)
    for a, b in zip(twice.model.embeddings.tt[f"tt_{first}"].arrays(), stack.arrays(), strict=True):
        np.testing.assert_array_equal(a, b)
    shape = twice.model.embeddings.tt[f"tt_{second}"].shape
    assert max(shape.ranks) <= 6
    outcome = train(load_config(again / "config.toml", ["epochs=2", "evaluate.every_steps=0"]), resume=True)
    assert outcome.finished
    assert outcome.step == 2 * old.saved.step

    for arguments, words in (
        (["--rank", "6", "--tables", first], f"{out} holds a run already"),
        (["--rank", "6", "--tables", "C99", "--overwrite"], "the run has no table 'C99'"),
        (["--rank", "5000", "--tables", first, "--overwrite"], "already represents every table"),
        (["--rank", "6", "--min-rows", "1000000000", "--overwrite"], "selects no table"),
    ):
        assert cli.main(["compress", str(source), *arguments, "--out", str(out)]) == 2
        assert words in capsys.readouterr().err
    assert (out / "report" / "compression.json").exists()
    assert cli.main(["compress", str(out), "--rank", "6", "--tables", first, "--out", str(tmp_path / "x")]) == 2
    assert f"{first} is of tier 'tt'" in capsys.readouterr().err


def _rows_of(run, table):
    for stack in run.layout.members:
        for of, base in zip(stack.tables, stack.bases, strict=True):
            if of.name == table.name:
                return np.asarray(run.model.embeddings.arrays()[stack.name])[base : base + of.rows]
    raise AssertionError(table.name)
