"""The report: every figure is there, hostile names are harmless, nothing is fetched, and a browser shows it without errors."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from compare_rows import measured, row

from semmoe.compare import compare
from semmoe.errors import UserError
from semmoe.report import write_report
from semmoe.report.figures import FIGURES
from semmoe.results import write_row

HOSTILE = ("<script>alert(1)</script>", "$\\frac{$ & \"quoted\", 'name'", "</svg>]]><b>\x07\nline two {{TITLE}}")
SERVED = {"ttft_ms": 50.0, "tpot_ms": 5.0, "e2e_ms": 300.0}
COLOURS = {"#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#f0e442", "#cc79a7"}  # Okabe and Ito


def fill(folder):
    rows = [row(**SERVED), *measured("aaa", [10.0, 11.0], **SERVED)]
    for i, name in enumerate(HOSTILE):
        rows += [row(config=f"h{i}", placement=name), *measured(f"h{i}", [9.0 - 3 * i, 9.5 - 3 * i], placement=name)]
    rows.append(row(config="alone", placement="eplb", layer_ms=7.0))
    for one in rows:
        write_row(folder, one)
    return compare([folder])


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "new" / "report.html"
    write_report(comparison, path, "title & <b>", "semmoe compare 'x'")
    return path


class Checker(HTMLParser):
    """Holds the page to balanced tags, and collects ids, scripts, text and who refers to what."""

    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self):
        super().__init__()
        self.stack, self.ids, self.refers, self.scripts, self.text = [], [], [], 0, []

    def handle_starttag(self, tag, attrs):
        self.note(attrs)
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.note(attrs)

    def note(self, attrs):
        for name, value in attrs:
            self.ids += [value] if name == "id" else []
            self.refers += value.split() if name == "aria-labelledby" else []
            self.refers += [value[1:]] if name in ("href", "xlink:href") and value.startswith("#") else []
            self.refers += re.findall(r"url\(#([^)]+)\)", value or "")

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(text):
    checker = Checker()
    checker.feed(text)
    return checker


def test_page_is_well_formed_with_every_figure_once(page):
    checker = read(page.read_text())
    assert checker.stack == [] and len(checker.ids) == len(set(checker.ids))
    assert set(FIGURES) <= set(checker.ids)
    assert set(checker.refers) <= set(checker.ids), "a figure refers to an id that another figure owns or nobody"
    assert checker.scripts == 1, "a policy's name became a script"


def test_the_check_of_the_page_sees_a_broken_one(page):
    with pytest.raises(AssertionError):
        read(page.read_text().replace("</figure>", "", 1))
    hurt = page.read_text().replace("&lt;script&gt;alert(1)&lt;/script&gt;", "<script>alert(1)</script>")
    assert read(hurt).scripts > 1


def test_title_command_environment_and_verdicts_are_told(page):
    text = " ".join(read(page.read_text()).text)
    for told in ("title & <b>", "semmoe compare 'x'", "cores 2", "1.5 to 1.5", "commit", "abc", "local (content d)", "t.npz",
                 "faster than the baseline", "no gain here", "baseline", "simulated only", HOSTILE[0], HOSTILE[1]):  # fmt: skip
        assert told in text, told
    assert "{{TITLE}}" in text, "a name was taken for a place of the template"


@pytest.mark.parametrize("name", FIGURES)
def test_figure_stands_beside_the_page_and_says_what_it_shows(page, name):
    assert (page.parent / "figures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    svg = (page.parent / "figures" / f"{name}.svg").read_text()
    root = ElementTree.fromstring(svg)
    names = {child.tag.split("}")[1]: child.text for child in root}
    assert names["title"] == FIGURES[name].heading and len(names["desc"]) > 60 and root.get("role") == "img"
    assert COLOURS & set(re.findall(r"#[0-9a-f]{6}", svg)), "no colour of the palette"
    assert svg.split("?>\n", 1)[1] in page.read_text(), "page and file differ"


@pytest.mark.parametrize(("name", "labels"), [
    ("latency", ["layer latency (ms)", "predicted", "measured"]), ("parity", ["measured layer latency (ms)", "within 20 %"]),
    ("phases", ["time of a phase (ms)", "dispatch", "experts"]), ("locality", ["planned", "replayed", "measured"]),
    ("per_layer", ["MoE layer", "local activation rate"]), ("imbalance", ["busiest rank / mean (1: balanced)"]),
    ("gain", ["time saved against the better baseline (%)", "faster"]), ("served", ["TTFT (ms)", "E2E (ms)"]),
    ("fan_out", ["fan-out (distinct remote ranks a token)"]),
])  # fmt: skip
def test_axes_and_series_are_labelled_with_units(page, name, labels):
    root = ElementTree.parse(page.parent / "figures" / f"{name}.svg").getroot()
    texts = {"".join(element.itertext()) for element in root.iter() if element.tag.endswith("}text")}
    assert set(labels) <= texts


def test_bars_are_as_long_as_their_values(comparison):
    figure = FIGURES["latency"].draw(comparison)
    axes = figure.axes[0]
    predicted, real = (list(bars) for bars in [c for c in axes.containers if hasattr(c, "patches")])
    table = comparison.table
    assert [b.get_width() for b in predicted] == table.layer_ms_predicted.tolist()
    assert [b.get_width() for b in real] == pytest.approx(table.layer_ms_measured.tolist(), nan_ok=True)


def test_nothing_is_fetched_from_a_network(page):
    for path in (page, *(page.parent / "figures").glob("*.svg")):
        text = re.sub(r'xmlns(:\w+)?="[^"]+"', "", path.read_text())
        assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text), path.name
        assert not re.search(r"@import|<iframe|<object|<embed|fetch\(|XMLHttp|<!DOCTYPE svg", text), path.name


def test_one_side_alone_gives_a_report_and_clears_figures_of_an_older_one(tmp_path):
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / "parity.png").write_text("old")
    write_row(tmp_path, row())
    write_report(compare([tmp_path]), tmp_path / "report.html", "t", "c")
    assert not (folder / "parity.png").exists() and (folder / "latency.png").exists()
    assert 'id="parity"' not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("when", ["replace", "fsync"])
def test_a_full_disk_leaves_the_old_report_whole(comparison, tmp_path, monkeypatch, when):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os." + when, full)
    with pytest.raises(UserError, match="No space left"):
        write_report(comparison, path, "t", "c")
    assert path.read_text() == "old" and not list(tmp_path.rglob("*.partial"))


def test_two_clusters_do_not_mix_their_rows(tmp_path):
    for cluster, ms in (("local", 4.0), ("h100x8", 40.0)):
        write_row(tmp_path, row(cluster=cluster, dispatch_ms=ms, experts_ms=None))
    figure = FIGURES["phases"].draw(compare([tmp_path]))
    widths = sorted(bar.get_width() for bars in figure.axes[0].containers for bar in bars)
    assert widths == [4.0, 40.0]


def test_matplotlib_is_loaded_only_when_something_is_drawn():
    code = ("import sys, semmoe.cli, semmoe.session, semmoe.compare, semmoe.report, semmoe.report.terminal\n"
            "assert 'matplotlib' not in sys.modules\n"
            "from semmoe.report.draw import subplots\nsubplots()\n"
            "import matplotlib\nassert matplotlib.get_backend().lower() == 'agg'")  # fmt: skip
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


PROBE = """
window.onerror = (message) => { document.title = "ERROR " + message; };
addEventListener("load", async () => {
  let copied = "";
  Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => { copied = text; } } });
  const drawn = [...document.querySelectorAll("figure svg")].filter((s) => s.getBoundingClientRect().height > 50).length;
  const heads = [...document.querySelectorAll("#results th[data-name]")];
  const at = heads.findIndex((h) => h.dataset.name === "layer measured (ms)");
  const column = () => [...document.getElementById("results").tBodies[0].rows].map((r) => r.cells[at].dataset.v ?? "-");
  heads[at].querySelector("button").click();
  const up = column();
  heads[at].querySelector("button").click();
  document.getElementById("copy").click();
  await new Promise((done) => setTimeout(done, 50));
  const sorted = heads[at].getAttribute("aria-sort");
  document.body.dataset.probe = JSON.stringify({ drawn, up, down: column(), sorted, copied });
});
"""


def dump(page_text, folder):
    """(DOM, standard error) of headless Chromium after the page has loaded; skips where there is no Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    path = folder / "probed.html"
    path.write_text(page_text.replace("</head>", f"<script>{PROBE}</script></head>", 1))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'profile'}",
             "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom"]  # fmt: skip
    done = subprocess.run([browser, *flags, path.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr


def test_a_browser_shows_sorts_and_copies_without_errors(page, comparison, tmp_path):
    shown, log = dump(page.read_text(), tmp_path)
    assert "<title>ERROR" not in shown and "CONSOLE" not in log
    probe = json.loads(unescape(re.search(r'data-probe="([^"]*)"', shown)[1]))
    assert probe["drawn"] == len(FIGURES) and probe["sorted"] == "descending"
    known = sorted(comparison.table.layer_ms_measured.dropna())
    assert [float(v) for v in probe["up"][:-1]] == known and [float(v) for v in probe["down"][:-1]] == known[::-1]
    assert probe["up"][-1] == probe["down"][-1] == "-", "what was not measured does not stay last"
    lines = list(csv.DictReader(io.StringIO(probe["copied"])))
    assert {line["placement"] for line in lines} == set(comparison.table.placement)
    assert {line["layer measured (ms)"] for line in lines} == {"", *map(str, known)}


def test_the_browser_check_sees_a_script_that_fails(page, tmp_path):
    shown, log = dump(page.read_text().replace('"use strict";', '"use strict"; missing_function();', 1), tmp_path)
    assert "<title>ERROR" in shown or "CONSOLE" in log
