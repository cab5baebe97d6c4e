"""The snippets of docs/library.md run one after the other, as a reader would run them."""

import pathlib
import re

import jax
import numpy as np
import pytest

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "library.md"


@pytest.mark.usefixtures("quick_compilation")
def test_the_snippets_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) >= 5
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, snippet in enumerate(snippets):
            exec(compile(snippet, f"{PAGE.name}, snippet {number + 1}", "exec"), names)
    assert "step 20: loss" in capsys.readouterr().out
    assert names["meta"] == {"epoch": 1}
    assert names["logits"].shape == (256,)
    assert names["vectors"].shape == (3, 16)
    assert names["plan"].rows_in("host") > 0
    assert np.isfinite(names["value"])
