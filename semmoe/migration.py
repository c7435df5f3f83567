"""Migration: the expert weights that move when one placement follows another.

A rank fetches every expert that it holds in the new placement and not in the old one, once per layer, from a rank that held
it: on its own node if there is one, and of these the one that has sent least. Before that the new ranks are renamed so that
as much as possible stays: one renaming for all layers where requests have homes, one per layer where tokens have.
Worked example, 2 ranks, experts [0 1 | 2 3] -> [2 3 | 0 1]: renamed it is the old placement and nothing moves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from .placement.base import Placement
from .traffic.wiring import Int, Wiring


def aligned(new: Placement, old: Placement, wiring: Wiring, per_layer: bool) -> Placement:
    """The new placement with ranks renamed, whole nodes first, so that most copies stay where the old one has them."""
    common_LGG = np.einsum("leg,leh->lgh", new.rank_mask_LEG.astype(np.int64), old.rank_mask_LEG.astype(np.int64))
    block_LGS = new.physical_to_logical_LP.reshape(new.num_layers, new.ep_size, -1)
    table_LGS = np.empty_like(block_LGS)
    if per_layer:
        for layer, common_GG in enumerate(common_LGG):
            table_LGS[layer, renaming(common_GG, wiring)] = block_LGS[layer]
    else:
        table_LGS[:, renaming(common_LGG.sum(axis=0), wiring)] = block_LGS
    table_LP = table_LGS.reshape(new.num_layers, -1)
    return Placement(table_LP, new.ep_size, new.layer_ids, new.num_experts, new.notes)


def renaming(common_GG: Int, wiring: Wiring) -> Int:
    """Old rank of every new rank, whole nodes to whole nodes, with the largest sum of common_GG[new, old]."""
    ranks, inner = len(common_GG), wiring.ranks_per_node
    if wiring.nodes == 1 or ranks % inner:
        return np.asarray(linear_sum_assignment(common_GG, maximize=True)[1]) if wiring.nodes == 1 else np.arange(ranks)
    by_node = common_GG.reshape(wiring.nodes, inner, wiring.nodes, inner).swapaxes(1, 2)
    inside = np.array([[linear_sum_assignment(block, maximize=True)[1] for block in row] for row in by_node])
    kept = np.take_along_axis(by_node, inside[..., None], axis=3)[..., 0].sum(axis=2)
    node_N = linear_sum_assignment(kept, maximize=True)[1]
    return np.concatenate([node * inner + inside[n, node] for n, node in enumerate(node_N)])


def moved_experts_LGG(old: Placement, new: Placement, wiring: Wiring) -> NDArray[np.int64]:
    """[l, s, d]: experts of layer l that rank d fetches from rank s.."""
    ranks, node_G = old.ep_size, wiring.node_G
    moved_LGG = np.zeros((old.num_layers, ranks, ranks), dtype=np.int64)
    sent_G = np.zeros(ranks, dtype=np.int64)
    fetched_LEG = new.rank_mask_LEG & ~old.rank_mask_LEG
    for layer, expert, rank in np.argwhere(fetched_LEG):
        holders = np.flatnonzero(old.rank_mask_LEG[layer, expert])
        near = holders[node_G[holders] == node_G[rank]]
        choice = near if len(near) else holders
        source = choice[np.argmin(sent_G[choice])]
        sent_G[source] += 1
        moved_LGG[layer, source, rank] += 1
    return moved_LGG
