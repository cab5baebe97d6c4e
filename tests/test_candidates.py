"""Items that a request names: scored in their order, by a run and by a server, as in the ranking of all."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_train_sequences
import test_train_two_towers
from serve_cases import stream
from test_serve import ARROW, ask, running

import jrec
from jrec import cli
from jrec.data.schema import DatasetError
from jrec.serving import candidates as candidates_module
from jrec.serving.checks import save_keying
from jrec.serving.encode import RowNumbers
from jrec.serving.format import Feature, Manifest, Part
from jrec.serving.http.app import Options
from jrec.serving.http.batcher import Limits, Rows
from jrec.serving.http.metrics import CONTENT_TYPE
from jrec.serving.model import OutdatedError

FEW = ["max_steps=3", "evaluate.every_steps=0", "checkpoint.keep_best=false", "evaluate.baselines=off"]
CASES = {
    "hstu": (test_train_sequences, [*FEW, "model.embedding_dim=8"], ["--no-labels", "--split-by", "leave-one-out"]),
    "two_tower": (test_train_two_towers, FEW, ["--block-size", "512"]),
}
REQUESTS = {
    "hstu": {"history": [["item 3", "item 4"], ["item 9"], []]},
    "two_tower": {
        "user": ["u7", "nobody", "u1"],
        "age": [27, None, 30],
        "country": ["y", None, "x"],
        "past": [["item 3", "item 9"], [], ["item 5"]],
    },
}
CANDIDATES = [["item 3", "item 1", "never seen", "item 3"], [], ["item 7", None, "item 9"]]


@pytest.fixture(scope="module", params=CASES)
def trained(request, tmp_path_factory):
    """A kind, a run of it, its export as a model, and the folder."""
    module, keys, prepared = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    module.write_log(folder / "log.csv")
    (folder / "log.toml").write_text(module.SCHEMA)
    arguments = ["--schema", str(folder / "log.toml"), "--input", str(folder / "log.csv"), *prepared]
    assert cli.main(["prepare", "csv", *arguments, "--out", str(folder / "data"), "--quiet"]) == 0
    module.train(folder, "run", *keys)
    assert cli.main(["export", str(folder / "run"), "--out", str(folder / "export"), "--quiet"]) == 0
    run = jrec.load_run(folder / "run")
    return request.param, run, jrec.serving.load(folder / "export", batch_sizes=[1, 4]), folder


def cosines(model, columns):
    """By row the cosine of every item: of the ranking of all, in which nothing is left out."""
    users, retrieval = model.logits(columns)["user"], model.manifest.retrieval
    scores, rows = model.top_k(users, retrieval.table, model.items, unit=True)
    return [
        dict(zip(model._ranked.named(line), of_line, strict=True)) for line, of_line in zip(rows, scores, strict=True)
    ]


def expected(model, columns, candidates):
    of_items = [{**line, None: None} for line in cosines(model, columns)]  # its key is the row of unknown ones
    return [[line.get(item) for item in items] for line, items in zip(of_items, candidates, strict=True)]


def assert_scores(found, want):
    assert [[score is None for score in line] for line in found] == [[score is None for score in line] for line in want]
    one, other = ([score for line in lines for score in line if score is not None] for lines in (found, want))
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_candidates_have_the_scores_of_the_ranking(trained, monkeypatch):
    """Whether or not they are in the history, in their order, and none where training did not see one."""
    kind, run, model, _ = trained
    columns = {**REQUESTS[kind], "candidates": CANDIDATES}
    want = expected(model, REQUESTS[kind], CANDIDATES)
    assert [score is None for score in want[0]] == [False, False, True, False]
    assert want[0][0] == want[0][3]
    found = model.candidate_scores(columns)
    assert found.manifest is model.manifest
    assert_scores(found.scores, want)
    monkeypatch.setattr(candidates_module, "_BLOCK", 3)
    assert model.candidate_scores(columns).scores == found.scores
    assert_scores(run.candidate_scores(columns), want)
    best = model.best(REQUESTS[kind], 5)
    again = model.candidate_scores({**REQUESTS[kind], "candidates": best.items})
    assert_scores(again.scores, best.scores)


def test_vectors_for_an_index_of_ones_own_have_the_same_scores(trained, monkeypatch):
    kind, _, model, _ = trained
    monkeypatch.setattr("jrec.serving.model.BLOCK", 7)
    table, users = model.item_vectors(), model.user_vectors(REQUESTS[kind])
    vectors = np.stack(table["vector"].to_numpy())
    assert vectors.dtype == users.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    items = table["item"].to_pylist()
    assert table.schema.metadata[b"version"].decode() == model.manifest.id
    want = [[line[item] for item in items] for line in cosines(model, REQUESTS[kind])]
    np.testing.assert_allclose(users @ vectors.T, want, atol=1e-6)
    best = model.best(REQUESTS[kind], model.items)  # but the histories' items
    assert set().union(*best.items) == {*items}


def test_what_one_export_encoded_is_not_scored_by_another(trained):
    """A large request is encoded as it comes; the export that is served next may have other rows for its values."""
    kind, _, model, folder = trained
    assert cli.main(["export", str(folder / "run"), "--dtype", "int8", "--out", str(folder / "other"), "--quiet"]) == 0
    other = jrec.serving.load(folder / "other", batch_sizes=[4])
    for named in ({}, {"candidates": CANDIDATES}):
        encoded = model.encoded({**REQUESTS[kind], **named})
        model.answer(encoded, 2)
        with pytest.raises(OutdatedError, match="another export while the request waited; send it again"):
            other.answer(encoded, 2)


@pytest.mark.parametrize("seed", range(3))
def test_lists_of_any_length(seed, trained):
    kind, run, model, _ = trained
    rng = np.random.default_rng(seed)
    rows = [int(row) for row in rng.integers(0, 3, 7)]
    request = {name: [column[row] for row in rows] for name, column in REQUESTS[kind].items()}
    lists = [[f"item {item}" for item in rng.integers(0, 45, rng.integers(0, 9))] for _ in rows]
    columns = {**request, "candidates": pa.array(lists, pa.list_(pa.string()))}
    want = expected(model, request, lists)
    assert_scores(model.candidate_scores(columns).scores, want)
    assert_scores(run.candidate_scores(columns), want)
    nothing = {name: column[:0] for name, column in columns.items()}
    assert model.candidate_scores(nothing).scores == run.candidate_scores(nothing) == []


def test_items_without_a_vector_have_no_score(trained, monkeypatch):
    """Vectors of two towers are of the items that training saw, in the order of their rows, whatever these are."""
    kind, _, model, _ = trained
    if kind != "two_tower":
        return
    columns = {"candidates": [["item 1", "item 2", "item 3", "never seen"]] * 3, **REQUESTS[kind]}
    (_, places), rows = model.encoded(columns).candidates, model._ranked._rows
    assert [model._ranked.named(places[[k]]) for k in range(3)] == [["item 1"], ["item 2"], ["item 3"]]
    monkeypatch.setattr(model._ranked, "_rows", np.delete(rows, places[0]))
    fewer = model.encoded(columns).candidates.values
    assert fewer[[0, 3]].tolist() == [-1, -1]
    assert [model._ranked.named(fewer[[k]]) for k in (1, 2)] == [["item 2"], ["item 3"]]


def test_unknown_candidates_are_counted(trained):
    kind, run, model, _ = trained
    columns = {**REQUESTS[kind], "candidates": CANDIDATES}
    for counts, ask_for in ((run.unknown, run.candidate_scores), (model.unknown, model.candidate_scores)):
        before = counts.features.get("candidates")
        values, unknown = (before.values, before.unknown) if before else (0, 0)
        ask_for(columns)
        after = counts.features["candidates"]
        assert (after.values - values, after.unknown - unknown) == (6, 1)
        assert after.trained is not None
    known = {name: column[:1] for name, column in columns.items()}
    with pytest.raises(DatasetError, match=r"of the values of 'candidates' training did not see 25\.0% of 4"):
        run.candidate_scores(known, max_unknown=0.1)


def test_what_names_no_candidates_is_refused(trained):
    kind, run, model, _ = trained
    request = REQUESTS[kind]
    for ask_for in (model.candidate_scores, run.candidate_scores):
        with pytest.raises(DatasetError, match="column 'candidates' is missing, so that no candidates are named; ask"):
            ask_for(request)
        with pytest.raises(DatasetError, match="column 'candidates' holds one value an example, but lists are wanted"):
            ask_for({**request, "candidates": ["item 1"] * 3})
        with pytest.raises(ValueError, match="column 'candidates' has 2 lists, but other columns have 3 rows"):
            ask_for({**request, "candidates": [["item 1"]] * 2})
        assert ask_for({**request, "candidates": [None] * 3}) in ([[]] * 3, ([[]] * 3, model.manifest))
    with pytest.raises(ValueError, match="the columns have 'candidates'; call candidate_scores, or leave them out"):
        model.best({**request, "candidates": CANDIDATES})
    encoder = run.encoder
    name = encoder.raw_columns[-1]
    assert encoder.named_rows(request, name, "item") is None  # a feature's column stays one, whatever it is called


def written(path, columns):
    """Columns as a file of the format that the path's ending says."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return str(path)


