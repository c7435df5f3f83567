"""What a plan keeps when traffic drifts: LAR of today's plan on other text, homed by the experts of first tokens."""

from __future__ import annotations

import numpy as np

from semmoe.recipe import Fitted, Recipe
from semmoe.trace import RoutingTrace

from .desk import Desk
from .judge import Cell

OTHER_KIND = "lmsys"  # of drawn routes
FEWEST = 4  # requests of a domain, or of a time, that are worth a figure


def drift_said(desk: Desk, best: Cell) -> str:
    """LAR of a plan where it was made for and elsewhere, in words: another kind of text, other domains, or later on."""
    trace, run = desk.config["trace"], desk.ours(best.flow, best.dispatcher)
    if str(trace.get("_target_", "")).endswith("affinity.Drawn"):
        few = {"requests": max(int(trace["requests"]) // 2, 2)}  # all of them are new to the plan
        other = Desk(desk.config | {"trace": trace | {"domains": [OTHER_KIND]} | few}, desk.builder)
        strange = other.run(best.flow, best.dispatcher).heldout
        fitted, here_trace, there_trace = run.fitted, run.heldout, strange
        words = f"on another kind of text ({OTHER_KIND}) the same plan"
    else:
        recorded = elsewhere(run.train, run.heldout)
        if recorded is None:
            return (
                "unknown: the trace has neither several domains nor arrival times; record another day or domain and evaluate "
                "today's plan on it"
            )
        learned, here_trace, there_trace, words = recorded
        fitted = run.recipe.fit(learned)
    here, there = (homed_lar(run.recipe, fitted, part) for part in (here_trace, there_trace))
    chance = 1 / run.ep_size
    text = f"{words} reaches LAR {there:.2f} instead of {here:.2f}"
    text += ", requests homed by their measured heads" if run.spec.flow == "dp" else ""
    if here - chance < 0.02:
        return f"{text}: there is no locality to lose"
    return f"{text}: about {100 * (there - chance) / (here - chance):.0f} % of the locality is left until it is planned again"


def elsewhere(
    train: RoutingTrace, heldout: RoutingTrace
) -> tuple[RoutingTrace, RoutingTrace, RoutingTrace, str] | None:
    """(what a plan learns from, held-out requests of that kind, of another, words) of a recorded trace: its largest domain
    against the others, else its first half in time against the second. None where it tells neither apart."""
    domains, counts = np.unique(train.domain_R, return_counts=True)
    first = domains[counts.argmax()]
    if len(domains) > 1:
        parts = [np.flatnonzero(t.domain_R == first) for t in (train, heldout)] + [
            np.flatnonzero(heldout.domain_R != first)
        ]
        words = f"a plan made for its largest domain ({first}) alone, on the rest,"
    elif train.arrival_ms_R is not None and heldout.arrival_ms_R is not None:
        middle = np.median(np.concatenate([train.arrival_ms_R, heldout.arrival_ms_R]))
        parts = [np.flatnonzero(t.arrival_ms_R < middle) for t in (train, heldout)]  # type: ignore[operator]
        parts.append(np.flatnonzero(heldout.arrival_ms_R >= middle))
        words = "a plan made for its first half in time alone, on the later half,"
    else:
        return None
    if min(map(len, parts)) < FEWEST:
        return None
    return train.select(parts[0]), heldout.select(parts[1]), heldout.select(parts[2]), words


def homed_lar(
    recipe: Recipe, fitted: Fitted, trace: RoutingTrace, head_tokens: int = 64, batch_tokens: int = 512
) -> float:
    """LAR of other requests under a plan; in attention-DP each is homed by the experts of its first tokens, so that
    words which the plan never saw do not matter."""
    return float(recipe.locality(fitted, trace, batch_tokens, head_tokens=head_tokens).columns()["lar"])
