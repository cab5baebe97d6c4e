"""The programs and notebooks in examples/: each runs, and its model is better than the baseline it names."""

import importlib.util
import json
import pathlib
import sys

import jax
import pytest

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(name, **sizes):
    """What ``main`` of a program returns; the program is loaded from its file, as nothing imports examples."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program.main(**sizes)


def test_every_program_is_tested_and_short():
    programs = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    notebooks = {path.stem for path in FOLDER.glob("*.ipynb")}
    tested = {name.removeprefix("test_") for name in globals()}
    assert len(programs) >= 8
    assert not (programs.keys() | notebooks) - tested
    assert max(text.count("\n") for text in programs.values()) <= 120


def test_dlrm_dataframe():
    figures = run("dlrm_dataframe")
    assert figures["model"] < figures["constant"] - 0.08


def test_dcn_own_loop():
    figures = run("dcn_own_loop")
    assert figures["model"] < figures["constant"] - 0.08


def test_two_tower():
    figures = run("two_tower")
    assert figures["recall in 20"] > figures["of the most frequent"] + 0.2


def test_sequence_model():
    assert run("sequence_model")["next among the two best"] > 0.8


def test_multi_task():
    for losses in run("multi_task").values():
        assert losses["model"] < losses["rate"] - 0.1


def test_ngram_memory():
    bits = run("ngram_memory", steps=150)
    assert bits["with memory"] < bits["transformer"] - 0.3
    assert abs(bits["with memory, served from INT8 rows"] - bits["with memory"]) < 0.01


def test_engram(tmp_path):
    figures = run("engram", folder=str(tmp_path), steps=200)
    assert figures["edited and served"] < figures["published"] - 0.4
    assert figures["rows edited"] < figures["rows"] / 3
    assert figures["bytes"] < 0.4 * sum(path.stat().st_size for path in (tmp_path / "table").iterdir())


def test_tt_in_flax():
    figures = run("tt_in_flax")
    whole, train = figures["nnx.Embed"], figures["jrec.nn.TTEmbed"]
    assert train["parameters"] < whole["parameters"] / 50
    assert train["accuracy"] > 0.95


def test_multi_device():
    figures = run("multi_device")
    assert min(figures[f"{tier} rows"] for tier in ("replicated", "sharded", "host")) > 0
    assert figures["largest difference from one device"] < 1e-4
    assert figures["last losses"] < figures["first loss"]


def test_host_tables():
    figures = run("host_tables")
    assert figures["last losses"] < figures["first losses"] - 0.1
    assert 0 < figures["rows that memory holds"] <= 20_000 < figures["rows"]
    assert figures["megabytes of the rows that memory holds"] < figures["megabytes of all rows"] / 1000


def test_hot_cold():
    figures = run("hot_cold")
    assert 0.5 < figures["hot examples"] < 1
    assert figures["last losses"] < figures["first losses"] - 0.1


def test_train_own_model(monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    figures = run("train_own_model")
    assert figures["model"] > figures["popularity"] + 0.15


def test_own_collectives():
    figures = run("own_collectives")
    assert figures["last losses"] < figures["first losses"] - 0.08
    assert figures["largest difference of pmap"] < 1e-5
    assert figures["largest difference from one device"] < 1e-5


def test_optuna_sweep(tmp_path):
    pytest.importorskip("optuna", reason="optuna is not installed, which examples/optuna_sweep.py needs")
    best = run("optuna_sweep", trials=2, folder=str(tmp_path))
    assert 0.4 < best["log loss"] < 0.6
    assert best["dim"] in (8, 16)


def test_newcomer(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cells = json.loads((FOLDER / "newcomer.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # they would go stale
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"newcomer.ipynb, {cell['id']}", "exec"), names)
    losses = names["losses"]
    assert losses["the chances"] < losses["the model"] < losses["a constant"] - 0.1
    assert names["measured"]["auc"] > 0.77
    rises = names["importance"]["log_loss"]
    assert rises[["user", "item"]].min() > 0.1
    assert rises["price"] > 0.03 > 0.01 > abs(rises["browser"])
    assert abs(names["served_scores"] - names["scores"]).max() <= 1e-6
    assert names["reloaded_scores"].tolist() == names["scores"].tolist()
    assert "<table>" in names["model"]._repr_html_()
