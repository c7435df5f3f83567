"""Rows of the benchmarks: percentiles, ratios where all variants of a case are right, and the spread of whole repeats.

A row: case, variant, mode, repeat, p10_us .. p99_us, correct, error, reason (of a skip), environment. Of virtual ranks also
moved_bytes, copy_share (of the bandwidth of one large copy, measured in the same run), speedup over the baseline, bar; between
ranks: ranks, tokens, ours_speedup (this variant's time over that of ours), busbw_gbps (nccl-tests' convention), link_share
(of the bandwidth of one large peer copy). p50_spread: (largest - smallest) / mean of the p50_us of all repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import Case
    from .ranks import RankSizes, Timed

PERCENTILES = (10, 50, 90, 99)
KEY = ("case", "variant", "mode", "ranks", "tokens")  # what the repeats of a row have in common


def add_ratios(rows: list[dict[str, Any]], case: Case, copy_gbps: float | None) -> None:
    """copy_share and speedup (medians of one mode), and whether the bar is met: of the cold rows, shares need memory."""
    for row in rows:
        if "p50_us" not in row:
            continue
        if case.moved_bytes and copy_gbps:
            row["moved_bytes"] = case.moved_bytes
            row["copy_share"] = case.moved_bytes / row["p50_us"] / 1e3 / copy_gbps
        if case.bar is None or row["mode"].startswith("eager"):  # bars are about kernels, not about launching them
            continue
        if case.bar.kind == "speedup":
            same = [r for r in rows if r["variant"] == case.bar.baseline and r["mode"] == row["mode"] and "p50_us" in r]
            if not same:  # the library reads the device in between, so that no graph can hold it
                continue
            row["speedup"] = same[0]["p50_us"] / row["p50_us"]
        reached = row["copy_share" if case.bar.kind == "share" else "speedup"]
        row |= {"bar_kind": case.bar.kind, "bar": case.bar.value, "bar_met": reached >= case.bar.value}


def timed_rows(
    timed_G: Sequence[Timed], sizes: RankSizes, link_gbps: float | None, about: dict[str, str]
) -> list[dict[str, Any]]:
    """Rows of one case: the slowest rank of every round, then percentiles; ratios only where all variants are right."""
    first, ranks = timed_G[0], len(timed_G)
    base = {"case": f"ranks_{first.case}", "ranks": ranks, "tokens": sizes.tokens, **about}
    rows: list[dict[str, Any]] = [
        {**base, "variant": name, "mode": "skipped", "correct": True, "reason": reason}
        for name, reason in first.skipped.items()
    ]
    for name, error in first.error.items():
        known = {**base, "variant": name, "correct": error is None, "error": error}
        modes = [mode for variant, mode in first.us if variant == name]
        if not modes:
            rows.append({**known, "mode": "dry_run" if not sizes.rounds else "not_timed"})
        for mode in modes:
            slowest = [max(round_G) for round_G in zip(*(timed.us[name, mode] for timed in timed_G), strict=True)]
            rows.append({**known, "mode": mode, **summary(slowest)})
    ours = {row["mode"]: row["p50_us"] for row in rows if row["variant"] == "ours" and "p50_us" in row}
    for row in rows if all(row["correct"] for row in rows) else ():
        if row["mode"] in ours:
            row["ours_speedup"] = row["p50_us"] / ours[row["mode"]]
        if link_gbps and "p50_us" in row:
            row["port_bytes"] = first.port_bytes[row["variant"]]
            row["busbw_gbps"] = row["port_bytes"] / row["p50_us"] / 1e3
            row["link_share"] = row["busbw_gbps"] / link_gbps
    return rows


def between(row: dict[str, Any]) -> dict[str, Any]:
    """What differs in the environment of a row of real ranks; nothing in that of virtual ones."""
    if "transport" not in row:
        return {}
    mode = "eager, two CPU processes" if row["transport"] == "shared" else "one rank a GPU"
    return {"transport": row["transport"], "kernel_path": row["kernel_path"], "ranks": row.get("ranks"), "mode": mode}


def summary(times_us: Sequence[float]) -> dict[str, Any]:
    """Percentiles, and the times themselves."""
    ordered = sorted(times_us)
    ranks = {p: min(round(p / 100 * (len(ordered) - 1)), len(ordered) - 1) for p in PERCENTILES}
    return {f"p{p}_us": ordered[at] for p, at in ranks.items()} | {
        "iterations": len(ordered),
        "times_us": list(times_us),
    }


def add_spread(rows: Sequence[dict[str, Any]]) -> None:
    """p50_spread of every timed row that was repeated. Worked example: p50_us 9 and 11 -> 0.2."""
    medians: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        if "p50_us" in row:
            medians[_key(row)].append(row["p50_us"])
    for row in rows:
        same = medians[_key(row)]
        if len(same) > 1:
            row["p50_spread"] = (max(same) - min(same)) / mean(same)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in KEY)


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """The row as it is written; its raw times go to a file of their own."""
    return {name: value for name, value in row.items() if name != "times_us"}


def raw_times(row: dict[str, Any]) -> dict[str, Any]:
    """Line of the file of raw times: microseconds of every iteration, of the slowest rank."""
    known = {name: row[name] for name in (*KEY, "repeat") if name in row}
    return known | {"times_us": [round(us, 3) for us in row["times_us"]]}


def sentence(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    head = f"{row['case']:26} {row['variant']:20} {row['mode']:11}"
    if not row["correct"]:
        return f"{head} WRONG: {row['error']}"
    if "reason" in row:
        return f"{head} {row['reason']}"
    if "p50_us" not in row:
        return f"{head} correct, not timed"
    text = f"{head} {row['p50_us']:9.1f} us (p10 {row['p10_us']:.1f}, p99 {row['p99_us']:.1f})"
    if "copy_share" in row:
        text += f", {row['copy_share']:.0%} of copy bandwidth"
    if "link_share" in row:
        text += f", {row['busbw_gbps']:.0f} GB/s bus, {row['link_share']:.0%} of a peer copy"
    if "ours_speedup" in row:
        text += f", ours {row['ours_speedup']:.2f}x as fast"
    if "speedup" in row:
        text += f", {row['speedup']:.2f}x"
    if "p50_spread" in row:
        text += f", repeats spread by {row['p50_spread']:.0%}"
    if "bar" in row:
        text += f", bar {row['bar']:g} {'met' if row['bar_met'] else 'missed'}"
    return text
