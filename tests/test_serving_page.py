"""The snippets of docs/serving.md run on exports of a small log, and the one without jrec gives jrec's scores."""

import pathlib
import re

import numpy as np
import pytest
import shop_logs

import jrec
from jrec import cli

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "serving.md"


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_snippets_of_the_page_run(dtype, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    predict, load, alone = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = shop_logs.write_log(tmp_path / "log.csv")
    names = {"jrec": jrec}
    for schema, snippets in ((shop_logs.SCHEMA, (predict, load)), (shop_logs.TWO_FEATURES, (alone,))):
        monkeypatch.setattr(shop_logs, "SCHEMA", schema)
        dataset = shop_logs.prepare(tmp_path, tmp_path / "log.csv", "data", "--overwrite")
        run = shop_logs.trained(tmp_path, dataset, out="runs/clicks", overwrite=True)
        export = ["export", str(run), "--dtype", dtype, "--out", "exports/clicks", "--overwrite", "--quiet"]
        assert cli.main(export) == 0
        for snippet in snippets:
            exec(compile(snippet, PAGE.name, "exec"), names)
            assert np.isfinite(names["scores"]).all()
    columns = {name: [line[name] for line in lines[:50]] for name in ("user", "item", "price")}
    columns["user"][0] = "somebody new"
    columns["price"] = [float(price or 0) for price in columns["price"]]
    np.testing.assert_allclose(names["score"](columns), jrec.serving.load("exports/clicks")(columns), rtol=1e-5)
