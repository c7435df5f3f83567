"""Eight ranks from torchrun on two agents, as on two machines: preflight, rows, compare, ids as simulated; and what
preflight says where something does not fit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from harness.nvlink import nvlink_text
from harness.preflight import GIB, Found, Needs, needs_of, problems
from harness.transport.choose import STAGE_BYTES
from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from tests.harness.measure_kit import build

ROOT = Path(__file__).resolve().parents[2]
AGENTS = 2


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_two_agents_of_four_ranks_run_an_experiment_as_it_is_simulated(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={AGENTS}", "--nproc-per-node=4"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"]
    command += ["-m", "harness", "experiment=dry_run"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(AGENTS)
    ]
    try:
        outputs = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * AGENTS, outputs
    said = "".join(out for out, _ in outputs)
    assert "preflight: 8 ranks on 1 machine(s), CPU, transport collective" in said
    assert said.count("measured 2 configuration(s)") == 1, "one rank drives"
    rows = [json.loads(path.read_text()) for path in (tmp_path / "results/runs/dry_run").glob("harness*.json")]
    simulated = {RunBuilder().build(config).config_id for config in compose_all(["experiment=dry_run"])}
    assert {row["config_id"] for row in rows} == simulated and len(rows) == 2
    assert all(row["ep_size"] == 8 and row["layer_ms"] > 0 and row["output_error"] < 1e-5 for row in rows)
    assert (tmp_path / "results/runs/dry_run/report.html").is_file() and "LAR" in said


CPU = Found(0, "a", "CPU", 8 * GIB, None, GIB, False, None, ())
GPU = replace(CPU, device="H100", device_free_bytes=80 * GIB, nccl=True)
SMALL = Needs("collective", GIB, GIB, 0)


def test_nothing_is_said_where_everything_fits() -> None:
    assert problems([replace(CPU, rank=r) for r in range(4)], SMALL) == []
    assert problems([replace(GPU, rank=r) for r in range(4)], replace(SMALL, transport="symmetric")) == []


def test_each_thing_that_does_not_fit_is_named_with_rank_and_machine() -> None:
    eight = [replace(CPU, rank=r) for r in range(8)]
    (said,) = problems(eight, SMALL)
    assert said.startswith("a, main memory of 8 ranks: 9.00 GiB are needed, 8.00 GiB are free")
    (said,) = problems(eight, Needs("shared", 0, 0, GIB))
    assert said.startswith("a, shared memory of 8 ranks: 8.00 GiB are needed, 1.00 GiB are free")
    (said,) = problems([GPU, replace(GPU, rank=1, device_free_bytes=GIB // 2)], SMALL)
    assert said.startswith("rank 1 on a, GPU memory: 1.00 GiB are needed, 0.50 GiB are free")
    together = [replace(GPU, rank=r, nccl=False) for r in range(4)]  # virtual ranks share one GPU and need no NCCL
    assert problems(together, Needs("virtual", GPU.device_free_bytes // 4, 0, 0)) == []
    (said,) = problems(together, Needs("virtual", GPU.device_free_bytes // 3, 0, 0))
    assert "4 virtual ranks on" in said and "GPU memory" in said
    (said,) = problems([GPU, replace(GPU, rank=1)], Needs("symmetric", GIB // 2, GPU.device_free_bytes, 0))
    assert said.startswith("rank 0 on"), "the reference is built by rank 0"
    (said,) = problems([replace(GPU, nccl=False)], SMALL)
    assert said == "rank 0 on a: this torch has no NCCL, which GPUs need between them"
    (said,) = problems([CPU, replace(CPU, rank=1, port_error="in use")], SMALL)
    assert said == "rank 1 on a: no port can be opened: in use"
    (said,) = problems([replace(GPU, symmetric=("GPU 1 is apart",))], replace(SMALL, transport="symmetric"))
    assert said == "rank 0 on a: transport=symmetric: GPU 1 is apart"
    (said,) = problems([CPU, replace(CPU, rank=1, host="b")], Needs("shared", 0, 0, 0))
    assert "within one machine, ranks run on 2" in said


class Nvml:
    """Two pairs of GPUs, each joined by NVLink; nobody knows about GPU 9."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        if b == 9:
            raise self.NVMLError
        return 0 if a // 2 == b // 2 else 1


def test_preflight_says_which_gpus_nvlink_joins() -> None:
    assert nvlink_text(["0"], Nvml()) == "one GPU, no NVLink needed"
    assert nvlink_text(["0", "1"], Nvml()) == "NVLink between all pairs"
    assert nvlink_text(["8", "9"], Nvml()).startswith("NVLink between 0 of 1 pairs (not 0-1:")
    said = nvlink_text(["0", "1", "2", "3"], Nvml())
    assert said == "NVLink between 2 of 6 pairs (not 0-2, 0-3, 1-2, 1-3: expect PCIe times there)"


def test_needs_grow_with_replicas_and_only_peer_transports_reserve_regions() -> None:
    plain, more = needs_of(build()), needs_of(build("placement=eplb", "placement.slots=48", "transport=shared"))
    assert more.weights_bytes * 2 == plain.weights_bytes * 3 and plain.region_bytes == 0
    assert more.region_bytes > 2 * STAGE_BYTES, "the least that a rank reserves, however few its tokens"
