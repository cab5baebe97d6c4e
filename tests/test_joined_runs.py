"""Runs on datasets of joined files: predictions and exports have the evaluation's scores; MovieLens-1M is joined."""

import csv
import gzip

import joined_logs
import numpy as np
import pyarrow.parquet as pq
import pytest
import shop_logs
from dataset_files import content
from prepare_reference import read_dataset

from jrec import cli, load_run, serving
from jrec.app.evaluate import restore_run
from jrec.app.export import export_run
from jrec.data.unknown import UnknownValuesWarning
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import load_schema


def test_predictions_have_the_scores_of_the_evaluation(tmp_path, capsys):
    monday, tuesday = tmp_path / "monday", tmp_path / "tuesday"
    for folder, seed in ((monday, 0), (tuesday, 1)):
        folder.mkdir()
        lines = joined_logs.write(folder, seed=seed)
        command = [
            "prepare",
            "csv",
            "--schema",
            str(folder / "joined.toml"),
            "--input",
            str(folder / "log.csv"),
            "--quiet",
        ]
        earlier = ["--vocabulary-from", str(monday / "data"), "--split", "0,0,1"] if seed else []
        assert cli.main([*command, "--out", str(folder / "data"), *earlier]) == 0
    run = shop_logs.trained(tmp_path, monday / "data")
    in_time = np.argsort([int(line["at"]) for line in lines], kind="stable")
    want = restore_run(run, tuesday / "data").scores("test").logits
    assert len(want) == 600

    def predicted(*options):
        arguments = [
            "predict",
            run,
            tuesday / "log.csv",
            "--out",
            tmp_path / "scores.parquet",
            "--overwrite",
            "--quiet",
        ]
        assert cli.main(list(map(str, (*arguments, *options)))) == 0
        return pq.read_table(tmp_path / "scores.parquet")

    given = [f"users={tuesday / 'side/users.csv.gz'}", f"items.parquet={tuesday / 'items.parquet'}"]
    scores = predicted("--join", given[0], "--join", given[1])
    np.testing.assert_array_equal(scores["logit"].to_numpy()[in_time], want)
    np.testing.assert_array_equal(scores["label"], [float(line["click"]) for line in lines])
    assert f"have a 'user' that {given[0][6:]} lacks" in capsys.readouterr().err
    recorded = predicted()["logit"].to_numpy()[in_time]  # with Monday's files
    assert (recorded != want).any()
    for path in (monday / "side/users.csv.gz", monday / "items.parquet"):
        path.unlink()
    capsys.readouterr()
    assert cli.main(["predict", str(run), str(tuesday / "log.csv"), "--out", str(tmp_path / "x.csv"), "--quiet"]) == 2
    assert "give its place with --join users=FILE" in capsys.readouterr().err

    columns = {
        name: [line[name] or None for line in lines] for name in ("user", "age", "born", "home", "person", "price")
    }
    columns["age"] = [None if value == "NA" else value for value in columns["age"]]
    columns["related"] = [line["related"].split("|") if line["related"] else [] for line in lines]
    columns["tags"] = [line["tags"].split("|") if line["tags"] else [] for line in lines]
    columns["tags:weight"] = [[float(w) for w in line["strengths"].split("|") if w] for line in lines]
    with pytest.warns(UnknownValuesWarning, match="of the values of 'related' training did not see"):
        logits = load_run(run).logits(columns)
    np.testing.assert_array_equal(logits[in_time], want)
    export_run(run, tmp_path / "export")
    np.testing.assert_allclose(
        serving.load(tmp_path / "export")(columns)[in_time], 1 / (1 + np.exp(-want.astype(np.float64))), rtol=1e-5
    )


MOVIELENS = """
[[categorical]]
column = "user_id"
[[categorical]]
column = "item_id"
"""
USERS = """
[[join.categorical]]
column = "gender"
[[join.dense]]
column = "age"
transform = "standardize"
[[join.categorical]]
column = "occupation"
[[join.categorical]]
column = "zip_code"
"""
GENRES = """
[[join.categorical]]
column = "genres"
separator = "|"
"""


@pytest.mark.slow
def test_movielens_with_its_users_and_movies(tmp_path, shared_data):
    sides = {"users": ["id", "gender", "age", "occupation", "zip_code"], "movies": ["id", "title", "genres"]}
    joins, tables = "", {}
    for name, columns in sides.items():
        path, key = shared_data / f"ml1m_{name}.dat.gz", "user_id" if name == "users" else "item_id"
        joins += f'[[join]]\nfile = "{path}"\nkey = "{key}"\non = "id"\ndelimiter = "::"\ncolumns = {columns}\n'
        joins += USERS if name == "users" else GENRES
        with gzip.open(path, "rt", encoding="latin-1") as file:
            tables[name] = {line.split("::")[0]: line.rstrip("\n").split("::")[1:] for line in file}
    (tmp_path / "joined.toml").write_text(MOVIELENS + joins)
    (tmp_path / "prejoined.toml").write_text(MOVIELENS + (USERS + GENRES).replace("join.", ""))
    with gzip.open(shared_data / "ml1m_user_item.csv.gz", "rt") as log, (tmp_path / "prejoined.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "gender", "age", "occupation", "zip_code", "genres"])
        next(log)
        for user, item in (line.rstrip("\n").split(",") for line in log):
            writer.writerow([user, item, *tables["users"][user], tables["movies"][item][-1]])
    made = {}
    for kind, path in (("joined", shared_data / "ml1m_user_item.csv.gz"), ("prejoined", tmp_path / "prejoined.csv")):
        source = csv_source(load_schema(str(tmp_path / f"{kind}.toml")))
        made[kind] = prepare(source, [str(path)], tmp_path / kind, PrepareOptions(labels=False))
    assert made["joined"].identity == made["prejoined"].identity
    assert content(tmp_path / "joined") == content(tmp_path / "prejoined")
    schema, columns = read_dataset(tmp_path / "joined")
    assert len(columns["gender"]) == 1_000_209
    assert schema.table("genres").rows == 19  # 18 and the OOV row
