"""The benchmarks' machinery: workloads, alternating measurements, reports, and the peers behind their line protocol."""

import argparse
import dataclasses
import io
import itertools
import json
import pathlib
import subprocess
import sys
import textwrap
import tomllib

import numpy as np
import pytest

from benchmarks import harness, models, workloads
from benchmarks.peers import client

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = workloads.Workload(
    name="tiny", rows=(50, 7, 1000), dim=8, ids_per_bag=(3, 3, 3), batch=32, num_dense=4, bottom=(16, 8), top=(16, 1)
)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("rows", [1, 10, 70_000, 3_000_000])
def test_zipf_ids_follow_the_power_law(rows, exponent):
    ids = workloads.zipf_ids(np.random.default_rng(0), rows, 200_000, exponent)
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < rows
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    # Eight groups of equal probability or as near as whole rows allow.
    cumulative = np.cumsum(weights) / weights.sum()
    edges = np.unique(np.searchsorted(cumulative, np.arange(1, 8) / 8) + 1)
    bounds = np.concatenate([[0], edges[edges < rows], [rows]])
    expected = np.diff(np.concatenate([[0], cumulative])[bounds]) * len(ids)
    found = np.histogram(ids, bounds)[0]
    np.testing.assert_allclose(found, expected, atol=6 * np.sqrt(len(ids)))


def test_zipf_ids_are_exact_across_the_seam_of_head_and_tail():
    rows = 1 << 17
    ids = workloads.zipf_ids(np.random.default_rng(1), rows, 4_000_000, 0.5)
    counts = np.bincount(ids, minlength=rows)
    weights = np.arange(1, rows + 1) ** -0.5
    expected = weights / weights.sum() * len(ids)
    seam = 1 << 16
    for part in (slice(seam - 500, seam), slice(seam, seam + 500), slice(rows - 500, rows)):
        total = expected[part].sum()
        assert abs(counts[part].sum() - total) < 6 * np.sqrt(total)


def test_draws_depend_on_workload_and_seed_alone():
    for first, again in zip(workloads.table_ids(TINY, seed=3), workloads.table_ids(TINY, seed=3), strict=True):
        np.testing.assert_array_equal(first, again)
    assert not np.array_equal(workloads.table_ids(TINY, seed=3)[2], workloads.table_ids(TINY, seed=4)[2])
    round_trip = workloads.Workload.from_json(json.loads(json.dumps(TINY.to_json())))
    assert round_trip == TINY


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("kaggle", "criteo_kaggle"),
        ("terabyte", "criteo_terabyte"),
        *((f"rm{i}", f"rm{i}") for i in range(1, 5)),
        ("mlperf-dcnv2", "mlperf_dlrm_dcnv2"),
    ],
)
def test_workloads_have_the_mlps_of_the_configs(name, config):
    model = tomllib.loads((ROOT / "configs" / f"{config}.toml").read_text())["model"]
    workload = workloads.WORKLOADS[name]
    assert list(workload.bottom) == model["bottom_mlp"]
    assert list(workload.top) == model["top_mlp"]
    assert workload.dim == model["embedding_dim"]
    assert (workload.cross_layers, workload.cross_rank) == (model.get("cross_layers", 0), model.get("cross_rank", 0))


def test_workloads_have_the_published_table_sizes(shared_data):
    published = json.loads((shared_data / "access_statistics" / "cardinalities.json").read_text())
    assert list(workloads.WORKLOADS["kaggle"].rows) == published["criteo_kaggle"]["rows"]
    assert list(workloads.WORKLOADS["mlperf"].rows) == published["criteo_terabyte_40m_cap"]["rows"]
    hot = published["criteo_terabyte_multi_hot_sizes"]["ids_per_sample"]
    assert list(workloads.WORKLOADS["mlperf"].ids_per_bag) == hot


def test_published_unique_counts():
    def unique(name):
        return sum(len(np.unique(ids)) for ids in workloads.table_ids(workloads.WORKLOADS[name], seed=0))

    assert unique("cpu") == pytest.approx(48_000, rel=0.02)
    assert unique("dynamicemb") == pytest.approx(350_000, rel=0.02)
    assert workloads.WORKLOADS["dynamicemb"].lookups == pytest.approx(1.05e6, rel=0.01)


def test_alternate_pairs_both_sides_and_swaps_their_order():
    order = []

    def side(name, seconds):
        def run():
            order.append(name)
            return seconds

        return run

    measured = harness.alternate(side("a", 2.0), side("b", 3.0), seconds=0.0, warmup=1, min_pairs=4)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert measured.ours == (2.0,) * 4
    assert measured.theirs == (3.0,) * 4
    assert measured.ratio == 1.5


