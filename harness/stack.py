"""Stack: the MoE layers of one configuration on one rank, fed, executed and timed step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.planning import RoutedStep
from semmoe.run import Run
from semmoe.schedule.base import capacity_of

from .counting import Counter
from .device.clock import timer_of
from .device.plan import DEVICE, DevicePlan, planned_on
from .environment import only_core
from .feeds import Feed, make_feed
from .layer import ALONE, Homes, InBlock, LayerOutput, MoELayer, Routes, build_layers
from .reference.gate import Gating
from .timing import Marks, PhaseTimer
from .transport.base import Transport
from .transport.choose import make_transport
from .transport.codec import torch_dtype
from .transport.staged import stage_bytes_for
from .worker import RankContext


@dataclass(frozen=True, eq=False)
class LayerInput:
    """Arguments of MoELayer.forward on this rank (and in dp the homes of all tokens, which it need not know); mine_n: the
    tokens of the step that they belong to. token_T: ids of all tokens, where this rank plans their homes."""

    x: Tensor
    routes: Routes
    homes_T: NDArray[np.integer] | None
    mine_n: NDArray[np.int64]
    returns_T: NDArray[np.integer] | None = None
    token_T: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one rank saw of one step: nanoseconds per layer, the marks of its timer, and what it counted.

    attention_ns_L: attention blocks, norms included (full_model)."""

    layer_ns_L: list[int]
    marks_L: list[Marks]
    step_ns: int
    counter: Counter
    attention_ns_L: list[int] = field(default_factory=list)


class Stack:
    """Layers of `run` on this rank, over a transport and a feed that the context keeps from run to run."""

    scope = "moe_layers"

    def __init__(self, context: RankContext, run: Run) -> None:
        if run.scope != self.scope:
            raise UserError(f"scope={run.scope} for a stack of {self.scope}")
        if context.ranks != run.ep_size:
            raise UserError(f"{context.ranks} ranks for ep_size={run.ep_size}")
        self.context, self.run = context, run
        self.most_rows = most = max_home_tokens(run)
        self.feed = self.make_feed()
        self.spec: DispatchSpec = replace(run.spec, hidden=self.feed.source.hidden)
        staged = stage_bytes_for(self.spec, most * context.ranks, context.ranks, most)
        named = run.cfg["transport"]
        kernels = named.get("kernels", "torch")
        self.transport = open_transport(context, named["name"], staged, kernels, self.fixed_bytes(most))
        self.device = torch.device(getattr(self.transport, "device", "cpu"))
        self.gating = Gating.of(run.model)
        self.dtype = torch_dtype(self.spec.activation_dtype)
        self.placement = run.fitted.placement
        self.device_plan: DevicePlan | None = None
        if planned_on(run) == DEVICE:
            self.device_plan = DevicePlan(run, self.device, self.transport.kernel_path == "triton")
        self._flush = torch.empty(int(flush_mb(run) * 1e6), dtype=torch.uint8, device=self.device)
        self.timer = self.make_timer()
        router = run.recipe.make_replica_router() if self.placement.has_replicas else None
        self.layers: list[MoELayer] = []
        for layer in range(self.placement.num_layers):  # one by one: the weights of a large model take their time
            self.layers += build_layers(
                self.transport,
                self.spec,
                self.placement,
                self.feed.source,
                self.gating,
                self.timer,
                router,
                most,
                layers=[layer],
            )
            context.progress(layer + 1, self.placement.num_layers)

    def fixed_bytes(self, most_rows: int) -> int:
        """Of peer-readable memory that this stack keeps, with at most so many tokens at home on a rank."""
        return 0

    @property
    def core(self) -> int | None:
        """The one core that this rank computes on; None: it has several, or a device."""
        return only_core() if self.device.type == "cpu" else None

    def make_timer(self) -> PhaseTimer:
        """What tells the phases of a layer apart."""
        kind = "blocks" if self.scope == "full_model" else self.run.kind
        return timer_of(self.device, kind, self.context.virtual is not None)

    def make_feed(self) -> Feed:
        """Where hidden states and weights come from. Collective."""
        run, measure = self.run, self.run.cfg["measure"]
        seed, folder = int(run.cfg["seed"]), measure.get("checkpoint")
        return make_feed(self.context, measure["feed"], run.model, run.heldout, seed, folder)

    def inputs(self, routed: RoutedStep) -> list[LayerInput]:
        """The inputs of every layer: own tokens in dp, elsewhere this rank's part of a sum over ranks."""
        rank, dp = self.context.rank, self.spec.flow == "dp"
        token_T = None
        if self.device_plan is not None:
            token_T = torch.from_numpy(self.run.heldout.token_id_T[routed.rows_T].astype(np.int64)).to(self.device)
        inputs = []
        for layer in range(len(self.layers)):
            homes_T = None if routed.homes_TL is None else np.ascontiguousarray(routed.homes_TL[:, layer])
            mine_n = np.flatnonzero(homes_T == rank) if dp else np.arange(len(routed.rows_T))
            x = self.rows(layer, routed.rows_T[mine_n])
            slots_Tk = torch.from_numpy(routed.slots_TLk[mine_n, layer].astype(np.int64)).to(self.device)
            returns_T = None if routed.returns_TL is None else routed.returns_TL[:, layer]
            x = x.to(self.device, self.dtype)
            inputs.append(LayerInput(x, Routes(slots_Tk), homes_T, mine_n, returns_T, token_T))
        return inputs

    def rows(self, layer: int, rows_T: NDArray[np.int64]) -> Tensor:
        """What this rank has of these rows before a layer: in tp flows a share of them, as tensor-parallel attention leaves
        it (shares differ between ranks, so that a mixed-up rank shows)."""
        x_TH = self.feed.rows_TH(layer, rows_T)
        return x_TH if self.spec.flow == "dp" else x_TH * ((2 * self.context.rank + 1) / self.context.ranks**2)

    def forward(self, layer: int, given: LayerInput) -> LayerOutput:
        """Layers of a step in order, where this rank plans them."""
        return self.run_layer(layer, given)

    def run_layer(self, layer: int, given: LayerInput, block: InBlock = ALONE) -> LayerOutput:
        """One layer of a step; in order, where this rank plans them."""
        plan, homes_T = self.device_plan, None if self.spec.flow == "dp" else given.homes_T
        homes: Homes | Callable[[], Homes] | None = homes_T
        if plan is not None:
            assert given.token_T is not None
            homes = partial(plan.homes, layer, given.token_T)
        output = self.layers[layer].forward(given.x, given.routes, homes, returns_T=given.returns_T, block=block)
        if plan is not None:
            plan.carried(output.carried_slots_Tk)
        return output

    def prepare(self, inputs: list[LayerInput]) -> None:
        """Make whatever inputs of these shapes need once. Collective."""

    def timed(self, layer: int, given: LayerInput) -> tuple[int, LayerOutput | None]:
        """(nanoseconds of one layer on this rank, what it gave)."""
        return self.timer.clocked(lambda: self.forward(layer, given))

    def flush_caches(self) -> None:
        """Write measure.flush_mb; done on the device too when it returns."""
        if len(self._flush):
            self._flush.zero_()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

    def execute(self, inputs: list[LayerInput], barrier_each_layer: bool) -> StepResult:
        """Run all layers once. The barrier before a timed piece is not part of it; with one before each layer a step is the
        sum of its layers."""
        self.prepare(inputs)
        self.timer.reset()
        self.transport.counter.reset()
        layer_ns, outputs = [], []  # outputs are freed after the clock
        self.flush_caches()
        self.context.barrier()
        begin = perf_counter_ns()
        for layer, given in enumerate(inputs):
            if barrier_each_layer and layer:
                self.flush_caches()
                self.context.barrier()
            took_ns, output = self.timed(layer, given)
            layer_ns.append(took_ns)
            outputs.append(output)
        step_ns = sum(layer_ns) if barrier_each_layer else perf_counter_ns() - begin
        counter = self.transport.counter
        return StepResult(layer_ns, self.timer.marks_L, step_ns, Counter(counter.rank, counter.ranks, counter.layers))


