"""Folders of exports that are damaged or say what cannot be: refused, whatever their checksums."""

import os
import pathlib
import shutil

import numpy as np
import pytest
from export_cases import made_exports, reseal, seal_schema

from jrec import serving
from jrec.data.schema import DatasetError, Schema
from jrec.errors import JrecError
from jrec.serving.checks import load_manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return made_exports(tmp_path_factory.mktemp("exports"), deltas=()) / "whole"


@pytest.fixture
def export(whole, tmp_path):
    return pathlib.Path(shutil.copytree(whole, tmp_path / "export"))


# Without the checksums of rows (check=False)


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


DAMAGE = {
    "cut": lambda content: content[:-2],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"\0",
    "flipped in front": lambda content: flipped(content, 3),
    "flipped in the header": lambda content: flipped(content, min(40, len(content) // 3)),
    "flipped in the middle": lambda content: flipped(content, max(len(content) // 2, len(content) - 50)),
    "flipped at the end": lambda content: flipped(content, len(content) - 2),
}


def is_rows(file):
    """Whether a file is one of those whose bytes ``check=False`` does not read."""
    return file in ("tables/user.npy", "tables/item.npy")


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_seen_without_reading_rows_but_for_their_values(how, whole, export):
    for path in sorted(path for path in whole.rglob("*") if path.is_file()):
        file = path.relative_to(whole).as_posix()
        content = path.read_bytes()
        (export / file).write_bytes(DAMAGE[how](content))
        with pytest.raises(JrecError, match=path.name):
            serving.load(export)
        if is_rows(file) and how in ("flipped in the middle", "flipped at the end"):
            serving.load(export, check=False)  # as its docstring says
        else:
            with pytest.raises(JrecError, match=path.name):
                serving.load(export, check=False)
        (export / file).write_bytes(content)
    serving.load(export, check=False)


def test_a_file_in_the_place_of_another_is_seen(whole, export):
    files = sorted(load_manifest(whole).files)
    for file in files:
        other = next(f for f in files if (f != file and f.endswith(pathlib.Path(file).suffix)) or f == files[0] != file)
        shutil.copyfile(whole / other, export / file)
        with pytest.raises(JrecError, match=pathlib.Path(file).name):
            serving.load(export, check=False)
        shutil.copyfile(whole / file, export / file)


HEADERS = {
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "other columns": lambda array: array.view(np.uint8).reshape(len(array), -1),
    "fewer rows": lambda array: array[:-1],
    "another order": lambda array: np.asfortranarray(np.zeros((len(array), array.itemsize), np.uint8)),
    "objects": lambda array: array.astype(object),
}


@pytest.mark.parametrize("how", HEADERS)
def test_rows_of_another_form_are_refused(how, export):
    path = export / "tables" / "user.npy"
    np.save(path, HEADERS[how](np.load(path)), allow_pickle=True)
    with pytest.raises(serving.ExportError, match=r"user\.npy"):
        serving.load(export, check=False)
    reseal(export, files=("tables/user.npy",))
    with pytest.raises(serving.ExportError, match=r"user\.npy"):
        serving.load(export)


def test_a_header_of_more_rows_than_the_file_has_makes_no_room(export):
    path = export / "tables" / "item.core-0.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**15,)})
    reseal(export, files=("tables/item.core-0.npy",))
    with pytest.raises(serving.ExportError, match=r"core-0\.npy"):
        serving.load(export)


# Manifests with checksums that fit


def part(**values):
    """Changes the tensor train of table "item", or its rows, or those of "user"."""

    def change(content):
        tables = content["tables"]
        of = {"train": tables["item"][1], "head": tables["item"][0], "user": tables["user"][0]}
        for name, changed in values.items():
            of[name] |= changed

    return change


def feature(**values):
    return lambda content: content["features"][0].update(values)


BAD = {
    "a file above": (lambda m: m["files"].update({"../x.npy": "0"}), r"'\.\./x\.npy', which is no path inside"),
    "an absolute file": (lambda m: m["files"].update({"/etc/passwd": "0"}), "'/etc/passwd', which is no path"),
    "a file by a detour": (lambda m: m["files"].update({"tables/./user.npy": "0"}), "which is no path inside"),
    "a long name": (lambda m: m["files"].update({"n" * 10_000: "0"}), "which is no path inside"),
    "the manifest": (lambda m: m["files"].update({"manifest.json": "0"}), "which is no path inside"),
    "no program": (lambda m: m["files"].pop("model.jax_export"), "files lacks model.jax_export"),
    "no schema": (lambda m: m["files"].pop("schema.json"), "files lacks schema.json"),
    "rows above": (part(user={"file": "../user.npy"}), r"table 'user' names '\.\./user\.npy', which is not in files"),
    "absolute rows": (part(user={"file": "/etc/passwd"}), "which is not in files"),
    "cores above": (part(train={"cores": ["../x", "../y", "../z"]}), "which is not in files"),
    "cached rows above": (part(train={"cached_rows": "../x"}), "which is not in files"),
    "changed rows above": (part(user={"changed": "../x"}), "which is not in files"),
    "a file twice": (part(head={"file": "tables/user.npy"}), "more than once"),
    "changed rows of no delta": (part(user={"changed": "keys/user.npy"}), "is no delta"),
    "a gap": (part(train={"first_row": 31}), "has a part of .* rows from 31 on, but 30 rows before it"),
    "an overlap": (part(train={"first_row": 29}), "from 29 on, but 30 rows before it"),
    "no rows": (part(user={"rows": 0}), "has a part of 0 rows"),
    "negative rows": (part(user={"rows": -5}), "has a part of -5 rows"),
    "many rows": (part(user={"rows": 2**40}), "has 1,099,511,627,776 rows"),
    "more rows": (part(user={"rows": 1000}), r"user\.npy is an array"),
    "another dim": (part(head={"dim": 4}), "has dim 8; it must be 1 to 4096, the same in all parts"),
    "a great dim": (part(user={"dim": 10**9}), "has dim 1000000000"),
    "an unknown dtype": (lambda m: m.update(dtype="float8"), "dtype is 'float8'"),
    "another dtype": (part(user={"dtype": "float32"}), "has rows of 'float32', but the export is of int8"),
    "cores of another dtype": (part(train={"dtype": "float16"}), r"core-0\.npy is an array of float32"),
    "cores of no dtype": (part(train={"dtype": "object"}), "has cores of 'object'"),
    "other factors": (part(train={"row_factors": [1, 1, 1]}), "is no tensor train"),
    "a great rank": (part(train={"ranks": [10**9, 10**9]}), "is no tensor train"),
    "fewer cores": (lambda m: m["tables"]["item"][1]["cores"].pop(), "has 2 cores, but 3 row_factors"),
    "cached numbers alone": (part(train={"cached_rows": ""}), "cached rows without their numbers"),
    "neither rows nor cores": (part(user={"file": ""}), "has neither rows nor cores"),
    "both": (part(train={"file": "keys/user.npy"}), "has cores and rows"),
    "no parts": (lambda m: m["tables"].update(user=[]), "has no parts"),
    "no table": (lambda m: m["tables"].pop("user"), "reads table 'user', which is not there"),
    "another table": (feature(table="item"), "feature 'user' has table, max_length, weights"),
    "another dim of a feature": (feature(dim=4), "has dim 4, but table 'user' has 8"),
    "an unknown pooling": (feature(pooling="median"), "has pooling 'median'"),
    "another pooling": (feature(pooling="none"), "model.jax_export takes inputs of"),
    "no length": (feature(max_length=0), "has max_length 0"),
    "another length": (feature(max_length=10**6), "feature 'user' has table, max_length, weights"),
    "weights": (feature(weighted=True), "feature 'user' has table, max_length, weights"),
    "another feature": (feature(name="buyer"), "is not of both the schema and the model"),
    "a feature twice": (lambda m: m["features"].append(m["features"][0]), "feature 'user' is there more than once"),
    "no feature": (lambda m: m["features"].pop(), "feature 'history' is not of both"),
    "another dense feature": (lambda m: m.update(dense=["cost"]), "dense features are"),
    "no dense feature": (lambda m: m.update(dense=[]), "dense features are"),
    "a negative step": (lambda m: m.update(step=-1), "step is -1"),
    "no keys": (lambda m: m["files"].pop("keys/user.npy"), "keys/user.npy"),
    "no vocabulary": (lambda m: m["files"].pop("vocabulary/item.parquet"), "reads vocabulary/item.parquet, which the"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_manifest_that_says_what_cannot_be_is_refused(fault, export):
    change, message = BAD[fault]
    reseal(export, change)
    with pytest.raises(serving.ExportError, match=message):
        serving.load(export)


def test_a_manifest_that_was_edited_and_sealed_without_its_id_is_refused(export):
    reseal(export, lambda manifest: manifest.update(step=5), own_id=False)
    with pytest.raises(serving.ExportError, match=r"manifest\.json was edited: its id does not fit"):
        serving.load(export)


@pytest.mark.parametrize("file", ["tables/user.npy", "tables/item.core-0.npy", "schema.json", "model.jax_export"])
def test_a_link_that_leads_out_of_the_folder_is_refused(file, export, tmp_path):
    (export / file).rename(tmp_path / "elsewhere")
    (export / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(serving.ExportError, match=f"{file} is a link that leads out of the folder"):
        serving.load(export)
    (export / file).unlink()
    (tmp_path / "elsewhere").rename(export / "tables" / "inside")
    (export / file).symlink_to(os.path.relpath(export / "tables" / "inside", (export / file).parent))
    serving.load(export)


def test_a_link_to_an_export_is_an_export(export, tmp_path):
    (tmp_path / "latest").symlink_to(export)
    serving.load(tmp_path / "latest")


def test_a_pipe_in_the_place_of_a_file_is_refused(export):
    (export / "tables" / "user.npy").unlink()
    os.mkfifo(export / "tables" / "user.npy")
    with pytest.raises(serving.ExportError, match=r"user\.npy is missing"):
        serving.load(export)


def table(number, **values):
    return lambda schema: schema["tables"][number].update(values)


def raw(schema):
    """How the log was that the dataset was prepared from."""
    return schema["provenance"]["format_options"]["schema"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (table(1, vocabulary="../item.parquet"), r"names file '\.\./item\.parquet', which is no path inside"),
        (table(1, vocabulary="/etc/passwd"), "names file '/etc/passwd'"),
        (table(1, counts="../x"), r"names file '\.\./x'"),
        (table(1, bijection={"file": "../x", "sha256": "", "version": 1}), r"names file '\.\./x'"),
        (lambda s: s["files"].update({"../x": ""}), r"names file '\.\./x'"),
        (lambda s: s["splits"]["test"]["shards"][0].update(file="../x"), r"names file '\.\./x'"),
        (lambda s: (s["tables"][0].update(name="../x"), s["categorical"][0].update(table="../x")), r"'\.\./x\.npy'"),
        (table(1, rows=10**6), "table 'item' has 1,000,000 rows, but the model has"),
        (table(1, vocabulary="model.onnx"), "table 'item' reads model.onnx, which the manifest does not list"),
        (lambda s: s["dense"][0].update(name="cost"), "dense features are"),
        (table(1, oov_row=3), "mean other values than the model's"),
        (lambda s: raw(s)["dense"][0].update(name="cost"), "feature 'price' is log1p, dense, but by its provenance it"),
        (lambda s: raw(s)["dense"][0].update(transform="none"), "but by its provenance it is none, dense"),
        (lambda s: raw(s)["categorical"][1].update(table="user"), "feature 'item' is of table item, not weighted, but"),
        (lambda s: raw(s)["categorical"][2].update(weights=""), "feature 'history' is of table item, weighted, but"),
        (lambda s: raw(s)["categorical"][2].update(max_length=-1), "max_length is -1; it must be at least 1"),
    ],
)
def test_a_schema_that_says_what_cannot_be_is_refused(change, message, export):
    (export / "model.onnx").write_bytes(b"unlisted")
    seal_schema(export, change)
    reseal(export, files=("schema.json",))
    with pytest.raises(JrecError, match=f"schema.json.*{message}"):
        serving.load(export)


def test_a_dataset_that_names_a_file_outside_of_it_is_refused(export):
    seal_schema(export, table(1, counts="../../counts.npy"))
    with pytest.raises(DatasetError, match="which is no path inside the dataset's folder"):
        Schema.load(export, check_files=False)
