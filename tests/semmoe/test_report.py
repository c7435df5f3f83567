"""The report: every figure is there, hostile names are harmless, nothing is fetched, and a browser shows it without errors."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from compare_rows import measured, row

from semmoe.compare import compare
from semmoe.report import write_report
from semmoe.report.figures import FIGURES
from semmoe.results import write_row

PROBE = """
window.onerror = (message) => { document.title = "ERROR " + message; };
addEventListener("load", () => {
  const head = document.querySelectorAll("th")[1];
  head.click();
  const drawn = [...document.querySelectorAll("figure svg")].filter((s) => s.getBoundingClientRect().height > 50).length;
  const rows = document.getElementById("results").tBodies[0].rows.length;
  document.body.dataset.probe = `drawn=${drawn} sorted=${head.getAttribute("aria-sort")} rows=${rows}`;
});
"""
SERVED = {"ttft_ms": 50.0, "tpot_ms": 5.0, "e2e_ms": 300.0}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    hostile = {"placement": "<script>alert(1)</script>"}
    rows = [row(**SERVED), row(config="bbb", **hostile), *measured("aaa", [10.0, 11.0], **SERVED)]
    for one in [*rows, *measured("bbb", [9.0], **hostile)]:
        write_row(folder, one)
    path = folder / "report.html"
    write_report(compare([folder]), path, "title & <b>", "semmoe compare 'x'")
    return path


class Checker(HTMLParser):
    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self):
        super().__init__()
        self.stack, self.ids, self.scripts = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.ids += [v for k, v in attrs if k == "id"]
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [v for k, v in attrs if k == "id"]

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_page_is_well_formed_with_every_figure_once(page):
    checker = Checker()
    checker.feed(page.read_text())
    assert checker.stack == [] and len(checker.ids) == len(set(checker.ids))
    assert set(FIGURES) <= set(checker.ids)
    assert checker.scripts == 1, "a policy's name became a script"


def test_figures_stand_beside_the_page_as_svg_and_png(page):
    for name in FIGURES:
        assert (page.parent / "figures" / f"{name}.png").stat().st_size > 2000
        assert "<svg" in (page.parent / "figures" / f"{name}.svg").read_text()


def test_nothing_is_fetched_from_a_network(page):
    text = re.sub(r'xmlns(:\w+)?="[^"]+"', "", page.read_text())
    assert not re.findall(r'(?:src|href|url\()\s*=?\s*["\'(]?https?:', text)


def test_a_browser_shows_it_without_errors(page, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</head>", f"<script>{PROBE}</script></head>", 1))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
             "--enable-logging=stderr", "--dump-dom"]  # fmt: skip
    done = subprocess.run([browser, *flags, probed.as_uri()], capture_output=True, text=True, timeout=120)
    assert f'data-probe="drawn={len(FIGURES)} sorted=ascending rows=2"' in done.stdout
    assert "<title>ERROR" not in done.stdout and "CONSOLE" not in done.stderr
