"""A small log, and its preparation."""

from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers.delimited import Delimited
from jrec.prepare.readers.delimited_schema import load_schema

LOG = "label,a,b\n" + "".join(f"{i % 2},{'xyz'[i % 3]},{i % 5}\n" for i in range(60))


def prepared(folder, text, name, **options):
    (folder / f"{name}.csv").write_text(text)
    schema = '[label]\ncolumn = "label"\n[[categorical]]\ncolumn = "a"\n[[categorical]]\ncolumn = "b"\n'
    (folder / "columns.toml").write_text(schema)
    source = Delimited(load_schema(str(folder / "columns.toml")))
    return prepare(
        source, [str(folder / f"{name}.csv")], folder / name, PrepareOptions(min_count=1, threads=1, **options)
    )
