"""The commands and the snippet of docs/from_csv.md, as a reader would run them."""

import functools
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pandas as pd
import pytest
import shop_logs

import jrec

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "from_csv.md"


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shop_logs.write_log(tmp_path / "monday.csv", 2000)
    shop_logs.write_log(tmp_path / "tuesday.csv", 1000, seed=1)
    text = PAGE.read_text()
    (schema,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "clicks.toml").write_text(schema)
    (script,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert len(script.splitlines()) <= 15
    jrec_here = f'jrec() {{ "{sys.executable}" -m jrec "$@"; }}\nset -e\n'
    done = subprocess.run(["bash", "-c", jrec_here + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    three_lines, snippet = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    clicks = pd.read_csv("monday.csv").assign(ts=pd.date_range("2024-05-01", periods=2000, freq="min"))
    names = {"jrec": types.SimpleNamespace(fit=functools.partial(jrec.fit, quick=True)), "clicks": clicks}
    exec(compile(three_lines, PAGE.name, "exec"), names | {"tomorrow": clicks.tail(100)})
    assert jrec.serving.load("exports/clicks")(clicks.head(3)).shape == (3,)
    names = {}
    exec(compile(snippet, PAGE.name, "exec"), names)
    assert names["scores"].shape == (2,)
    assert ((names["scores"] > 0) & (names["scores"] < 1)).all()
    columns = {"user": ["u1", "somebody new"], "item": ["i1", "i2"], "price": [9.5, None]}
    np.testing.assert_allclose(names["scores"], jrec.load_run("runs/tuesday").predict(columns), rtol=1e-5)
