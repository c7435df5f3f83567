"""Decision trace: what a scheduler saw of every rank when it chose, and what its second choice would have cost.

`Traced` wraps a request scheduler; it has the same methods and decides the same. Per request it appends one line of
JSON: request, rank, value_G (null where a rank was not allowed), runner_up and cost, the value lost by it. Values are
in the scheduler's own terms where it tells them (`values` or `window_values`), else the affinity scores. For a window
that is assigned as a whole the cost is that of the whole window: the request is forced off its rank and the others
are assigned again, so it can be smaller than the difference of its own two values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .schedule.base import Plan, RankStates

if TYPE_CHECKING:
    from .serving import Request


@dataclass(frozen=True)
class Decision:
    """One request: cost is None where no other rank was allowed."""

    request: int
    rank: int
    value_G: tuple[float | None, ...]
    runner_up: int | None
    cost: float | None

    @classmethod
    def of(cls, request: int, rank: int, value_G: NDArray[np.floating]) -> Decision:
        """The runner-up is the best other rank by value (ties: the lower)."""
        others_G = value_G.astype(np.float64).copy()
        others_G[rank] = -np.inf
        second = int(others_G.argmax()) if np.isfinite(others_G).any() else None
        return cls(
            request,
            rank,
            tuple(float(v) if np.isfinite(v) else None for v in value_G),
            second,
            None if second is None else float(value_G[rank] - value_G[second]),
        )


class Traced:
    """A request scheduler that also records its decisions, in `decisions` and, where `path` is given, in that file."""

    def __init__(self, scheduler: Any, path: str | Path | None = None) -> None:
        self.scheduler, self.decisions = scheduler, list[Decision]()
        self.path = None if path is None else Path(path)
        for name in ("needs_head", "sees_routes"):
            if getattr(scheduler, name, False):
                setattr(self, name, True)
        if hasattr(scheduler, "assign_window"):
            self.assign_window = self._assign_window
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text("")
            except OSError as error:
                raise UserError(f"decision trace {self.path}: cannot be written ({error.strerror or error})") from None

    def fit(self, profile: Any, placement: Any) -> None:
        learn = getattr(self.scheduler, "fit", None)
        if learn is not None:
            learn(profile, placement)

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        tell = getattr(self.scheduler, "values", None)
        if tell is not None:  # before the choice: it may change what is allowed
            value_G = tell(request, score_G, head_counts, ranks)
        else:
            value_G = np.zeros(ranks.ranks) if score_G is None else np.asarray(score_G, dtype=np.float64)
        rank = int(self.scheduler.assign(request, score_G, head_counts, ranks))
        self._record([Decision.of(request.id, rank, value_G)])
        return rank

    def _assign_window(
        self,
        requests: Sequence[Request],
        score_RG: NDArray[np.integer] | None,
        head_counts: Sequence[NDArray[np.integer]] | None,
        ranks: RankStates,
    ) -> NDArray[np.int64]:
        owner_R = np.asarray(self.scheduler.assign_window(requests, score_RG, head_counts, ranks))
        if hasattr(self.scheduler, "window_values"):
            size = self.scheduler.window or max(len(requests), 1)
            for begin in range(0, len(requests), size):
                part = slice(begin, begin + size)
                self._record_window(
                    requests[part], owner_R[part], None if score_RG is None else score_RG[part], ranks.window(part)
                )
                ranks = ranks.with_assigned(requests[part], owner_R[part])
        else:
            value_RG = np.zeros((len(requests), ranks.ranks)) if score_RG is None else score_RG.astype(np.float64)
            self._record([Decision.of(r.id, int(g), v) for r, g, v in zip(requests, owner_R, value_RG, strict=True)])
        return owner_R

    def _record_window(
        self,
        requests: Sequence[Request],
        owner_R: NDArray[np.int64],
        score_RG: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> None:
        value_RG = self.scheduler.window_values(requests, score_RG, ranks)
        rooms_G = self.scheduler.rooms(requests, ranks)
        every = np.arange(len(requests))
        total = value_RG[every, owner_R].sum()
        made = []
        for r, request in enumerate(requests):
            if rooms_G.sum() - rooms_G[owner_R[r]] < 1:
                made.append(Decision(request.id, int(owner_R[r]), tuple(value_RG[r].tolist()), None, None))
                continue
            barred_RG = value_RG.copy()
            barred_RG[r, owner_R[r]] -= 1000.0
            again_R = self.scheduler.best(barred_RG, rooms_G)
            cost = float(total - value_RG[every, again_R].sum())
            moved = None if again_R[r] == owner_R[r] else int(again_R[r])
            made.append(
                Decision(
                    request.id,
                    int(owner_R[r]),
                    tuple(value_RG[r].tolist()),
                    moved,
                    None if moved is None else max(cost, 0.0),
                )
            )
        self._record(made)

    def _record(self, made: Sequence[Decision]) -> None:
        self.decisions += made
        if self.path is not None:
            with open(self.path, "a") as file:
                file.writelines(json.dumps(asdict(decision)) + "\n" for decision in made)


def token_decisions(score_TG: NDArray[np.integer], plan: Plan) -> list[Decision]:
    """The same per token of a token plan: scores of every rank, and the expected local assignments (fixed point) that
    the token's second choice would have lost, the homes of the others kept."""
    return [Decision.of(t, int(g), score_TG[t].astype(np.float64)) for t, g in enumerate(plan.owner_T)]
