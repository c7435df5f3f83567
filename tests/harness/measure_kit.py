"""Runs of the bundled trace on two ranks, and a folder with the plug-ins that the tests name."""

from __future__ import annotations

import textwrap
from pathlib import Path

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.run import Run

PLUGINS = '''
    import os
    import signal

    import numpy as np

    from semmoe.schedule.base import Plan


    class AllToZero:
        """Request scheduler: rank 0 gets everything."""

        def assign(self, request, score_G, head_counts, ranks):
            return 0


    class KillsRankOne:
        """Token scheduler that ends rank 1 when the file `armed` lies in the working directory."""

        def homes(self, score_TG, capacity):
            import torch.distributed as dist

            if os.path.exists("armed") and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return Plan.from_owner(np.arange(len(score_TG)) % score_TG.shape[1], score_TG.shape[1])
'''
BASE = ("planned_folds=0", "ep_size=2", "workload.batch_tokens=48", "workload.max_batches=2", "measure.feed=random")


BUILDER = RunBuilder()  # trace, split and fits are made once a test process


def write_plugins(folder: Path) -> None:
    (folder / "measure_plugins.py").write_text(textwrap.dedent(PLUGINS))


def build(*overrides: str) -> Run:
    """One run on two ranks; later overrides win over BASE."""
    keys = {o.split("=")[0] for o in overrides}
    if "workload=serve" in overrides:
        keys |= {"workload.batch_tokens", "workload.max_batches"}
    (config,) = compose_all([*(b for b in BASE if b.split("=")[0] not in keys), *overrides])
    return BUILDER.build(config)
