"""Each kind of fault ends all ranks with one message that names the rank and the cause, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from harness import preflight  # noqa: E402
from harness.blocks.forward import Blocks  # noqa: E402
from harness.calibration.collectives import Case, Work, time_collectives  # noqa: E402
from harness.layer import MoELayer  # noqa: E402
from harness.measure import measure_batches, measure_run  # noqa: E402
from harness.pool import RankError, RankPool  # noqa: E402
from harness.serving import serve  # noqa: E402
from harness.serving.sequences import TinyAttention  # noqa: E402
from harness.stack import Stack  # noqa: E402
from harness.transport import shared_memory  # noqa: E402
from harness.transport.pull import PullTransport  # noqa: E402
from harness.transport.rows import RowTransport  # noqa: E402
from harness.transport.shared import SharedTransport  # noqa: E402
from harness.transport.staged import StagedTransport  # noqa: E402
from harness.worker import RankContext  # noqa: E402
from semmoe.planning import StepPlanner  # noqa: E402
from semmoe.run import Run  # noqa: E402
from tests.harness.measure_kit import build  # noqa: E402

LIMIT_S = 30.0
SERVE = ("workload=serve", "workload.num_requests=4", "workload.arrivals=all_at_once", "workload.max_output=3")


def ended_with(pool: RankPool, task: Callable[..., Any], *arguments: Any, since: Path | None = None) -> str:
    """What the pool says; it ends within the limit, with no process and no shared file left. since: what holds the time of the
    fault, if it is not the start of the task."""
    processes, scratch = [psutil.Process(pid) for pid in pool.pids], Path(pool._scratch)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(task, *arguments)
    assert time.monotonic() - (float(since.read_text()) if since else start) < LIMIT_S
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
    assert not scratch.exists()
    return str(caught.value)


PHASES: dict[str, tuple[Any, str, int]] = {  # where a phase stands, and how many calls rank 1 survives
    "check": (serve, "check_step", 0),
    "dispatch": (StagedTransport, "dispatch", 1),  # within a layer of the check: others are already in the exchange
    "experts": (MoELayer, "_run_experts", 1),
    "combine": (RowTransport, "combine", 1),
    "srs": (PullTransport, "srs", 1),
    "sag": (PullTransport, "sag", 1),
    "serving": (Stack, "execute", 2),  # the first execution is the warm-up
    "planning": (StepPlanner, "route", 2),
    "control": (serve, "_broadcast_plan", 1),  # rank 0 is sending the next step plan
    "attention of blocks": (Blocks, "attend", 9),  # past the check of the first block or of all six
    "attention with caches": (TinyAttention, "block", 8),
}
WHOLE = {
    "attention of blocks": ("scope=full_model", "workload.context_tokens=8", "workload.max_batches=1"),
    "attention with caches": (*SERVE, "scope=full_model"),
}


def killed_task(context: RankContext, run: Run, phase: str, time_of: Path) -> None:
    """A run whose rank 1 is killed in the middle of a phase, at the time that it leaves in a file."""
    owner, name, left = PHASES[phase]
    function = getattr(owner, name)

    def killing(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        if context.rank == 1 and left == 0:
            time_of.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*arguments, **named)

    setattr(owner, name, killing)
    (serve.measure_serve if run.kind == "serve" else measure_batches)(context, run)


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_in_any_phase_is_named(phase: str, tmp_path: Path) -> None:
    flow = ("flow=tp_shuffled", "token_scheduler=semantic") if phase in ("srs", "sag") else ()
    transport = "collective" if phase in ("check", "serving", "planning", "control", *WHOLE) else "shared"
    run = build(*WHOLE.get(phase, SERVE), *flow, f"transport={transport}", "measure.warmup=1")
    killed_at = tmp_path / "killed"
    said = ended_with(RankPool(2), killed_task, run, phase, killed_at, since=killed_at)
    assert "rank 1 of 2 was killed by SIGKILL during killed_task; all ranks were ended" in said


def killed_looking_task(context: RankContext, transport: str) -> Any:
    """Preflight, whose rank 1 is killed while rank 0 has answered already."""
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return preflight.look(context, transport)


def test_a_rank_killed_in_preflight_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "look", killed_looking_task)
    run = build("transport=collective")
    pool = RankPool(2)
    scratch = Path(pool._scratch)
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL during killed_looking_task"):
        preflight.preflight(pool, [run])
    assert not scratch.exists()


def killed_calibrating_task(context: RankContext, *arguments: Any) -> Any:
    """The timing of collectives, whose rank 1 is killed in its third call."""
    dispatch, calls = StagedTransport.dispatch, iter(range(99))

    def killing(*given: Any, **named: Any) -> Any:
        if context.rank == 1 and next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return dispatch(*given, **named)

    StagedTransport.dispatch = killing  # type: ignore[method-assign]
    return time_collectives(context, *arguments)


def test_a_rank_killed_while_calibrating_is_named() -> None:
    said = ended_with(
        RankPool(2), killed_calibrating_task, "shared", [Case("dispatch", 6)], 32, 4, 2, 2, Work(0.0, 1 << 12, 1)
    )
    assert "rank 1 of 2 was killed by SIGKILL during killed_calibrating_task" in said


def late_task(context: RankContext, run: Run | None, seconds: float) -> Any:
    """Rank 1 comes late to a measurement (None: to a barrier of shared memory, whose patience is half a second)."""
    transport = SharedTransport(timeout_s=0.5) if run is None else None
    if context.rank == 1:
        time.sleep(seconds)
    return transport.barrier() if transport else measure_batches(context, run).output_error  # type: ignore[arg-type]


def test_a_rank_five_seconds_late_is_waited_for_within_the_patience_and_named_beyond_it() -> None:
    pool = RankPool(2, timeout_s=60.0)
    start = time.monotonic()
    errors = pool.run(late_task, build("transport=shared"), 5.0)
    assert time.monotonic() - start > 5.0 and max(errors) < 1e-5
    assert "rank 0 waited 0.5 s for rank 1 in a barrier" in ended_with(pool, late_task, None, 5.0)
    said = ended_with(RankPool(2, timeout_s=1.0), late_task, build(), 5.0)
    assert "1 of 2 within 1 s during late_task" in said and "rank 1 is in late_task (test_fault_kinds.py:" in said


def no_room_task(context: RankContext, run: Run) -> Any:
    """A measurement where no folder has room for the shared buffers."""
    shared_memory.os = _FullDisk()  # type: ignore[assignment]
    return measure_batches(context, run)


class _FullDisk:
    """The module os, but every disk is full."""

    def statvfs(self, folder: str) -> Any:
        return type("Room", (), {"f_bavail": 3, "f_frsize": 4096})

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def written_past_the_end_task(context: RankContext) -> None:
    """What a full /dev/shm does to a rank that touches a page which was promised: SIGBUS."""
    transport = SharedTransport()
    transport.barrier()
    if context.rank == 1:
        with tempfile.NamedTemporaryFile() as file:
            os.truncate(file.name, 1 << 20)
            memory = torch.from_file(file.name, shared=True, size=1 << 20, dtype=torch.uint8)
            os.truncate(file.name, 0)
            memory.fill_(1)
    transport.barrier()


def test_exhausted_shared_memory_is_said() -> None:
    said = ended_with(RankPool(2), no_room_task, build("transport=shared"))
    assert said.startswith("rank 0 of 2: shared transport needs ") and "MiB in /dev/shm" in said
    said = ended_with(RankPool(2), written_past_the_end_task)
    assert "rank 1 of 2 was killed by SIGBUS (shared memory is full)" in said


def where_task(context: RankContext) -> tuple[str, str]:
    return shared_memory._directory(1 << 20), tempfile.gettempdir()


def test_shared_buffers_lie_where_the_pool_cleans_up() -> None:
    with RankPool(2) as pool:
        scratch = pool._scratch
        for folder, temporary in pool.run(where_task):
            assert temporary == scratch
            assert folder == (scratch if scratch.startswith("/dev/shm/") else "/dev/shm")


def write_checkpoint(folder: Path, damage: Callable[[dict[str, Any]], None]) -> None:
    """A Mixtral of 32 experts, top-4 and 6 layers, as the bundled trace has, in one file."""
    hidden, ffn, layers, experts = 32, 16, 6, 32
    config = {
        "model_type": "mixtral",
        "_name_or_path": "tiny",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "num_attention_heads": 4,
        "vocab_size": 4096,
    }
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        block = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{block}.gate.weight"] = torch.randn(experts, hidden)
        for expert in range(experts):
            for name, shape in (("w1", (ffn, hidden)), ("w3", (ffn, hidden)), ("w2", (hidden, ffn))):
                tensors[f"{block}.experts.{expert}.{name}.weight"] = torch.randn(shape)
    damage(tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def test_a_damaged_checkpoint_is_named_with_file_and_tensor_and_a_whole_one_runs(tmp_path: Path) -> None:
    tensor = "model.layers.2.block_sparse_moe.experts.30.w3.weight"  # of an expert that only rank 1 holds
    write_checkpoint(tmp_path / "whole", lambda t: None)
    write_checkpoint(tmp_path / "nan", lambda t: t[tensor][1].fill_(float("nan")))
    write_checkpoint(tmp_path / "lacking", lambda t: t.__delitem__(tensor))

    def run_of(name: str) -> Run:
        return build(
            "model=hf",
            f"model.path={tmp_path / name}",
            "measure.feed=checkpoint",
            f"measure.checkpoint={tmp_path / name}",
        )

    pool = RankPool(2)
    row, *_ = measure_run(pool, run_of("whole"))
    assert row["output_error"] < 1e-5 and row["layer_ms"] > 0 and row["route_flips"] is None
    said = ended_with(pool, measure_batches, run_of("nan"))
    assert said == f"rank 1 of 2: {tmp_path}/nan/model.safetensors: tensor {tensor} holds NaN or infinite values"
    said = ended_with(RankPool(2), measure_batches, run_of("lacking"))
    assert f"of 2: {tmp_path}/lacking/model.safetensors: tensor {tensor} is missing" in said