def predicted(folder, *arguments, out):
    assert cli.main(["predict", str(folder / "run"), *arguments, "--out", str(out), "--quiet"]) == 0
    return pq.read_table(out)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl"])
def test_jrec_predict_scores_the_candidates_that_files_name(ending, trained, tmp_path):
    """A line for each, of several files too; before, the column was passed over and the best items were written."""
    kind, run, _, folder = trained
    columns = {**REQUESTS[kind], "candidates": CANDIDATES, "name": ["a", "b", "c"]}
    want, count = run.candidate_scores(columns), len(CANDIDATES)
    files = [written(tmp_path / f"{name}.{ending}", columns) for name in ("one", "two")]
    scores = predicted(folder, *files, "--keep", "name", out=tmp_path / "scores.parquet")
    assert scores.column_names == ["row", "name", "item", "score"]
    rows = [row for row, items in enumerate(CANDIDATES * 2) for _ in items]
    assert scores["row"].to_pylist() == rows
    assert scores["name"].to_pylist() == ["abc"[row % count] for row in rows]
    assert scores["item"].to_pylist() == [item for items in CANDIDATES * 2 for item in items]
    assert_scores([scores["score"].to_pylist()], [[score for line in want * 2 for score in line]])
    nothing = [written(tmp_path / "none.parquet", pa.table(columns).slice(0, 0))]
    assert predicted(folder, *nothing, out=tmp_path / "no_scores.parquet").schema == scores.drop_columns("name").schema


