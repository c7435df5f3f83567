"""Row: one line of the accuracy table, with its bar; `held_out`, which scores a model at points that it did not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semmoe.errors import UserError

Float = NDArray[np.float64]
Model = Callable[[Float], Float]


@dataclass(frozen=True)
class Row:
    """`values` are percentages by name ("median", "p90", "TPOT mean"); `bars` bound their absolute value by name."""

    key: str
    what: str
    values: dict[str, float]
    bars: dict[str, float]
    count: int = 0
    note: str = ""

    @property
    def missed(self) -> list[str]:
        """Names whose value is beyond its bar, or not a number."""
        return [name for name, bar in self.bars.items() if not abs(self.values[name]) <= bar]


def scored(key: str, what: str, error: Float | pd.Series, median: float = 0, p90: float = 0, note: str = "") -> Row:
    """The row of relative errors (signs do not count); a bar of 0 is none."""
    size = 100 * np.abs(np.asarray(error, dtype=np.float64))
    if not len(size):
        raise UserError(f"{what}: no point to score; the data has no row of this kind")
    values = {"median": float(np.median(size)), "p90": float(np.quantile(size, 0.9))}
    bars = {name: bar for name, bar in (("median", median), ("p90", p90)) if bar}
    return Row(key, what, values, bars, len(size), note)


def held_out(
    table: pd.DataFrame,
    keys: Sequence[str],
    x: str,
    y: str,
    fit: Callable[[Float, Float], Model],
    parity: int = 1,
    fewest: int = 5,
) -> pd.DataFrame:
    """Signed relative error of `fit` at every other value of x, the first and last value never among them.

    One model per combination of `keys`, from the values of x at positions of the other parity (and the edges); several
    measurements of one x count there with their geometric mean, and each is scored by itself where x is held out.
    Groups with fewer than `fewest` values are left out. Columns: keys, x, error.
    """
    found = []
    for _, group in table.groupby(list(keys), sort=True):
        values = np.sort(group[x].unique())
        if len(values) < fewest:
            continue
        inside = np.arange(len(values))
        held = (inside % 2 == parity) & (inside > 0) & (inside < len(values) - 1)
        mean = np.exp(np.log(group[y]).groupby(group[x]).mean())
        kept = values[~held].astype(np.float64)
        model = fit(kept, mean.loc[values[~held]].to_numpy(np.float64))
        test = group[group[x].isin(values[held])]
        error = model(test[x].to_numpy(np.float64)) / test[y].to_numpy(np.float64) - 1
        found.append(test[[*keys, x]].assign(error=error))
    if not found:
        raise UserError(f"no group by {', '.join(keys)} has {fewest} values of {x}")
    return pd.concat(found, ignore_index=True)


def read(path: object, columns: Sequence[str]) -> pd.DataFrame:
    """A CSV file with at least these columns; UserError that names what is missing."""
    try:
        table = pd.read_csv(str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as CSV ({error})") from None
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise UserError(
            f"{path}: lacks the column(s) {', '.join(missing)}; it has {', '.join(map(str, table.columns))}"
        )
    return table