def flush_mb(run: Run) -> float:
    """Megabytes that a rank writes before each timed layer, so that its caches are cold; 0: they stay warm."""
    size = run.cfg["measure"]["flush_mb"]
    if not isinstance(size, int | float) or not 0 <= size <= 4096:
        raise UserError(f"measure.flush_mb={size}; 0 (warm caches) to 4096, a few times the last cache")
    return float(size)


def max_home_tokens(run: Run) -> int:
    """The most tokens that one rank can be home to in a step: what fixed-capacity exchanges must hold."""
    ranks, shuffled = run.ep_size, run.spec.flow == "tp_shuffled"
    if run.kind == "serve":
        most = int(run.cfg["serving"]["max_batch_tokens"])
        if run.spec.flow == "dp":
            return most
    else:
        steps = list(run.batch_steps())
        if run.spec.flow == "dp":
            return max(int(np.bincount(queue_T, minlength=ranks).max()) for _, queue_T in steps if queue_T is not None)
        most = max(len(rows_T) for rows_T, _ in steps)
    return capacity_of(most, ranks, run.recipe.home_cap if shuffled else 1.0)


def open_transport(
    context: RankContext, name: str, stage_bytes: int = 0, kernels: str = "torch", fixed_bytes: int = 0
) -> Transport:
    """The transport of this name, opened once a pool (again where it must stage or keep more bytes). Collective."""
    if context.virtual is not None and name == "virtual":
        context.virtual.kernel_path = kernels
        return context.virtual
    opened: dict[tuple[str, str], tuple[int, int, Transport]] = context.state.setdefault("transports", {})
    staged, fixed, transport = opened.get((name, kernels), (-1, -1, None))
    if transport is None or staged < stage_bytes or fixed < fixed_bytes:
        if transport is not None:
            transport.close()
        transport = make_transport(name, None, stage_bytes, kernels, fixed_bytes)
        opened[name, kernels] = stage_bytes, fixed_bytes, transport
    return transport
