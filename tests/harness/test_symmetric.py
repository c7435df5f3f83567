"""Symmetric memory without a GPU: what is missing is said; and the parts that it shares with `shared` are those tested."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.measure import how_measured
from harness.transport.choose import kernel_path, rank_device
from harness.transport.peer_memory import CONTROL_BYTES, PeerMemory, region_bytes
from harness.transport.symmetric_checks import no_gpu_reason, symmetric_problems
from semmoe.errors import UserError
from tests.harness.measure_kit import build


class FakeCuda:
    """torch.cuda of a machine with `count` GPUs; `apart`: a pair without peer access."""

    def __init__(self, count: int, apart: tuple[int, int] | None = None) -> None:
        self.count, self.apart = count, apart

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def can_device_access_peer(self, a: int, b: int) -> bool:
        return self.apart not in ((a, b), (b, a))


def test_a_machine_that_cannot_is_told_what_is_missing(monkeypatch: Any) -> None:
    assert symmetric_problems(8, FakeCuda(8)) == []
    assert "torch finds none" in symmetric_problems(2, FakeCuda(0))[0]
    assert "4 ranks here need a GPU each, and this machine has 2" in symmetric_problems(4, FakeCuda(2))[0]
    assert "GPU 3 cannot address the memory of GPU 1 (1 such pairs)" in symmetric_problems(4, FakeCuda(4, (1, 3)))[0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "only 4 of the 8 ranks run on this one" in symmetric_problems(8, FakeCuda(8))[0]


def test_why_torch_finds_no_gpu_is_said_in_its_words(monkeypatch: Any) -> None:
    class Broken(FakeCuda):
        def init(self) -> None:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", None)
    assert no_gpu_reason(FakeCuda(0)) == f"torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver on your system is too old (found version 11040).)" in symmetric_problems(2, Broken(0))[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_symmetric_memory_and_timed_kernels_are_refused() -> None:
    with pytest.raises(UserError, match=r"transport=symmetric: it needs one NVIDIA GPU a rank.*transport=shared"):
        how_measured(build("transport=symmetric"), 2)
    with pytest.raises(UserError, match="interpreter"):
        how_measured(build("transport=shared", "transport.kernels=triton"), 2)
    assert how_measured(build("transport=virtual"), 2) == ("virtual", "torch", "virtual ranks on one CPU")
    with pytest.raises(UserError, match="library calls only"):
        kernel_path({"name": "collective", "kernels": "triton"}, rank_device("collective", 2))


def test_tables_areas_and_arenas_of_a_region_do_not_overlap() -> None:
    """PeerMemory as SymmetricMemory uses it: through tensors, on any device."""
    regions_G = [torch.zeros(region_bytes(1000, 600), dtype=torch.uint8) for _ in range(3)]
    memory = PeerMemory(1, regions_G, 1000)
    memory.write_table(0, 2, 0, [7, 8])
    memory.write_table(1, 2, 1, [9])
    memory.stages_2G[0][2].fill_(1)
    memory.stages_2G[1][2].fill_(2)
    first, second = memory.alloc(3, 4, torch.float32), memory.alloc(5, 8, torch.int32)
    first[2].fill_(3.0)
    second[2].fill_(4)
    assert memory.read_table(0)[2, :3].tolist() == [7, 8, 0] and memory.read_table(1)[2, :3].tolist() == [0, 9, 0]
    assert memory.stages_2G[0][2].unique().tolist() == [1] and memory.stages_2G[1][2].unique().tolist() == [2]
    assert first[2].unique().tolist() == [3.0] and second[2].unique().tolist() == [4]
    assert not regions_G[0].any() and not regions_G[1].any() and not regions_G[2][:64].any()
    assert memory.stages_2G[0][0].data_ptr() - regions_G[0].data_ptr() == CONTROL_BYTES
    with pytest.raises(UserError, match="raise arena_bytes"):
        memory.alloc(100, 8, torch.int32)
