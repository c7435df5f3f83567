"""Train the tiny model: `python -m harness.models.train` (about half an hour on two CPU cores).

Next-token cross entropy on windows of the training documents, both domains in equal parts, plus the load-balancing
loss of Switch Transformers (equation 4, coefficient 0.01) on the gates. A stopped run continues from its last state
file. The bundled weights were made with `--stop-at 1400`; training.json beside them holds their figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from semmoe.errors import UserError

from .checkpoint import TINY_DIR, save_model
from .corpus import DOMAINS, Document, load_corpus
from .recall import recall_per_layer
from .tiny import MoECapture, TinyConfig, TinyModel
from .tokenizer import encode_documents, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    out: str = str(TINY_DIR)
    state: str = "outputs/tiny_train.pt"  # resumable state: model, optimiser, step
    steps: int = 1500
    stop_at: int = 1500  # end here, before the schedule of `steps` does
    sequences: int = 16
    sequence_tokens: int = 256
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    balance: float = 0.01
    weight_decay: float = 0.05
    save_every: int = 100
    held_out_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.sequences, self.sequence_tokens, self.save_every) < 1:
            raise UserError("steps, sequences, sequence_tokens and save_every must be at least 1")


def balance_loss(gate_logits_TE: Tensor, experts_Tk: Tensor) -> Tensor:
    """E * sum over experts of (share of assignments) * (mean gate probability): 1 when balanced.

    The gradient flows through the probabilities alone.
    """
    num_experts = gate_logits_TE.shape[1]
    share_E = torch.bincount(experts_Tk.reshape(-1), minlength=num_experts) / experts_Tk.numel()
    return num_experts * (share_E * gate_logits_TE.softmax(-1).mean(0)).sum()


def draw_batch(streams: list[np.ndarray], sequences: int, tokens: int, rng: np.random.Generator) -> Tensor:
    """[sequences, tokens + 1] windows at random places, the streams (one per domain) in turn."""
    rows = []
    for i in range(sequences):
        stream = streams[i % len(streams)]
        start = int(rng.integers(0, len(stream) - tokens - 1))
        rows.append(stream[start : start + tokens + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def learning_rate_factor(step: int, options: TrainOptions) -> float:
    """Linear warm-up, then half a cosine down to 5 % of the peak."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def held_out_loss(model: TinyModel, streams: list[np.ndarray], tokens: int, windows: int = 32) -> dict[str, float]:
    """Mean next-token loss (nats) per domain over fixed windows spread evenly over its held-out stream."""
    losses = {}
    for domain, stream in zip(DOMAINS, streams, strict=True):
        starts = np.linspace(0, len(stream) - tokens - 1, windows).astype(int)
        batch = torch.from_numpy(np.stack([stream[s : s + tokens + 1] for s in starts]).astype(np.int64))
        parts = [float(token_loss(model(part[:, :-1]), part[:, 1:])) for part in batch.split(8)]
        losses[domain] = sum(parts) / len(parts)
    return losses


def train_step(
    model: TinyModel, optimiser: torch.optim.Optimizer, batch: Tensor, options: TrainOptions
) -> tuple[float, float]:
    """(next-token loss, balance loss averaged over layers) of one update."""
    capture = MoECapture()
    loss = token_loss(model(batch[:, :-1], capture=capture), batch[:, 1:])
    pairs = zip(capture.gate_logits, capture.experts, strict=True)
    balance = torch.stack([balance_loss(logits, experts) for logits, experts in pairs]).mean()
    optimiser.zero_grad(set_to_none=True)
    (loss + options.balance * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item(), balance.item()


def make_optimiser(model: TinyModel, options: TrainOptions) -> torch.optim.AdamW:
    matrices = [p for name, p in model.named_parameters() if p.ndim >= 2 and name != "embed_VH"]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or name == "embed_VH"]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def save_state(path: Path, model: TinyModel, optimiser: torch.optim.Optimizer, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, partial)
    os.replace(partial, path)


def load_state(path: Path, model: TinyModel, optimiser: torch.optim.Optimizer) -> int:
    """The step to continue with; 0 without a state file."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])


def streams_of(documents: Iterable[Document], folder: Path) -> list[np.ndarray]:
    """Token streams, one per domain, documents end to end."""
    return [encode_documents([doc for doc in documents if doc.domain == domain], folder) for domain in DOMAINS]


def train(options: TrainOptions) -> TinyModel:
    torch.manual_seed(options.seed)
    folder = Path(options.out)
    train_documents, held_out_documents = (
        load_corpus(part, options.held_out_fraction, options.seed) for part in ("train", "held_out")
    )
    config = TinyConfig()
    state_path = Path(options.state)
    if not (state_path.is_file() and (folder / "tokenizer.json").is_file()):
        train_tokenizer([doc.text for doc in train_documents], config.vocab_size, folder)
    streams, held_out = streams_of(train_documents, folder), streams_of(held_out_documents, folder)
    print(
        "training tokens",
        dict(zip(DOMAINS, map(len, streams), strict=True)),
        "held-out",
        dict(zip(DOMAINS, map(len, held_out), strict=True)),
        flush=True,
    )
    model = TinyModel(config, options.seed)
    optimiser = make_optimiser(model, options)
    first = load_state(state_path, model, optimiser)
    began = time.monotonic()
    last = min(options.steps, options.stop_at)
    for step in range(first, last):
        for group in optimiser.param_groups:
            group["lr"] = options.learning_rate * learning_rate_factor(step, options)
        rng = np.random.default_rng([options.seed, step])  # by step, so that a resumed run draws the same windows
        batch = draw_batch(streams, options.sequences, options.sequence_tokens, rng)
        loss, balance = train_step(model, optimiser, batch, options)
        if (step + 1) % 10 == 0 or step + 1 == last:
            print(progress(step + 1, first, last, time.monotonic() - began, loss, balance), flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == last:
            save_state(state_path, model, optimiser, step + 1)
            save_model(model, folder)
    report(model, held_out, options, folder)
    return model


def progress(step: int, first: int, steps: int, elapsed_s: float, loss: float, balance: float) -> str:
    per_step_s = elapsed_s / (step - first)
    bar = "#" * (20 * step // steps)
    return (
        f"[{bar:<20}] {step}/{steps} loss {loss:.3f} balance {balance:.3f} {per_step_s:.2f} s/step, "
        f"{(steps - step) * per_step_s / 60:.0f} min left"
    )


def report(model: TinyModel, held_out: list[np.ndarray], options: TrainOptions, folder: Path) -> None:
    """Print and write beside the weights: held-out loss, and how well the token id alone predicts the experts."""
    losses = held_out_loss(model, held_out, options.sequence_tokens)
    recall = recall_per_layer(model, held_out, options.sequence_tokens)
    card = {
        "steps": min(options.steps, options.stop_at),
        "schedule_steps": options.steps,
        "tokens_per_step": options.sequences * options.sequence_tokens,
        "held_out_loss_nats": {domain: round(loss, 4) for domain, loss in losses.items()},
        f"held_out_token_recall_at_{model.config.top_k}": [round(value, 4) for value in recall],
    }
    (folder / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m harness.models.train", description=(__doc__ or "").split("\n\n")[0]
    )
    for option in fields(TrainOptions):
        parser.add_argument("--" + option.name.replace("_", "-"), type=type(option.default), default=option.default)
    train(TrainOptions(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