def test_all_sides_take_turns_in_one_loop():
    order = []

    def side(name):
        return lambda: order.append(name) or float(len(order))

    found = harness.interleave([side(name) for name in "abc"], seconds=0.0, warmup=0, min_rounds=3)
    assert "".join(order) == "abccbaabc"
    assert found == [(1.0, 6.0, 7.0), (2.0, 5.0, 8.0), (3.0, 4.0, 9.0)]


@pytest.mark.parametrize(
    ("ours", "theirs", "halves"),
    [
        ((1.0, 1.0, 1.0, 1.0), (), 1.0),
        ((1.0, 1.0, 1.9, 1.9), (), 1.9),
        ((1.9, 1.9, 5.0, 1.0, 1.0), (), 1.9),  # the round in the middle is in neither half
        ((1.0, 1.0, 1.0, 1.0), (3.0, 3.0, 1.0, 1.0), 3.0),
        ((1.0,), (2.0,), 1.0),
    ],
)
def test_halves_tell_a_machine_that_changed_under_way(ours, theirs, halves):
    assert harness.Measurement(ours=ours, theirs=theirs).halves == pytest.approx(halves)


def test_the_spread_is_of_the_quartiles():
    assert harness.Measurement(ours=(1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx((2 / 3, 4 / 3))
    assert harness.Measurement(ours=(1.0,)).spread == (1.0, 1.0)


def test_several_peers_stand_beside_the_same_runs_and_an_unsteady_line_is_marked(capsys):
    stdout, ours = io.StringIO(), itertools.cycle([0.001, 0.001, 0.003, 0.003])  # one is for the warm-up
    fake = {"one": lambda: 0.004, "two": lambda: 0.012}
    with harness.Report(_arguments(), "test", stdout=stdout) as report:
        report.compare_all("case", "step", lambda: next(ours), fake, seconds=0.0, peer_versions={"two": {"two": "2"}})
        report.compare("case", "still", lambda: 0.001, seconds=0.0)
    results = [json.loads(line) for line in stdout.getvalue().splitlines()]
    medians = [r for r in results if r["metric"] == "step, median"]
    assert [(r["peer"], r["value"], r["ratio"]) for r in medians] == [
        ("one", 3.0, pytest.approx(4 / 3)), ("two", 3.0, pytest.approx(4.0)),
    ]  # fmt: skip
    assert [r["versions"].get("two") for r in medians] == [None, "2"]
    assert [r["details"]["halves"] for r in medians] == [pytest.approx(3.0)] * 2
    assert all(r["details"]["unsteady"] for r in medians)
    (still,) = [r for r in results if r["metric"] == "still, median"]
    assert still["details"] == {"rounds": 3, "spread": [1.0, 1.0], "halves": 1.0}
    said = capsys.readouterr().err
    assert "case, step beside one: unsteady, the two halves of 3 rounds differ by 3.00x (at most 1.25)" in said
    assert said.count("measure anew") == 2


def test_ratio_is_the_median_over_pairs():
    measured = harness.Measurement(ours=(1.0, 2.0, 4.0), theirs=(2.0, 2.0, 12.0))
    assert measured.ratio == 2.0
    assert measured.ratio_of_fastest == 2.0
    assert measured.median == 2.0
    assert measured.fastest == 1.0
    assert harness.Measurement(ours=(1.0,)).ratio is None


def _arguments(out=None):
    return argparse.Namespace(quick=True, out=out)


def test_report_prints_json_lines_and_writes_them(tmp_path, capsys):
    out, stdout = tmp_path / "results.json", io.StringIO()
    with harness.Report(_arguments(out), "test", stdout=stdout) as report:
        report.add("case", "metric", 1.5, "ms", peer="peer", ratio=2, peer_versions={"peer": "1.0"})
        assert not out.exists()
        assert (tmp_path / "results.json.partial").read_text() == stdout.getvalue()
        report.add("case", "metric", 2.5, "ms", details={"launches": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    lines = stdout.getvalue().splitlines()
    assert out.read_text().splitlines() == lines
    result, detailed = [json.loads(line) for line in lines]
    assert detailed["details"] == {"launches": 3}
    keys = ["case", "metric", "value", "unit", "peer", "ratio", "device", "versions", "commit"]
    assert list(result) == keys
    assert (result["value"], result["ratio"], result["versions"]["peer"]) == (1.5, 2.0, "1.0")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2.00x" in captured.err


def test_report_of_a_failed_benchmark_leaves_its_lines_and_no_results(tmp_path):
    out = tmp_path / "results.json"

    def fail():
        with harness.Report(_arguments(out), "test", stdout=io.StringIO()) as report:
            report.add("case", "metric", 1.0, "ms")
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    (partial,) = tmp_path.iterdir()
    assert partial.name == "results.json.partial"
    assert json.loads(partial.read_text())["value"] == 1.0


def test_compare_records_both_sides(capsys):
    stdout = io.StringIO()
    with harness.Report(_arguments(), "test", stdout=stdout) as report:
        report.compare("case", "step", lambda: 0.001, peer="peer", theirs=lambda: 0.004, seconds=0.0)
    results = [json.loads(line) for line in stdout.getvalue().splitlines()]
    assert [(r["metric"], r["value"], r["ratio"]) for r in results] == [
        ("step, median", 1.0, 4.0),
        ("step, fastest", 1.0, 4.0),
        ("step, median, peer", 4.0, None),
        ("step, fastest, peer", 4.0, None),
    ]


PEER = """
    import numpy as np
    from benchmarks.peers import protocol

    def case(arrays, options):
        def double():
            print("noise on stdout")
            return {"doubled": 2 * arrays["x"]}
        def fail():
            raise ValueError("no such luck")
        return {"double": double, "fail": fail}

    protocol.serve({"case": case}, distributions=("numpy",))
"""


@pytest.fixture
def peer():
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PEER)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield client.Peer(process, "test")
    process.stdin.close()
    process.wait(timeout=10)
    process.stdout.close()


def test_protocol_carries_arrays_seconds_and_errors(peer):
    assert peer.versions == {"numpy": np.__version__}
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    peer.setup("case", {"x": x})
    np.testing.assert_array_equal(peer.call("double")["doubled"], 2 * x)
    assert 0 < peer.run("double", calls=3) < 10
    with pytest.raises(client.PeerError, match="no such luck"):
        peer.call("fail")
    np.testing.assert_array_equal(peer.call("double")["doubled"], 2 * x)


def test_a_missing_environment_is_skipped_with_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(client.PYTHON_VARIABLE, str(tmp_path / "absent"))
    with client.start_or_skip("torch_dlrm") as peer:
        assert peer is None
    line = capsys.readouterr().err
    assert line.startswith("peer torch_dlrm skipped: ")
    assert "benchmarks/peers/README.md" in line
    assert line.count("\n") == 1


def test_an_environment_without_the_packages_is_skipped(monkeypatch, capfd):
    monkeypatch.setenv(client.FBGEMM_VARIABLE, sys.executable)
    with client.start_or_skip("fbgemm_tbe") as peer:
        assert peer is None
    assert "peer fbgemm_tbe skipped: " in capfd.readouterr().err


def _environment(module):
    try:
        client.python(module)
    except client.PeerMissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_jrec_and_torch_train_alike(optimizer):
    _environment("torch_dlrm")
    state, run = models.training_run(TINY, optimizer, learning_rate=0.1, seed=0)
    with client.start("torch_dlrm") as peer:
        peer.setup("dlrm", {}, workload=TINY.to_json(), optimizer=optimizer, learning_rate=0.1, seed=0, batches=2)
        for step in range(6):
            state, loss, _ = run.step(state, models.on_device(models.batch(TINY, seed=step % 2)))
            peer.run("step")
            np.testing.assert_allclose(loss, peer.call("loss")["loss"], rtol=1e-4)


@pytest.mark.parametrize(("module", "case"), [("fbgemm_tbe", "fbgemm"), ("torch_embedding", "torch")])
def test_embedding_peers_compute_what_they_should(module, case):
    _environment(module)
    workload = dataclasses.replace(TINY, bottom=(), top=())
    tables = [workloads.initial_table(workload, t, seed=5) for t in range(workload.num_tables)]
    ids = workloads.table_ids(workload, seed=5)
    outputs = np.concatenate([table[i].sum(axis=1) for table, i in zip(tables, ids, strict=True)], axis=1)
    gradients = np.split(workloads.output_gradient(workload, seed=5), workload.num_tables, axis=1)
    with client.start(module) as peer:
        options = {"optimizer": "rowwise_adagrad", "learning_rate": 0.1, "seed": 5}
        for action in ("backward", "step"):
            peer.setup(case, {}, workload=workload.to_json(), **options)
            np.testing.assert_allclose(peer.call("outputs")["outputs"], outputs, rtol=1e-5, atol=1e-6)
            peer.run(action)
            heads = peer.call("heads")
            for t, (table, table_ids, gradient) in enumerate(zip(tables, ids, gradients, strict=True)):
                summed = np.zeros_like(table, np.float64)
                np.add.at(summed, table_ids.ravel(), np.repeat(gradient, table_ids.shape[1], axis=0))
                sums = 0.1 + np.square(summed).mean(axis=1, keepdims=True)
                updated = table - 0.1 * summed / np.sqrt(sums)
                np.testing.assert_allclose(heads[f"head{t:03d}"], updated[:64], rtol=1e-4, atol=1e-5)
