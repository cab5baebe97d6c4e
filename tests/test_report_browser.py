"""Reports in headless Chromium, at the widths of a desk and of a phone: nothing overflows, fails or is loaded."""

import re

import pytest
from run_cases import quickstart
from train_command import train_command

from jrec.cli import main
from scripts import chromium

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium.CHROMIUM is None, reason=chromium.ABSENT)]
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a run of the command; slices, baselines and curves are in it."""
    folder = tmp_path_factory.mktemp("browser")
    run = train_command(folder, quickstart(folder, rows=3000), "evaluate.group=C3")
    return (run / "report" / "report.html").read_text()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_init_fits_its_window(tmp_path, width):
    data, out = quickstart(tmp_path, rows=600), tmp_path / "first.toml"
    assert main(["init", str(data), "--out", str(out)]) == 0
    (tmp_path / "browser").mkdir()
    seen = chromium.look_at(out.with_suffix(".html").read_text(), tmp_path / "browser", width=width)
    assert (seen.layout["content"], seen.layout["wide"], seen.requests, seen.console) == (width, [], [], [])
    assert len(seen.layout["charts"]) == 2


@pytest.mark.parametrize("width", WIDTHS)
def test_a_report_fits_its_window_and_asks_for_nothing(report, tmp_path, width):
    seen = chromium.look_at(report, tmp_path, width=width)
    assert seen.layout["width"] == width
    assert seen.layout["content"] == width
    assert seen.layout["wide"] == []
    assert seen.layout["resources"] == seen.requests == seen.console == []
    assert len(seen.layout["charts"]) >= 4
    assert min(seen.layout["charts"]) > 300  # texts of 12 of 400 units are legible
    assert (tmp_path / f"{width}.png").stat().st_size > 10_000


def test_a_report_unfolded_fits_a_phone(report, tmp_path):
    seen = chromium.look_at(report.replace("<details>", "<details open>"), tmp_path, width=390)
    assert (seen.layout["content"], seen.layout["wide"]) == (390, [])


def test_a_report_follows_the_readers_choice_of_light_or_dark(report, tmp_path):
    sums = []
    for dark in (False, True):
        (tmp_path / str(dark)).mkdir()
        background = chromium.look_at(report, tmp_path / str(dark), width=390, dark=dark).layout["background"]
        sums.append(sum(map(int, re.findall(r"\d+", background))))
    assert sums[0] > 600
    assert sums[1] < 150


def test_what_is_too_wide_or_asks_the_network_is_seen(tmp_path):
    """Otherwise the tests above could not fail."""
    picture = '<img src="http://127.0.0.1:9/x.png" alt="">'
    text = f'<!DOCTYPE html><body><div style="width: 600px">wide</div>{picture}<script>nothing()</script>'
    seen = chromium.look_at(text, tmp_path, width=390)
    assert seen.layout["content"] == 608
    assert "wide" in seen.layout["wide"][0]
    assert seen.requests == seen.layout["resources"] == ["http://127.0.0.1:9/x.png"]
    assert "nothing is not defined" in seen.console[0]
