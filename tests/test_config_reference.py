"""docs/configuration.md has every key, and what it says is in the sections' docstrings."""

import dataclasses

from jrec.app.config import TrainConfig
from jrec.app.config.typed_toml import Section, describe, hints
from scripts import config_reference


def test_the_page_is_what_the_docstrings_say():
    assert config_reference.FILE.read_text() == config_reference.page(), "run `python -m scripts.config_reference`"


def test_every_key_is_there_and_has_a_meaning():
    page = config_reference.page()
    headings = {line.removeprefix("### `").removesuffix("`") for line in page.splitlines() if line.startswith("### ")}
    assert headings == {key for key, *_ in describe(TrainConfig)}
    missing = []
    for prefix, cls in config_reference.sections(TrainConfig):
        said = config_reference.meanings(cls)
        for field in dataclasses.fields(cls):
            nested = any(issubclass(inner, Section) for inner, _ in config_reference._inner(hints(cls)[field.name]))
            missing += [f"{prefix}.{field.name}"] if field.name not in said and not nested else []
    assert not missing
