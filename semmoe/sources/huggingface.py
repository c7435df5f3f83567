"""Record the routes of any Hugging Face mixture-of-experts model, through hooks on its routers.

Routers come in two styles, both read at run time:
  chosen  the router returns the ids that it chose (transformers 5, and the DeepSeek and GPT-OSS families before it):
          an integer tensor [T, k], beside it the combine weights [T, k], or scores [T, E] to gather them from;
  logits  the router is a plain linear layer [T, E] (Mixtral, Qwen3-MoE, OLMoE in transformers 4): softmax, then top k.
Requests run one at a time, so nothing is padded and no padding row can enter the trace. torch and transformers are
imported on first use: planning and simulation work without them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semmoe.errors import UserError
from semmoe.trace import RoutingTrace

if TYPE_CHECKING:
    from torch import Tensor, nn

ROUTER_NAMES = ("gate", "router")
LAYER_NUMBER = re.compile(r"\.(\d+)\.")


def record(
    model: str | Path | nn.Module,
    requests: Sequence[Sequence[int]],
    domain: str | Sequence[str] = "unknown",
    *,
    prompt_len: Sequence[int] | None = None,
    max_new_tokens: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    gate_weights: bool = False,
    device: str = "cpu",
    name: str | None = None,
) -> RoutingTrace:
    """The trace of R requests.

    model           a checkpoint folder (or hub name), loaded in its own dtype onto `device`; or a loaded causal LM
    requests        R lists of token ids
    domain          one label for all requests, or R labels
    prompt_len      how many tokens of each request are prompt (default: all), where the outputs are known already
    max_new_tokens  generate this many tokens after each prompt: greedily, or sampled at `temperature` > 0. The last
                    one is never an input of the model, so a request gains max_new_tokens - 1 tokens
    gate_weights    keep the combine weights too (float16)

    Raises UserError for a model without routers, for routers of a third style, and for bad requests.
    """
    import torch

    if isinstance(model, str | Path):
        name, model = name or Path(model).name, _load(model, device)
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    _check_requests(requests, prompt_len, max_new_tokens, int(config.vocab_size))
    recorder = RouterRecorder(model, config)
    generator = torch.Generator().manual_seed(seed)
    tokens: list[list[int]] = []
    with torch.inference_mode(), _evaluating(model), recorder.attached():
        for request in requests:
            tokens.append(_run(model, list(request), max_new_tokens, temperature, generator))
            recorder.check(sum(map(len, tokens)))
    lengths = [len(request) for request in tokens]
    prompts = prompt_len if prompt_len is not None else [len(request) for request in requests]
    labels = [domain] * len(requests) if isinstance(domain, str) else list(domain)
    return RoutingTrace(
        model=name or str(getattr(config, "model_type", "huggingface")),
        num_experts=recorder.num_experts,
        vocab_size=int(config.vocab_size),
        experts_TLk=recorder.experts_TLk(),
        token_id_T=np.concatenate([np.asarray(request, dtype=np.int32) for request in tokens]),
        request_offset_R1=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_len_R=np.asarray(prompts, dtype=np.int32),
        domain_R=np.asarray(labels, dtype=np.str_),
        layer_ids_L=np.asarray(recorder.layer_ids, dtype=np.int32),
        gate_weight_TLk=recorder.weights_TLk().astype(np.float16) if gate_weights else None,
    )


class RouterRecorder:
    """Collects what every router chose while attached; rows are in the order in which tokens entered the model."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        found = sorted(find_routers(model))
        if not found:
            raise UserError(
                f"{type(model).__name__} is no mixture-of-experts model that can be recorded: no module has both "
                f"`experts` and one of {', '.join(ROUTER_NAMES)}"
            )
        self.layer_ids = [layer for layer, _, _ in found]
        self.config = config
        self.num_experts = _num_experts(config, found[0][2])
        self._layers = [(name, parent) for _, name, parent in found]
        self._experts: list[list[Tensor]] = [[] for _ in found]
        self._weights: list[list[Tensor]] = [[] for _ in found]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks in place for the duration of the block, and gone after it whatever happens."""
        handles = []
        for index, (name, parent) in enumerate(self._layers):
            router = getattr(parent, name.rpartition(".")[2])
            handles.append(router.register_forward_hook(self._hook(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, index: int) -> Any:
        name, parent = self._layers[index]

        def keep(router: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            experts_Tk, weights_Tk = read_router_output(output, router, parent, self.config, name)
            order_Tk = weights_Tk.argsort(dim=-1, descending=True, stable=True)  # some routers leave the k unsorted
            self._experts[index].append(experts_Tk.gather(1, order_Tk).short().cpu())
            self._weights[index].append(weights_Tk.gather(1, order_Tk).float().cpu())

        return keep

    def check(self, tokens: int) -> None:
        """Every router must have seen every token once; fused kernels that bypass it are found here."""
        for (name, _), parts in zip(self._layers, self._experts, strict=True):
            seen = sum(len(part) for part in parts)
            if seen != tokens:
                raise UserError(
                    f"router {name} saw {seen} of {tokens} tokens; load the model without fused MoE kernels "
                    f"(use_kernels=False) and in one process"
                )

    def experts_TLk(self) -> np.ndarray:
        return _stack(self._experts)

    def weights_TLk(self) -> np.ndarray:
        return _stack(self._weights)


def find_routers(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """(decoder layer, name of the router, MoE block) of every block that has both experts and a router."""
    for name, block in model.named_modules():
        for router in ROUTER_NAMES:
            if hasattr(block, router) and hasattr(block, "experts"):
                number = LAYER_NUMBER.search(f".{name}.")
                if number is None:
                    raise UserError(f"MoE block {name}: its name holds no layer number")
                yield int(number[1]), f"{name}.{router}", block


def read_router_output(
    output: Any, router: nn.Module, block: nn.Module, config: Any, name: str
) -> tuple[Tensor, Tensor]:
    """(experts_Tk, weights_Tk) from what a router returned, in either of the two styles."""
    import torch

    parts = [part for part in (output if isinstance(output, tuple | list) else (output,)) if torch.is_tensor(part)]
    chosen = [part.flatten(0, -2) for part in parts if part.ndim >= 2 and not part.is_floating_point()]
    scores = [part.flatten(0, -2) for part in parts if part.ndim >= 2 and part.is_floating_point()]
    if len(chosen) == 1:
        experts_Tk = chosen[0].long()
        for weights in reversed(scores):  # the logits, where returned, come first
            if weights.shape == experts_Tk.shape:
                return experts_Tk, weights
        for weights in reversed(scores):
            if weights.shape[0] == experts_Tk.shape[0] and weights.shape[1] > int(experts_Tk.max()):
                return experts_Tk, weights.gather(1, experts_Tk)
    if len(parts) == 1 and len(scores) == 1:
        return _choose(scores[0], router, block, config, name)
    shapes = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
    raise UserError(
        f"router {name} ({type(router).__name__}) returned ({shapes}); known are expert ids [T, k] with weights, "
        f"or logits [T, E] alone"
    )


def _choose(logits_TE: Tensor, router: nn.Module, block: nn.Module, config: Any, name: str) -> tuple[Tensor, Tensor]:
    """The choice that a block makes itself from the logits of a plain linear gate."""
    if hasattr(block, "route_tokens_to_experts"):  # DeepSeek-like blocks of transformers 4.57
        first, second = block.route_tokens_to_experts(logits_TE)  # type: ignore[operator]
        return (second, first) if first.is_floating_point() else (first, second)
    biased = any(hasattr(module, "e_score_correction_bias") for module in (router, block))
    grouped = (getattr(config, "n_group", None) or 1) > 1
    if biased or grouped or getattr(config, "scoring_func", "softmax") != "softmax":
        raise UserError(
            f"router {name} returns logits alone, and this model does not choose by softmax and top k "
            f"(grouped or biased selection); use a transformers release whose router returns the chosen experts"
        )
    top_k = getattr(config, "num_experts_per_tok", None)
    if top_k is None:
        raise UserError(f"router {name} returns logits alone and the config lacks num_experts_per_tok")
    weights_Tk, experts_Tk = logits_TE.float().softmax(-1).topk(int(top_k), dim=-1)
    if getattr(config, "norm_topk_prob", True):  # Mixtral always renormalises and has no such key
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return experts_Tk, weights_Tk


def _num_experts(config: Any, block: nn.Module) -> int:
    for router in ROUTER_NAMES:
        weight = getattr(getattr(block, router, None), "weight", None)
        if weight is not None:
            return int(weight.shape[0])
    for key in ("n_routed_experts", "num_local_experts", "num_experts"):
        if getattr(config, key, None):
            return int(getattr(config, key))
    raise UserError(f"{type(block).__name__}: the number of experts stands neither in its router nor in the config")


def _load(folder: str | Path, device: str) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UserError("recording needs torch and transformers: pip install 'semmoe[record]'") from None
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto")
        return model.to(device)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: transformers cannot load this model ({str(error).splitlines()[0]})") from None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no router noise) for the block; the earlier mode returns after it."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _run(model: nn.Module, prompt: list[int], new_tokens: int, temperature: float, generator: Any) -> list[int]:
    """Feed one prompt, then what it generates; return all tokens that entered the model."""
    import torch

    device = next(model.parameters()).device
    accepted = inspect.signature(model.forward).parameters
    cache_key = "cache" if "cache" in accepted else "past_key_values"  # renamed during transformers 5
    options: dict[str, Any] = {"use_cache": new_tokens > 1}
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1  # the logits of a long prompt can be larger than the model
    fed: list[int] = []
    step = prompt
    for remaining in range(max(new_tokens, 1), 0, -1):
        output = model(torch.tensor([step], device=device), **options)
        fed += step
        if remaining > 1:
            logits_V, options[cache_key] = output.logits[0, -1].float().cpu(), getattr(output, cache_key)
            if temperature > 0:
                step = torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator).tolist()
            else:
                step = [int(logits_V.argmax())]
    return fed


def _check_requests(
    requests: Sequence[Sequence[int]], prompt_len: Sequence[int] | None, max_new_tokens: int, vocab_size: int
) -> None:
    if not len(requests):
        raise UserError("no requests to record")
    if prompt_len is not None and max_new_tokens:
        raise UserError("prompt_len is for requests with known outputs; with max_new_tokens every request is a prompt")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens} must not be negative")
    for index, request in enumerate(requests):
        if not len(request):
            raise UserError(f"request {index} has no tokens")
        if not 0 <= min(request) <= max(request) < vocab_size:
            raise UserError(f"request {index}: token ids {min(request)}..{max(request)} outside 0..{vocab_size - 1}")


def _stack(parts_L: list[list[Tensor]]) -> np.ndarray:
    """[T, L, k] from one list of [rows, k] parts per layer."""
    import torch

    return torch.stack([torch.cat(parts) for parts in parts_L], dim=1).numpy()
