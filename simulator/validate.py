"""`semmoe validate`: the accuracy table on public measurements that the cost model was not fitted to.

    semmoe validate                       all rows; data from ../shared/data/perfdata beside the checkout
    semmoe validate data=DIR              all rows, data from another folder with the same files
    semmoe validate data=FILE             one CSV file of NCCL, DeepEP, fused-MoE or attention rows, told by its columns
    semmoe validate anchors=update        renew results/validate.json and results/validate.md

The table is compared with results/validate.json: a regression gives exit status 1, a drift a warning. A folder or file
that is absent skips its rows and says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from semmoe.errors import UserError, nearest
from semmoe.files import write_atomically

from .validation.collectives import nccl_rows
from .validation.deepep import deepep_rows
from .validation.nulls import null_rows
from .validation.one_file import rows_of_file
from .validation.operators import attention_rows, mixed_rows, moe_rows
from .validation.report import anchors_of, judge, table
from .validation.row import Row
from .validation.vllm_run import vllm_rows

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "perfdata"
ANCHORS, REPORT = ROOT / "results" / "validate.json", ROOT / "results" / "validate.md"
OPTIONS = {"data": "", "anchors": "check"}


def main(argv: Sequence[str]) -> int:
    """Print the table; 1 after a regression against the committed anchors, 0 otherwise."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    options = _options(argv)
    data = Path(options["data"]) if options["data"] else DATA
    if options["data"] and not data.exists():
        raise UserError(f"data={data}: no such folder or file; a folder of the CSV files or one of them is right")
    if not data.is_dir():
        print(table(rows_of_file(data, DATA), {}))
        return 0
    rows, skipped = collect(data)
    text = table(rows, skipped)
    print(text)
    missed = [row for row in rows if row.missed]
    print(f"{sum(bool(row.bars) for row in rows) - len(missed)} rows within their bars, {len(missed)} missed")
    if options["anchors"] == "update":
        if skipped:
            raise UserError(f"anchors=update needs every row; skipped: {', '.join(skipped)}")
        write_atomically(ANCHORS, json.dumps(anchors_of(rows), indent=1) + "\n")
        write_atomically(REPORT, f"{HEAD}\n{text.rstrip()}\n")
        print(f"written: {ANCHORS.relative_to(ROOT)}, {REPORT.relative_to(ROOT)}")
        return 0
    anchors = json.loads(ANCHORS.read_text()) if ANCHORS.exists() else {}
    regressions, drifts = judge(rows, anchors)
    for words in drifts:
        print(f"drift: {words}", file=sys.stderr)
    for words in regressions:
        print(f"REGRESSION: {words}", file=sys.stderr)
    return 1 if regressions else 0


def collect(data: Path) -> tuple[list[Row], dict[str, str]]:
    """All rows that the folder's files allow, and why the others are skipped."""
    served = [f"llmservingsim_rtxpro6000_qwen3_30b_{name}.csv" for name in SERVED]
    parts: list[tuple[str, list[str], Callable[..., list[Row]]]] = [
        ("NCCL", ["nccl_intranode.csv"], nccl_rows),
        ("DeepEP", ["deepep_low_latency.csv", "deepep_normal.csv"], deepep_rows),
        ("fused MoE", ["moe_fused_qwen3_30b_a3b.csv", served[0]], moe_rows),
        ("attention GQA", ["attention_gqa_32q4kv_hd128_bf16.csv"], lambda path: attention_rows("gqa", path)),
        ("attention MLA", ["attention_mla_16heads_bf16.csv"], lambda path: attention_rows("mla", path)),
        ("attention, mixed", [served[3]], mixed_rows),
        ("vLLM run", ["nccl_intranode.csv", *served], lambda *_: vllm_rows(data)),
        ("null results", [], null_rows),
    ]
    rows: list[Row] = []
    skipped = {}
    for what, files, make in parts:
        absent = [name for name in files if not (data / name).is_file()]
        if absent:
            skipped[what] = f"{', '.join(absent)} not in {data.name or data}"
            continue
        rows += make(*(data / name for name in files))
    return rows, skipped


SERVED = ("moe", "dense", "per_sequence", "attention", "dp2ep2_vllm_requests", "dp2ep2_vllm_timeseries")
HEAD = """# Accuracy of the cost model

Made by `semmoe validate anchors=update` (`python -m simulator.validate anchors=update`); `semmoe validate` checks it.

Percent unless a row says otherwise. "Held out": the model saw every other size, token count or length (and the edges),
and is scored at those in between. Data: NCCL, DeepEP, fused MoE and attention tables of ai-dynamo/aiconfigurator@095f58a5
(Apache-2.0); operator tables and the vLLM run of casys-kaist/LLMServingSim@5daddb21 (MIT).

What is not quite held out: the form of the NCCL curve (multiples of floor + bytes / bandwidth, in logarithms) was chosen
among five on these very files, hence the row with the other half of the sizes; the form of DeepEP's law (which terms, and
the power by which the narrowest link rules) among a dozen, on all token counts; the two host times of the vLLM run were
read off its own time series and first tokens, hence the rows without them and with other values. Nothing else was tuned.
"""


def _options(argv: Sequence[str]) -> dict[str, str]:
    options = dict(OPTIONS)
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or key not in options:
            raise UserError(
                f"'{word}' is no option{nearest(key, options)}; options are data=DIR|FILE and anchors=update"
            )
        options[key] = value
    if options["anchors"] not in ("check", "update"):
        raise UserError(f"anchors={options['anchors']} must be check or update")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"validate: {error}", file=sys.stderr)
        sys.exit(2)
