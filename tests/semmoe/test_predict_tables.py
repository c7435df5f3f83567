"""Tables of a layer say what their predictor says, layer after layer, from the slots of the layer before alone."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_trace

from semmoe.placement.base import Placement
from semmoe.predict.device_ngram import DeviceNgram
from semmoe.predict.paper import Paper
from semmoe.predict.token_table import TokenTable
from semmoe.profile import Profile

TRAIN, TEST = make_trace(layers=5), make_trace(layers=5, vocab=60, seed=1)
RANKS = 4


def placement(extra: int) -> Placement:
    """Eight experts on four ranks, `extra` of them twice."""
    rng = np.random.default_rng(3)
    rows = [rng.permutation(np.concatenate([np.arange(8), rng.permutation(8)[:extra]])) for _ in range(5)]
    return Placement(np.stack(rows).astype(np.int32), RANKS, tuple(TRAIN.layer_ids_L), 8)


@pytest.mark.parametrize(
    "predictor", [TokenTable(), DeviceNgram(1), DeviceNgram(3), Paper(2), Paper(1)], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("extra", [0, 4])
def test_tables_say_what_the_predictor_says(predictor: TokenTable | DeviceNgram | Paper, extra: int) -> None:
    predictor.fit(Profile.fit(make_trace(layers=5, vocab=60)))
    placed, tokens = placement(extra), TEST.num_tokens
    slots_Tk, row_T = np.zeros((tokens, 2), dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    won = set()
    for layer in range(5):
        tables = predictor.tables(layer, placed)
        score_TG, row_T = tables.scores(TEST.token_id_T, slots_Tk, row_T)
        history = np.full((tokens, max(predictor.lookback, 1), 2), -1)
        for back in range(min(predictor.lookback, layer)):
            history[:, back] = TEST.experts_TLk[:, layer - 1 - back]
        assert score_TG.dtype == np.int32
        assert (score_TG == predictor.scores(TEST.token_id_T, layer, history, placed)[0]).all(), layer
        won |= set((tables.token.sure_S[tables.row_V[TEST.token_id_T]] > tables.chain.rows.sure_S[row_T]).tolist())
        slots_Tk = placed.first_slot_LE[layer][TEST.experts_TLk[:, layer]]
    assert won == ({True, False} if isinstance(predictor, Paper) else {isinstance(predictor, TokenTable)})


def test_the_number_of_a_chain_forgets_its_oldest_device() -> None:
    """Two layers looked back at, two ranks, a token on rank 1, 0, 1: rows 0, 1, 0 2 + 1 ... by hand: 0, 1, 1, 2."""
    ngram = DeviceNgram(2)
    trace = make_trace(layers=5, experts=4, k=1)
    ngram.fit(Profile.fit(trace))
    placed = Placement(np.tile(np.arange(4, dtype=np.int32), (5, 1)), 2, tuple(trace.layer_ids_L), 4)
    row_T, slots_Tk, rows = np.zeros(1, dtype=np.int64), np.zeros((1, 1), dtype=np.int64), []
    for layer, slot in enumerate((3, 0, 2, 1)):
        _, row_T = ngram.tables(layer, placed).scores(np.zeros(1, dtype=np.int64), slots_Tk, row_T)
        rows.append(int(row_T[0]))
        slots_Tk = np.array([[slot]])
    assert rows == [0, 1, 1, 2]  # none; (1); (0, 1); (1, 0)
