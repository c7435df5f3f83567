"""Device n-gram and the paper's rule: tables by hand, the more confident row wins."""

from __future__ import annotations

import numpy as np

from semmoe.placement.base import Placement
from semmoe.predict.device_ngram import DeviceNgram, devices
from semmoe.predict.paper import Paper
from semmoe.profile import Profile
from semmoe.trace import RoutingTrace

# four experts on two ranks; in layer 1 the rank is the other one than in layer 0, whatever the token
ROUTES = np.array([[[0, 1], [2, 3]], [[2, 3], [0, 1]], [[1, 0], [3, 2]], [[3, 2], [0, 1]]])
TRACE = RoutingTrace(
    model="m",
    num_experts=4,
    vocab_size=5,
    experts_TLk=ROUTES,
    token_id_T=np.array([0, 0, 0, 0]),
    request_offset_R1=np.array([0, 4]),
    prompt_len_R=np.array([4]),
    domain_R=np.array(["d"]),
    layer_ids_L=np.array([0, 1]),
)
PLACEMENT = Placement.from_ranks(np.tile([0, 0, 1, 1], (2, 1)), 2, (0, 1))


def test_the_device_is_the_rank_of_most_experts_and_ties_fall_to_the_lower() -> None:
    mask = PLACEMENT.rank_mask_LEG[0]
    assert devices(np.array([[2, 3, 0], [0, 3, 1], [3, 0, -1]])[:, :2], mask).tolist() == [1, 0, 0]


def test_rows_by_hand_and_the_marginal_where_history_is_absent() -> None:
    ngram = DeviceNgram(lookback=1, pseudo=2.0)
    ngram.fit(Profile.fit(TRACE))
    history = np.array([[[0, 1]], [[2, 3]], [[-1, -1]]])
    share = ngram.shares(1, history, PLACEMENT, 3)
    # two of two tokens went over; smoothed with two tokens of the marginal (1/2, 1/2)
    np.testing.assert_allclose(share, [[0.25, 0.75], [0.75, 0.25], [0.5, 0.5]])
    score, best = ngram.scores(np.zeros(3, int), 1, history, PLACEMENT)
    assert (score / 65536).tolist() == [[0.5, 1.5], [1.5, 0.5], [1, 1]] and best.tolist() == [0.75, 0.75, 0.5]


def test_the_papers_rule_takes_the_more_confident_table() -> None:
    paper = Paper(lookback=1)
    paper.fit(Profile.fit(TRACE))
    score, sure = paper.scores(np.array([0]), 1, np.array([[[0, 1]]]), PLACEMENT)
    assert score[0].argmax() == 1 and sure[0] > 0.99  # the token table is even, the chain is sure
    first, _ = paper.scores(np.array([0]), 0, np.full((1, 1, 2), -1), PLACEMENT)
    assert np.array_equal(first, paper.table.scores(np.array([0]), 0, None, PLACEMENT)[0])
