"""Published decode routes of GPT-OSS (AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, Apache-2.0) as a trace.

The file holds token *strings* (an index into its own `vocab`), experts ordered by gate weight, and decode tokens only:
the prompts have lengths but no routes, so the trace's prompt_len is 0.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..trace import RoutingTrace


def load_fingerprints(path: str | Path, model: str = "gpt-oss-20b") -> RoutingTrace:
    """The trace of such a .npz file; UserError where it is absent or something else."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file of published routes")
    try:
        with np.load(path, allow_pickle=False) as file:
            raw = {name: file[name] for name in file.files}
        experts_TLk, layers = raw["experts"], raw["experts"].shape[1]
        return RoutingTrace(
            model=model,
            num_experts=int(raw["num_experts"]),
            vocab_size=len(raw["vocab"]),
            experts_TLk=experts_TLk,
            token_id_T=raw["token"],
            request_offset_R1=raw["request_offset"],
            prompt_len_R=np.zeros(len(raw["request_offset"]) - 1, dtype=np.int32),
            domain_R=raw["request_category"],
            layer_ids_L=np.arange(layers),
            path=str(path),
        )
    except (KeyError, IndexError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a file of published GPT-OSS routes ({error})") from None
