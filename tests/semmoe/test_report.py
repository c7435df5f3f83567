"""The report: every figure is there, hostile names are harmless, nothing is fetched, and a browser shows it without errors."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import browser
from compare_rows import measured, row

from semmoe.compare import compare
from semmoe.errors import UserError
from semmoe.report import write_report
from semmoe.report.catalog import FIGURES
from semmoe.report.embed import themed
from semmoe.row_files import write_row

HOSTILE = ("<script>alert(1)</script>", "$\\frac{$ & \"quoted\", 'name'", "</svg>]]><b>\x07\nline two {{TITLE}}")
SERVED = {"ttft_ms": 50.0, "tpot_ms": 5.0, "e2e_ms": 300.0}
COLOURS = {"#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#f0e442", "#cc79a7"}  # Okabe and Ito


def fill(folder):
    rows = [row(**SERVED), *measured("aaa", [10.0, 11.0], **SERVED)]
    for i, name in enumerate(HOSTILE):
        rows += [row(config=f"h{i}", placement=name), *measured(f"h{i}", [9.0 - 3 * i, 9.5 - 3 * i], placement=name)]
    rows.append(row(config="alone", placement="eplb", layer_ms=7.0))
    rows += [row(config="large", batch_tokens=4096), *measured("large", [40.0, 41.0], batch_tokens=4096)]
    for rate, ttft_ms in ((10.0, 40.0), (20.0, 90.0)):
        serve = {
            "workload": "serve",
            "rate_rps": rate,
            "batch_tokens": None,
            "throughput_rps": 0.9 * rate,
            "slo_ttft_ms": 60.0,
        }
        rows.append(row(config=f"rate{rate}", layer_ms=None, ttft_ms=ttft_ms, ttft_ms_p90=2 * ttft_ms, **serve))
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
    assert name == "pair_traffic" or COLOURS & set(re.findall(r"#[0-9a-f]{6}", svg)), "no colour of the palette"
    assert themed(svg.split("?>\n", 1)[1]) in page.read_text(), "page and file differ beyond what follows the ground"


@pytest.mark.parametrize(("name", "labels"), [
    ("latency", ["layer latency (ms)", "predicted", "measured"]), ("parity", ["measured layer latency (ms)", "within 20 %"]),
    ("phases", ["time of a phase (ms)", "dispatch", "experts"]), ("locality", ["planned", "replayed", "measured"]),
    ("per_layer", ["MoE layer", "local activation rate"]), ("imbalance", ["busiest rank / mean (1: balanced)"]),
    ("gain", ["time saved against the better baseline (%)", "faster"]), ("served", ["TTFT (ms)", "E2E (ms)"]),
    ("fan_out", ["fan-out (distinct remote ranks a token)"]), ("pair_traffic", ["home rank", "kB a step", "40"]),
    ("step_timeline", ["time since the first MoE layer began (ms, predicted)", "dispatch"]),
    ("batch_sizes", ["tokens a rank in a batch", "exchange (% of an MoE layer)"]),
    ("rates", ["finished requests a second", "TTFT, 90th percentile (ms)", "SLO 60 ms"]),
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
    assert [b.get_width() for b in predicted] == pytest.approx(table.layer_ms_predicted.tolist(), nan_ok=True)
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


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


DRAWN = "[...document.querySelectorAll('figure svg')].filter(s => s.getBoundingClientRect().height > 50).length"
WIDER = "document.documentElement.scrollWidth - innerWidth"
MODES = [("screen", "light", 1280), ("screen", "dark", 400), ("print", "light", 800)]


@pytest.mark.parametrize(("media", "scheme", "width"), MODES)
def test_a_browser_draws_every_figure_without_errors(page, chromium, media, scheme, width):
    chromium.open(page, width, media, scheme)
    assert chromium.evaluate(DRAWN) == len(FIGURES)
    assert chromium.console == []
    assert chromium.evaluate(WIDER) <= 0, "the page scrolls sideways"
    if media == "print":  # what scrolls on a screen would be cut on paper
        wide = "[...document.querySelectorAll('table, figure svg')].filter(e => e.getBoundingClientRect().right > innerWidth)"
        assert chromium.evaluate(f"{wide}.map(e => e.id || e.closest('section').id)") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_of_page_and_figures_stands_out_from_the_ground(page, chromium, scheme):
    chromium.open(page, scheme=scheme)
    ground = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    inks = chromium.evaluate(
        "[...new Set([...document.querySelectorAll('.figure:not(#pair_traffic) svg text')].map(t => getComputedStyle(t).fill)),"
        "...['.about', '#verdict .headline', '#verdict dd', 'figcaption', 'td.n', 'td.missing'].map("
        "s => getComputedStyle(document.querySelector(s)).color)]"
    )
    assert len(inks) > 5 and min(contrast(ink, ground) for ink in inks) >= 4.5  # WCAG 2.1, 1.4.3


def contrast(one, other):
    """WCAG contrast ratio of two colours "rgb(r, g, b)"."""
    light = []
    for colour in (one, other):
        parts = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_tables_sort_from_the_keyboard_and_copy_as_csv(page, comparison, chromium):
    chromium.open(page)
    column = (
        "(() => { const heads = [...document.querySelectorAll('#results th[data-name]')];"
        "const at = heads.findIndex(h => h.dataset.name === 'layer measured (ms)'); {} })()"
    )
    press = "heads[at].querySelector('button').focus()"
    look = "return [...document.getElementById('results').tBodies[0].rows].map(r => r.cells[at].dataset.v ?? '-')"
    known = sorted(comparison.table.layer_ms_measured.dropna())
    unknown = len(comparison.table) - len(known)
    for expected in (known, known[::-1]):
        chromium.evaluate(column.replace("{}", press))
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        chromium.call("Input.dispatchKeyEvent", type="keyDown", **key)
        chromium.call("Input.dispatchKeyEvent", type="keyUp", **key)
        shown = chromium.evaluate(column.replace("{}", look))
        assert [float(v) for v in shown[:-unknown]] == expected
        assert set(shown[-unknown:]) == {"-"}, "what was not measured does not stay last"
    copied = chromium.evaluate(
        "new Promise(done => { Object.defineProperty(navigator, 'clipboard', { value: { writeText: async t => done(t) } });"
        "document.querySelector('button.copy[data-table=results]').click(); })"
    )
    lines = list(csv.DictReader(io.StringIO(copied)))
    assert {line["placement"] for line in lines} == set(comparison.table.placement)
    assert {line["layer measured (ms)"] for line in lines} == {"", *map(str, known)}


def test_the_browser_check_sees_a_script_that_fails(page, chromium, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace('"use strict";', '"use strict"; missing_function();', 1))
    chromium.open(broken)
    assert "missing_function" in chromium.console[0]
