"""`semmoe check`: the conformance suite of a plug-in, then its held-out figures beside those of the built-in policies."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from .bars import progress
from .builder import RunBuilder
from .config import POLICY_GROUPS, compose_one, group_options
from .conformance import CHECKS, Subject, figures, run_checks, with_policy
from .errors import UserError
from .plugins import instantiate
from .rows import label
from .run import Run

CONTEXT = {
    # what a policy of each group needs around it to make a difference
    "placement": ["request_scheduler=semantic"],
    "predictor": ["flow=tp_shuffled", "token_scheduler=semantic", "placement=semantic"],
    "token_scheduler": ["flow=tp_shuffled", "placement=semantic"],
    "request_scheduler": ["flow=dp", "placement=semantic"],
    "replica_router": ["placement=eplb"],
}


def check(overrides: Sequence[str]) -> int:
    """Check the one policy that the overrides name by `GROUP._target_=` (or `GROUP=`); 0 when it conforms, 1 when not."""
    group = _group_of(overrides)
    keys = {word.split("=", 1)[0] for word in overrides}
    context = [word for word in CONTEXT[group] if word.split("=", 1)[0] not in keys]
    if group == "replica_router" and "placement.slots" not in keys:
        context.append("placement.slots=40")
    config = compose_one(["planned_folds=0", *context, *overrides])
    run = RunBuilder().build(config | {group: _built_in(group)})
    name = label(config[group])
    subject = Subject(partial(instantiate, _without_slots(config[group]), group), run.recipe, run.train)
    subject.make()  # a wrong name or parameter is one clear message, before anything runs
    print(f"{group} {name}")
    outcomes = run_checks(group, subject)
    for outcome in outcomes:
        word = {True: "ok", False: "FAILED", None: "declined"}[outcome.passed]
        print(f"  {word:8s} {outcome.name}{': ' + outcome.detail if outcome.detail else ''}")
    if any(outcome.passed is False for outcome in outcomes):
        print(f"{name} does not conform to the {group} protocol", file=sys.stderr)
        return 1
    print(_table(run, group, name, subject))
    return 0


def _group_of(overrides: Sequence[str]) -> str:
    named = {w.split("=", 1)[0].split(".")[0] for w in overrides if w.split("=", 1)[0].endswith("._target_")}
    named = named or {w.split("=", 1)[0] for w in overrides if w.split("=", 1)[0] in POLICY_GROUPS}
    named &= set(CHECKS)
    if len(named) != 1:
        raise UserError(
            f"semmoe check takes one policy, such as placement._target_=my_policy.Mine; groups are {', '.join(CHECKS)}"
        )
    return named.pop()


def _built_in(group: str) -> dict[str, Any]:
    """A built-in policy of the group, to build the surroundings of the one that is checked."""
    config = compose_one([])
    return dict(config[group])


def _without_slots(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "slots"}


def _table(run: Run, group: str, name: str, subject: Subject) -> str:
    """Held-out figures of the plug-in and of every built-in of its group that needs no oracle."""
    makes = {name: subject.make}
    for option in group_options(group):
        config = compose_one([f"{group}={option}"])
        if "oracle" not in option and config[group].get("_target_"):
            makes.setdefault(label(config[group]), partial(instantiate, _without_slots(config[group]), group))
    lines = [
        f"held-out part of {run.heldout.path} ({run.heldout.num_requests} requests), flow {run.spec.flow}, "
        f"{run.ep_size} ranks, batches of {run.cfg['workload']['batch_tokens']} tokens",
        "",
    ]
    lines.append(
        f"  {'policy':26s} {'LAR':>6s} {'fan-out':>8s} {'imbalance':>10s} {'(total)':>8s} {'homes':>6s} {'seconds':>8s}"
    )
    with progress(len(makes), "evaluating") as bar:
        for policy, make in makes.items():
            start = time.perf_counter()
            try:
                f = figures(
                    with_policy(run.recipe, group, make), run.train, run.heldout, run.cfg["workload"]["batch_tokens"]
                )
                text = (
                    f"{f['lar']:6.3f} {f['fan_out']:8.3f} {f['imbalance_step']:10.3f} {f['imbalance_total']:8.3f} "
                    f"{f['home_imbalance']:6.2f} {time.perf_counter() - start:8.2f}"
                )
            except UserError as error:
                text = f"does not apply here: {error}"
            lines.append(f"{'*' if policy == name else ' '} {policy:26s} {text}")
            bar.update()
    return "\n".join(lines)
