"""A report in headless Chromium: its figures are drawn, and it asks no network for anything."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from corral.tools.report import write_report
from written_runs import config, evaluated, result, write_run

pytest.importorskip("plotly")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 120.0
NOBODY = "not an origin"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


def browse(page: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """Return the page that its scripts have made, without the scripts, and the URLs that it asked the network for."""
    log = tmp_path / "net.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [str(CHROMIUM), *options, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    parameters = [event.get("params", {}) for event in events]
    # Only requests name who asked. What the browser asks for itself, such as its updates, has no page as its origin.
    asked = [found["url"] for found in parameters if "url" in found and found.get("initiator", NOBODY) != NOBODY]
    drawn = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
    return drawn, [url for url in asked if urlsplit(url).scheme in ("http", "https", "ws", "wss")]


@pytest.mark.slow
def test_figures_are_drawn_without_a_network(tmp_path: Path) -> None:
    for seed in range(3):
        rows = [evaluated(result(i, float(i + seed)), float(i)) for i in range(1, 6)]
        write_run(tmp_path / "set" / f"seed-{seed}", results=rows, settings=config(seed))
    page = write_report(tmp_path / "set", tmp_path / "report.html")
    drawn, urls = browse(page, tmp_path)
    open_figures = 2 + 2 + 1 + 1 + 3 + 1  # returns, evaluation, rounds, a loss, times, shares
    assert drawn.count("plot-container") == open_figures
    assert "Mean return in training" in drawn
    assert "Download plot as a PNG" in drawn
    assert "Share chart" not in drawn  # a button of plotly.js that sends the data away
    assert urls == []


@pytest.mark.slow
def test_closed_figures_are_drawn_when_they_are_opened_and_the_page_forbids_requests(tmp_path: Path) -> None:
    rows = [{**result(i, 1.0), "mine": float(i)} for i in (1, 2)]
    page = write_report(write_run(tmp_path / "run", results=rows), tmp_path / "report.html")
    html = page.read_text(encoding="utf-8")
    closed, opened = tmp_path / "closed.html", tmp_path / "opened.html"
    asks = '<img src="http://127.0.0.1:9/picture.png"><video src="http://127.0.0.1:9/video.mp4"></video>'
    opens = "<script>for (const block of document.querySelectorAll('details')) block.open = true;</script>"
    closed.write_text(html.replace("</body>", f"{asks}</body>"), encoding="utf-8")
    opened.write_text(html.replace("</body>", f"{opens}</body>"), encoding="utf-8")
    drawn, urls = browse(closed, tmp_path)
    assert urls == []
    all_drawn, _ = browse(opened, tmp_path)
    assert all_drawn.count("plot-container") == html.count('class="figure"') > drawn.count("plot-container")


def test_a_request_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<p>text<img src="http://127.0.0.1:9/picture.png">', encoding="utf-8")
    _, urls = browse(page, tmp_path)
    assert "http://127.0.0.1:9/picture.png" in urls
