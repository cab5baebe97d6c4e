"""What a dataset's folder holds, for comparisons to the byte."""

import pathlib


def content(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file but the description: blocks, counts, vocabularies, buckets."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.name not in ("schema.json", "bad_lines.tsv")}
