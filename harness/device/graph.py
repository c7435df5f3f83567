"""Layers as CUDA graphs: captured once for each layer and shape, after a warm-up on a side stream, and replayed for every
timed step, so that no launch waits for the host.

    fill       copy inputs and plan arrays into fixed buffers, poison the outputs (when they are checked)
    replay     all phases of a `DeviceLayer`; on the clock
    count      read what the kernels counted

Barriers of several GPUs stand inside the kernels, with epochs that advance on the device. Virtual ranks share one stream:
the first of them captures phase by phase, all ranks' first, then all ranks' second, ..., and replays for all.

Without a GPU the same phases are called again instead of being replayed (a dry run): only `record`'s capture is new on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.run import Run

from ..layer import LayerOutput
from ..stack import LayerInput, Stack
from ..timing import PhaseTimer
from ..transport.pull import PullTransport
from ..transport.staged import StagedTransport
from ..transport.virtual import VirtualTransport
from ..worker import RankContext
from .clock import device_ns, devices_meet, warm_up
from .fixed import FixedBuffers, Shape, bucket, largest_sizes, total_bytes

if TYPE_CHECKING:
    from .layer import DeviceLayer, Planned

ON = "on"  # column cuda_graph of a row whose layers were replayed


def why_eager(run: Run, device: torch.device) -> str | None:
    """Why the layers of a run cannot be captured, or None where they can."""
    transport, spec = run.cfg["transport"], run.spec
    if device.type != "cuda":
        return "CPU tensors"
    if run.scope == "full_model":
        return "scope=full_model runs its blocks eagerly"
    if run.kind != "batches":
        return "steps of a served run differ in shape"
    if transport["name"] not in ("symmetric", "virtual"):
        return f"transport={transport['name']} reads the sizes of its exchanges on the host"
    if transport.get("kernels", "torch") != "triton":
        return "transport.kernels=torch reads counts on the host"
    return no_device_layer(spec) or ("homes move in the combine" if run.planner().rehomes else None)


def no_device_layer(spec: DispatchSpec) -> str | None:
    """What a DeviceLayer cannot do of a spec, or None."""
    if spec.dispatcher == "low_latency":
        return "dispatcher=low_latency reads the number of rows in its places on the host"
    types = {str(spec.activation_dtype), str(spec.dispatch_dtype), str(spec.combine_dtype)}
    return f"rows of several types ({', '.join(sorted(types))})" if len(types) > 1 else None


def graph_column(run: Run, device: torch.device) -> str:
    """Column cuda_graph: "on", or "off: " and why. UserError for measure.cuda_graph=on where it cannot be."""
    asked = str(run.cfg["measure"]["cuda_graph"])
    if asked == "off":
        return "off: asked"
    reason = why_eager(run, device)
    if asked == "on" and reason is not None:
        raise UserError(
            f"measure.cuda_graph=on: {reason}; use transport=symmetric or virtual with transport.kernels=triton on GPUs and "
            "workload=batches, or set measure.cuda_graph=auto"
        )
    return ON if reason is None else f"off: {reason}"


class GraphStack(Stack):
    """A Stack whose layers are replayed. Steps must have a token in the tp flows; ranks without one are fine."""

    def __init__(self, context: RankContext, run: Run) -> None:
        super().__init__(context, run)
        assert isinstance(self.transport, PullTransport)
        memory = self.transport.fixed_memory(self.fixed_bytes(self.most_rows))
        sizes = largest_sizes(self.spec, context.ranks, self.most_rows)
        self._fixed = FixedBuffers.in_memory(memory, context.rank, sizes)
        self._captured: dict[tuple[int, Shape], tuple[DeviceLayer, Replay]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def fixed_bytes(self, most_rows: int) -> int:
        return total_bytes(largest_sizes(self.spec, self.context.ranks, most_rows))

    def make_timer(self) -> PhaseTimer:
        """It only counts layers: phases inside a graph are not told apart."""
        return PhaseTimer()

    def prepare(self, inputs: list[LayerInput]) -> None:
        """Capture what has not been captured yet."""
        from .layer import DeviceLayer  # imports Triton

        for layer, given in enumerate(inputs):
            key = layer, self.shape_of(given)
            if key not in self._captured:
                planned = self._planned(layer, key[1])
                made = DeviceLayer(self.layers[layer], key[1], self._fixed, _barrier(self.transport), planned)
                self._fill(made, given)
                self.context.barrier()
                self._captured[key] = made, Replay(self.transport, made.phases, self._pool)

    def _planned(self, layer: int, shape: Shape) -> Planned | None:
        """Where this rank plans: with what was captured of the layer before."""
        from .layer import Planned

        plan = self.device_plan
        if plan is None:
            return None
        after = self._captured[layer - 1, shape][0] if layer else None
        return Planned(plan.device_tables[layer], plan.capacity(shape.tokens), after)

    def _fill(self, layer: DeviceLayer, given: LayerInput) -> None:
        layer.fill(given.x, given.routes.slots_Tk, given.homes_T, given.token_T)

    def forward(self, layer: int, given: LayerInput) -> LayerOutput:
        """By a replay into poisoned buffers."""
        captured, replay = self._captured[layer, self.shape_of(given)]
        self._fill(captured, given)
        captured.poison()
        self.context.barrier()
        replay()
        captured.count()
        return captured.output()

    def timed(self, layer: int, given: LayerInput) -> tuple[int, LayerOutput | None]:
        """The replay alone; its phases cannot be told apart from outside."""
        captured, replay = self._captured[layer, self.shape_of(given)]
        self._fill(captured, given)
        self.context.barrier()
        self.timer.start_layer()
        took_ns = replay()
        captured.count()
        return took_ns, None

    def shape_of(self, given: LayerInput) -> Shape:
        """The same on all ranks, from what all of them know of the step."""
        ranks = self.context.ranks
        if self.device_plan is not None:  # places for as many as may come, since the host does not know how many will
            return Shape(len(given.x), bucket(self.device_plan.capacity(len(given.x))))
        if given.homes_T is None:
            return Shape(len(given.x), bucket(-(-len(given.x) // ranks)))
        most = int(torch.bincount(torch.from_numpy(given.homes_T).long(), minlength=ranks).max())
        return Shape(0 if self.spec.flow == "dp" else len(given.x), bucket(most))


class Replay:
    """The phases of a layer on all ranks of this process, as one piece of device work. Collective."""

    def __init__(self, transport: Any, phases: Sequence[Callable[[], None]], pool: Any) -> None:
        virtual = isinstance(transport, VirtualTransport)
        phases_GP = transport.gather_objects(phases) if virtual else [phases]
        self._meet = transport.barrier if virtual else _nothing
        self._leads = not virtual or transport.rank == 0
        self._line_up = transport.barrier if _barrier(transport) is not None else _nothing

        def once() -> None:
            for phase_G in zip(*phases_GP, strict=True):
                for phase in phase_G:
                    phase()

        self._devices_meet = None if virtual else devices_meet(transport.device)
        self._cuda = transport.device.type == "cuda"
        self._again = record(once, pool) if self._cuda and self._leads else once
        if self._leads and not self._cuda:
            once()  # the warm-up of a dry run
        self._meet()

    def __call__(self) -> int:
        """Nanoseconds from the first kernel's start to the last one's end (of virtual ranks, all in the first's)."""
        self._meet()
        took_ns = 0
        if self._leads:
            self._line_up()
            took_ns = device_ns(self._again, self._devices_meet) if self._cuda else host_ns(self._again)
        self._meet()
        return took_ns


def record(once: Callable[[], None], pool: Any) -> Callable[[], None]:
    """A CUDA graph of `once` on the current device. pool: memory of all graphs, which are replayed one at a time."""
    warm_up(once)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may ask for events
        once()
    return graph.replay


def host_ns(again: Callable[[], None]) -> int:
    start = perf_counter_ns()
    again()
    return perf_counter_ns() - start


def _barrier(transport: Any) -> Any:
    """The state that kernels of several processes wait with; virtual ranks need none."""
    return transport.fused if isinstance(transport, StagedTransport) else None


def _nothing() -> None:
    pass
