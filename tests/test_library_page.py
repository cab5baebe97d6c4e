"""The snippets and commands of docs/library.md run one after the other, as a reader would run them."""

import json
import pathlib
import re
import shlex
import sys

import jax
import numpy as np
import shop_logs

import jrec
from jrec import cli

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "library.md"
BEFORE, SECTION, AFTER = re.fullmatch(
    r"(.*)(## Your program and the command\n.*?)(## A loop of your own\n.*)", PAGE.read_text(), re.DOTALL
).groups()


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run_snippets(snippets, names):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, snippet in enumerate(snippets):
            exec(compile(snippet, f"{PAGE.name}, snippet {number + 1}", "exec"), names)


def test_the_snippets_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    snippets = blocks(BEFORE + AFTER, "python")
    assert len(snippets) >= 5
    run_snippets(snippets, names)
    assert "step 20: loss" in capsys.readouterr().out
    assert names["meta"] == {"epoch": 1}
    assert names["logits"].shape == (256,)
    assert names["vectors"].shape == (3, 16)
    assert names["plan"].rows_in("host") > 0
    assert np.isfinite(names["value"])


def test_a_program_and_the_command_go_on_from_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shop_logs, "SCHEMA", shop_logs.TWO_FEATURES)
    for seed, day in enumerate(("monday", "tuesday")):
        shop_logs.write_log(tmp_path / f"{day}.csv", 1000, seed=seed)
    shop_logs.prepare(tmp_path, tmp_path / "monday.csv", "data/monday")
    model, script, back = blocks(SECTION, "python")
    (config,), (commands,) = blocks(SECTION, "toml"), blocks(SECTION, "bash")
    (tmp_path / "shop_model.py").write_text(model)
    (tmp_path / "shop.toml").write_text(config)
    names = {}
    try:
        run_snippets([script], names)
        assert names["run"].steps == 13
        capsys.readouterr()
        for command in commands.splitlines():
            program, *arguments = shlex.split(command, comments=True)
            assert (program, cli.main(arguments)) == ("jrec", 0)
        first = json.loads(capsys.readouterr().out.splitlines()[0])
        run_snippets([back], names)
        assert cli.main(["eval", "runs/shop_more", "data/monday"]) == 0
    finally:
        sys.modules.pop("shop_model", None)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (first["step"], last["step"]) == (13, 26)
    assert 0 < last["log_loss"] != first["log_loss"]
    columns = {"user": ["u1", "somebody new"], "item": ["i1", "i2"], "price": [9.5, None]}
    served = jrec.serving.load("exports/shop_more")(columns)
    np.testing.assert_allclose(served, jrec.load_run("runs/shop_more").predict(columns), rtol=1e-5)
