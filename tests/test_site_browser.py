"""Every page of the site in headless Chromium, as on a desk and a phone: it fits, is legible, and has its pictures."""

import os
import pathlib
import subprocess

import pytest

from scripts import chromium

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.CHROMIUM is None, reason=chromium.ABSENT),
    pytest.mark.skipif(not (ROOT / ".venv-docs").is_dir(), reason="no .venv-docs; bash scripts/site.sh makes it"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [ROOT / ".venv-docs/bin/python", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, False), (390, True), (1280, True)])
def test_every_page_fits_its_window_and_is_legible(site, tmp_path, width, dark):
    seen = chromium.look_at_site(site, tmp_path, width=width, dark=dark)
    assert len(seen) > 60
    assert min(page["texts"] for page in seen.values()) > 5
    for page, found in seen.items():
        assert (page, found["content"], found["wide"], found["faint"], found["broken"]) == (page, width, [], [], [])


def test_what_is_too_wide_faint_or_broken_is_seen(tmp_path):
    """Otherwise the test above could not fail."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text(
        '<!DOCTYPE html><article><p style="width: 600px">wide</p><p style="color: #777">faint</p>'
        '<div style="overflow-x: auto"><p style="width: 600px">scrolls</p></div><img src="gone.png" alt=""></article>'
    )
    found = chromium.look_at_site(site, tmp_path, width=390)["index.html"]
    assert found["texts"] == 3
    assert [text.split(">")[1] for text in found["wide"]] == ["wide</p"]
    assert [text.split(" ")[0] for text in found["faint"]] == ["4.5"]
    assert [url.rpartition("/")[2] for url in found["broken"]] == ["gone.png"]
