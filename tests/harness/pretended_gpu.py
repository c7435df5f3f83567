"""A GPU that is not there, for the control flow around it: tensors asked for on "cuda" are made on the CPU, streams, events and
graphs are stand-ins. Prints the rows of `bench_gpu` and what streams waited for, as JSON. Started with TRITON_INTERPRET=1.

While a stand-in of a graph captures, whatever reads the device on the host fails: what runs here twice is what runs there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from host_reads import no_host_reads
from torch.overrides import TorchFunctionMode

UNCAPTURABLE: dict[str, dict[str, str]] = {"eager": {"eager": "reads on the host"}, "reads": {}}


class OnCpu(TorchFunctionMode):
    """Devices "cuda" are the CPU, and tensors say that they are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        named = {k: "cpu" if k == "device" and str(v).startswith("cuda") else v for k, v in (kwargs or {}).items()}
        return func(*("cpu" if isinstance(a, str) and a == "cuda" else a for a in args), **named)


class Stream:
    """log: (stream, what it waited for)."""

    log: ClassVar[list[tuple[int, int]]] = []
    made = 0

    def __init__(self) -> None:
        self.number = Stream.made
        Stream.made += 1

    def wait_stream(self, other: Stream) -> None:
        Stream.log.append((self.number, other.number))


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 0.01


class Graph:
    def replay(self) -> None: ...


class PretendedCuda:
    """torch.cuda of one Hopper GPU; what is not here is the real one's."""

    Stream, Event, CUDAGraph = Stream, Event, Graph
    captures = 0

    def __init__(self) -> None:
        self._real, self._here = torch.cuda, Stream()
        self.nccl = type("nccl", (), {"version": staticmethod(lambda: (2, 27, 5))})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: Any = None) -> str:
        return "pretended"

    def get_device_properties(self, device: Any = None) -> Any:
        return type("properties", (), {"uuid": "0", "shared_memory_per_block_optin": 227 << 10})

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return 9, 0

    def current_stream(self) -> Stream:
        return self._here

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here = self._here, stream
        yield
        self._here = before

    @contextlib.contextmanager
    def graph(self, graph: Graph) -> Iterator[None]:
        PretendedCuda.captures += 1
        with no_host_reads():
            yield

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...

    def _sleep(self, cycles: int) -> None: ...


def small(tiling: Any) -> Any:
    """The interpreter takes longest for large blocks of few rows."""
    return replace(tiling, block_m=16, block_n=tiling.block_n // 8, block_k=32)


def main() -> None:
    torch.cuda = PretendedCuda()  # type: ignore[assignment]  # before what has it as a default
    from harness.bench import cases as bench_cases
    from harness.bench import gpu as bench_gpu
    from harness.kernels import grouped
    from harness.reference import experts

    def spoilt() -> list[bench_cases.Case]:
        one = torch.ones(2)
        variants = {"reads": lambda: [one * torch.ones(1).item()], "eager": lambda: [one * torch.ones(1).item()]}
        return [bench_cases.Case("spoilt", {n: variants[n]}, [one], uncapturable=u) for n, u in UNCAPTURABLE.items()]

    makers = bench_cases.makers
    bench_cases.makers = lambda sizes: {**makers(sizes), "spoilt": spoilt, "assign_homes": lambda: []}
    experts.grouped_available = lambda rows, weights: True  # of fp32 on a CPU it is
    bench_gpu.FLUSH_BYTES = bench_gpu.COPY_BYTES = 1 << 10
    bench_gpu.REPLAYS, bench_gpu.EAGER, bench_gpu.WARM_UPS = {"graph_warm": 3, "graph_cold": 2}, 1, 1
    bench_cases.FULL = replace(bench_cases.DRY, device="cuda")
    bench_cases.WIDE, bench_cases.PREFILL, bench_cases.MIDDLE = map(
        small, (grouped.WIDE, grouped.PREFILL, grouped.MIDDLE)
    )
    grouped.PREFILL = grouped.MIDDLE = grouped.WIDE = grouped.DECODE = small(grouped.DECODE)
    with OnCpu():
        rows = bench_gpu.whole_run(dry_run=False)
    print(json.dumps({"rows": rows, "waits": Stream.log, "captures": PretendedCuda.captures}))


if __name__ == "__main__":
    main()
