"""Pipes as inputs: read once, spooled, and as good as files; and what cannot be an input."""

import gzip
import hashlib
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from jrec import cli
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Avazu, Criteo


def log(rows, seed=0):
    rng = np.random.default_rng(seed)
    lines = []
    for label, *values in rng.integers(0, 50, (rows, 40)):
        lines.append("\t".join([str(label % 2), *map(str, values[:13]), *(f"{v:08x}" for v in values[13:])]))
    return ("\n".join(lines) + "\n").encode()


def fifo(path, content):
    """A FIFO that a thread writes to once."""
    os.mkfifo(path)

    def write():
        with pathlib.Path(path).open("wb") as file:
            file.write(content)

    threading.Thread(target=write, daemon=True).start()
    return str(path)


def content_of(folder):
    return {
        p.relative_to(folder): p.read_bytes()
        for p in sorted(pathlib.Path(folder).rglob("*"))
        if p.is_file() and p.name != "schema.json"
    }


@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_gives_the_dataset_of_a_file(tmp_path, packed):
    first, second = log(300), log(200, seed=1)
    (tmp_path / "1").write_bytes(first)
    (tmp_path / "2").write_bytes(second)
    prepare(Criteo("criteo-kaggle"), [str(tmp_path / "1"), str(tmp_path / "2")], tmp_path / "of_files")
    sent = gzip.compress(first) if packed else first
    pipe = fifo(tmp_path / "pipe", sent)
    said = []
    schema = prepare(Criteo("criteo-kaggle"), [pipe, str(tmp_path / "2")], tmp_path / "of_pipe", report=said.append)
    assert content_of(tmp_path / "of_pipe") == content_of(tmp_path / "of_files")
    assert said == [f"reading {pipe} to disk first: a pipe can be read only once"]
    assert schema.provenance["inputs"] == [
        {"file": pipe, "bytes": len(sent), "stream": True, "sha256": hashlib.sha256(sent).hexdigest()},
        {"file": str(tmp_path / "2"), "bytes": len(second)},
    ]
    assert not list(tmp_path.glob("*.partial"))


def test_process_substitution_and_standard_input(tmp_path):
    """As shells make them; - is standard input."""
    for name, rows in (("1", 300), ("2", 200), ("3", 100)):
        (tmp_path / name).write_bytes(gzip.compress(log(rows, seed=rows)))
    prepare(Criteo("criteo-kaggle"), [str(tmp_path / name) for name in "123"], tmp_path / "files")
    jrec = f"{sys.executable} -c 'import sys; from jrec.cli import main; sys.exit(main(sys.argv[1:]))'"
    command = f"{jrec} prepare criteo-kaggle --input <(zcat 1) <(zcat 2) - --out pipes < <(zcat 3)"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert content_of(tmp_path / "files") == content_of(tmp_path / "pipes")
    assert Schema.load(tmp_path / "pipes").provenance["inputs"][2]["file"] == "/dev/stdin"


def test_mistakes_name_the_pipe(tmp_path):
    for number, (content, source, message) in enumerate([
        (b"", Criteo("criteo-kaggle"), "the pipe PIPE ended without a byte"),
        (b"1\tx\n", Criteo("criteo-kaggle"), "PIPE:1: .* Fix the line"),
        (b"BZh91AY", Criteo("criteo-kaggle"), "PIPE is damaged: Truncated compressed stream"),
        (b"7z\xbc\xaf", Criteo("criteo-kaggle"), "PIPE is a 7z archive; unpack it first"),
        (gzip.compress(log(300))[:-50], Criteo("criteo-kaggle"), "PIPE is truncated"),
        (b"no,header\n", Avazu(), "PIPE"),
    ]):  # fmt: skip
        pipe = fifo(tmp_path / f"pipe{number}", content)
        with pytest.raises(DatasetError, match=message.replace("PIPE", pipe)):
            prepare(source, [pipe], tmp_path / "out", PrepareOptions())
        assert not list(tmp_path.glob("out*"))


def test_devices_are_no_inputs(tmp_path, capsys):
    assert cli.main(["prepare", "avazu", "--input", "/dev/null", "--out", str(tmp_path / "out")]) == 2
    assert "input /dev/null is a terminal or another device; give files, or pipe" in capsys.readouterr().err