def test_jrec_predict_says_which_candidates_it_cannot_score(trained, tmp_path, capsys):
    kind, run, _, folder = trained
    columns = {**REQUESTS[kind], "candidates": CANDIDATES}
    files = {
        "lists": columns,
        "without": REQUESTS[kind],
        "numbers": {**REQUESTS[kind], "candidates": [[1], [2], [3]]},
    }
    paths = {name: written(tmp_path / f"{name}.parquet", of_file) for name, of_file in files.items()}
    for arguments, message in (
        ([paths["lists"], "--k", "3"], "k is of the best items, but .* names candidates; leave k or them out"),
        ([paths["lists"], "--why", "1"], "why is of the best items, but .* names candidates; leave why or them out"),
        (
            [paths["without"], paths["lists"]],
            "without.parquet has no column 'candidates' of lists, but .*lists.parquet",
        ),
        ([paths["lists"], paths["numbers"]], "numbers.parquet: column 'candidates' holds lists of int64, but in .* of"),
        ([paths["lists"], "--max-unknown", "0.1"], r"candidates\b.* 16\.7% of 6"),
    ):
        out = tmp_path / "scores.csv"
        assert cli.main(["predict", str(folder / "run"), *arguments, "--out", str(out), "--quiet"]) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not out.exists()
    # Of one value an example it is a column like others that the model does not read.
    other = written(tmp_path / "one.parquet", {**REQUESTS[kind], "candidates": ["x", "y", "z"]})
    best = predicted(folder, other, "--k", "2", out=tmp_path / "best.parquet")
    assert best["item"].to_pylist() == [item for line in run.best(REQUESTS[kind], 2)[1] for item in line if item]


