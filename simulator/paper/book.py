"""Book: the rows of `experiment=paper/*`, made once; Page: what is written of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from omegaconf import OmegaConf

from semmoe.bars import progress
from semmoe.builder import RunBuilder
from semmoe.config import compose_all, conf_dir, sweep_points
from semmoe.files import write_atomically
from semmoe.results import COLUMNS
from semmoe.run import Run

from ..app import simulate

Table = Any  # a pandas DataFrame or one of its rows, whose stubs do not know columns as attributes
HEAVY = ("model", "cluster")  # groups that Hydra composes
SMALL = ("flow", "dispatcher", "placement", "predictor", "replica_router", "request_scheduler", "token_scheduler")
POLICIES = ["flow", "dispatcher", "placement", "request_scheduler", "token_scheduler"]
KEPT = ["model", "cluster", "ep_size", "slots", "batch_tokens", "rate_rps", *POLICIES, "predictor", "trace", "lar_replayed",
        "fan_out_replayed", "imbalance_step", "active_experts", "dispatch_ms", "experts_ms", "combine_ms", "srs_ms", "sag_ms",
        "layer_ms", "step_ms", "ttft_ms", "ttft_ms_p99", "tpot_ms", "e2e_ms", "e2e_ms_p50", "throughput_rps", "tokens",
        "config_id", "provenance"]  # fmt: skip
NUM_EXPERTS = {"deepseek-v2-lite": 64, "moonlight-16b-a3b": 64, "qwen3-30b-a3b": 128}


@dataclass(frozen=True, eq=False)
class Page:
    """One figure or table: Markdown text and the long table behind it. verdict: one plain sentence on agreement."""

    name: str
    title: str
    text: str
    table: Table
    verdict: str


@dataclass(eq=False)
class Book:
    """extra: overrides for every experiment, which replace the values of its sweep."""

    extra: Sequence[str] = ()
    builder: RunBuilder = field(default_factory=RunBuilder)

    def rows(self, experiment: str) -> Table:
        """Simulated rows of experiment=paper/EXPERIMENT; axes that a flow lacks make no second row."""
        return table_of([simulated(run) for run in self.runs(experiment)])

    def runs(self, experiment: str) -> Iterator[Run]:
        """The runs of experiment=paper/EXPERIMENT, each built when its turn comes; one for every config id."""
        configs, seen = list(self._configs(f"paper/{experiment}")), set()
        with progress(len(configs), experiment) as bar:
            for config in configs:
                run = self.builder.build(config)
                if run.config_id not in seen:
                    seen.add(run.config_id)
                    yield run
                bar.update()

    def _configs(self, experiment: str) -> Iterator[dict[str, Any]]:
        """What compose_all gives, with each model and cluster composed once: small groups are put in from their files."""
        tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / f"experiment/{experiment}.yaml"))
        bases: dict[tuple[str, ...], dict[str, Any]] = {}
        for point in sweep_points(tree["sweep"], self.extra):
            words = [word.lstrip("+").split("=", 1) for word in point]
            heavy = tuple(f"{key}={value}" for key, value in words if key in HEAVY)
            if heavy not in bases:
                (bases[heavy],) = compose_all([f"experiment={experiment}", "sweep=[]", *heavy, *self.extra])
            config = copy.deepcopy(bases[heavy])
            for key, value in words:
                group, _, name = key.partition(".")
                if name:
                    config[group][name] = yaml.safe_load(value)
                elif key in SMALL:
                    config[key] = yaml.safe_load((conf_dir() / key / f"{value}.yaml").read_text(encoding="utf-8"))
                elif key not in HEAVY:
                    config[key] = yaml.safe_load(value)
            yield config


def simulated(run: Run) -> dict[str, Any]:
    """A run's row, with the length that its prompts are cut to."""
    return simulate(run) | {"max_prompt": run.cfg["workload"].get("max_prompt")}


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    return pd.DataFrame(list(rows), columns=[*COLUMNS, "max_prompt"])


NAMES = {
    "mo_etuner": "moetuner",
    "semantic_request": "semantic",
    "no_shuffle": "none",
    "round_robin": "none",
    "-": "none",
}


def policy_name(row: Table) -> str:
    """What a reader calls a configuration's policies."""
    placement = NAMES.get(row.placement, row.placement)
    scheduler = row.request_scheduler if row.flow == "dp" else row.token_scheduler
    scheduler = NAMES.get(scheduler, scheduler)
    if row.flow == "tp_replicated":
        return "two all-reduces" if placement == "contiguous" else f"two all-reduces ({placement})"
    if placement == "contiguous" and scheduler == "none":
        return "vanilla"
    if placement == "sem_moe":
        return "Sem-MoE as published"
    if row.slots > NUM_EXPERTS.get(row.model, row.slots):
        placement += f" {row.slots} slots"
    return str(placement) if scheduler == "none" else f"{placement} + {scheduler}"


def write(page: Page, folder: Path, command: str) -> None:
    text = f"# {page.title}\n\nMade by `{command}`; the numbers are in `{page.name}.csv`.\n\n{page.text}\n\n{page.verdict}\n"
    write_atomically(folder / f"{page.name}.md", text)
    write_atomically(folder / f"{page.name}.csv", page.table.to_csv(index=False, float_format="%.5g"))


def named(rows: Table) -> Table:
    """The rows with a column `policy`."""
    return rows.assign(policy=[policy_name(row) for _, row in rows.iterrows()])


def kept(rows: Table) -> Table:
    """The columns that a reader of the CSV wants, empty ones left out."""
    return rows[[name for name in KEPT if name in rows and rows[name].notna().any()]]


def markdown(table: Table) -> str:
    """A Markdown table; numbers are expected to be formatted already."""
    lines = ["| " + " | ".join(map(str, table.columns)) + " |", "|" + " --- |" * len(table.columns)]
    lines += [
        "| " + " | ".join("" if pd.isna(v) else str(v) for v in row) + " |" for row in table.itertuples(index=False)
    ]
    return "\n".join(lines)