def test_a_server_answers_each_request_as_it_asks(trained):
    kind, _, model, folder = trained
    request, want = REQUESTS[kind], expected(model, REQUESTS[kind], CANDIDATES)
    columns = {**request, "candidates": CANDIDATES}
    rows = [{name: column[row] for name, column in columns.items()} for row in range(3)]
    limits = Limits(batch_rows=64, delay=0.3, queue_rows=100, scores=20 * model.items)
    options = Options(max_rows=50, max_bytes=100_000, poll=0)
    with running(folder / "export", limits=limits, options=options) as served:
        for content in ({"columns": columns}, {"rows": rows}):
            status, _, body = ask(served.port, content=content)
            assert (status, {*json.loads(body)}) == (200, {"scores", "version"})
            assert_scores(json.loads(body)["scores"], want)
        assert_scores(json.loads(ask(served.port, content={"instances": rows})[2])["predictions"], want)
        answered = pa.ipc.open_stream(ask(served.port, content=stream(pa.table(columns)), kind=ARROW)[2]).read_all()
        assert answered.column_names == ["score"]
        assert_scores(answered["score"].to_pylist(), want)
        # Far more rows than may be ranked, and a body that is encoded at once.
        many = {name: column * 16 for name, column in columns.items()}
        many["candidates"] = [[f"item {item}" for item in range(40)] for _ in many["candidates"]]
        assert len(json.dumps(many)) > 16_384
        status, _, body = ask(served.port, content={"columns": many})
        assert_scores(json.loads(body)["scores"], expected(model, request, many["candidates"][:3]) * 16)
        assert ask(served.port, content={"columns": {name: column * 7 for name, column in request.items()}})[0] == 413
        # Those that rank beside those that do not, in one batch.
        requests = [Rows(columns=named, count=3) for named in (request, columns, request, columns)]
        futures = [served.made._batcher.submit(one) for one in requests]
        for number, future in enumerate(futures):
            answer = future.result(30)
            if number % 2:
                assert_scores(answer.scores, want)
            else:
                assert answer.items == model.best(request, 10).items
        status, _, body = ask(served.port, "/predict?k=3", {"columns": columns})
        assert (status, json.loads(body)["error"]) == (
            422,
            "a request with candidates has a score for each of them; leave k out",
        )
        status, _, body = ask(served.port, content={"columns": {**request, "candidates": [1, 2, 3]}})
        assert (status, "holds one value an example" in json.loads(body)["error"]) == (422, True)
        metadata = json.loads(ask(served.port, "/metadata")[2])
        optional = {"name": "candidates", "datatype": "BYTES", "shape": [-1, -1], "parameters": {"optional": True}}
        assert metadata["inputs"][-1] == optional
        status, headers, body = ask(served.port, "/metrics")
        assert headers["Content-Type"] == CONTENT_TYPE
        assert 'jrec_unknown_values_total{feature="candidates"}' in body.decode()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "uint64", "int64"])
def test_row_numbers_of_any_integers_name_candidates(dtype, tmp_path):
    feature = Feature(name="user", table="item", pooling="sum", max_length=1, dim=2, weighted=False)
    part = Part(first_row=0, rows=200, dim=2, dtype="float32")
    save_keying(tmp_path, {})
    manifest = Manifest(
        id="", parent="", jrec="", run="", step=0, rows="", dtype="float32", dense=(), features=(feature,),
        tables={"item": (part,)}, files={},
    )  # fmt: skip
    named = np.array([[0, 100], [199, np.iinfo(dtype).max]], dtype)
    rows = RowNumbers(tmp_path, manifest).candidates({"user": [1, 2], "candidates": named}, "item")
    assert rows.offsets.tolist() == [0, 2, 4]
    assert rows.values.tolist() == [0, 100, 199, -1]
