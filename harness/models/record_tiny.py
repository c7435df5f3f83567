"""Record the bundled trace: `python -m harness.models.record_tiny` writes semmoe/assets/traces/tiny_docs.npz.

Requests are windows of documents that the tiny model never saw in training: held-out files of the standard library,
and this project's own package. The output part of a request is the document's own continuation, fed to the model as
if it had been generated (a model this small would soon repeat itself).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

import semmoe
from semmoe.errors import UserError
from semmoe.sources.huggingface import record
from semmoe.trace import RoutingTrace

from .checkpoint import END_OF_TEXT_ID, TINY_DIR
from .corpus import DOMAINS, Document, documents_of, load_corpus
from .tokenizer import load_tokenizer

TRACE_PATH = Path(semmoe.__file__).parent / "assets" / "traces" / "tiny_docs.npz"
PROMPT_SHARE = (0.5, 0.83)  # of a request's tokens, drawn evenly: two thirds on average
LENGTH_SHARE = (0.5, 1.5)  # of the mean number of tokens, drawn evenly
OWN_SHARE = 0.1  # of the requests come from this project's own package


def record_tiny(
    out_path: str | Path = TRACE_PATH,
    requests: int = 160,
    tokens: int = 192,
    seed: int = 0,
    *,
    model_dir: Path = TINY_DIR,
    gate_weights: bool = False,
) -> RoutingTrace:
    """Record and write `requests` requests of `tokens` tokens on average, half of them of each domain."""
    if requests < len(DOMAINS) or tokens < 8:
        raise UserError(f"requests={requests} must be at least {len(DOMAINS)} and tokens={tokens} at least 8")
    from transformers import AutoModelForCausalLM

    labelled = draw_requests(requests, tokens, seed, model_dir)
    lengths = np.array([len(ids_T) for _, ids_T in labelled])
    share_R = np.random.default_rng(seed).uniform(*PROMPT_SHARE, len(lengths))
    # fp32, as the harness runs this model: bf16 would flip near-ties of the gate
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    trace = record(
        model,
        [ids_T.tolist() for _, ids_T in labelled],
        [domain for domain, _ in labelled],
        prompt_len=np.round(lengths * share_R).astype(np.int32).tolist(),
        gate_weights=gate_weights,
        name="tiny",
    )
    trace.save(out_path)
    return trace


def draw_requests(requests: int, tokens: int, seed: int, model_dir: Path) -> list[tuple[str, np.ndarray]]:
    """(domain, token ids) of each request, the domains in turn; windows never overlap within a document."""
    package = Path(semmoe.__file__).parent
    own = documents_of(package, sorted(path.relative_to(package) for path in package.rglob("*.py")))
    held_out = load_corpus("held_out")
    pools = []
    for i, domain in enumerate(DOMAINS):
        wanted = len(range(i, requests, len(DOMAINS)))
        few = round(OWN_SHARE * wanted)
        windows: list[np.ndarray] = []
        for pool, (documents, share) in enumerate(((own, few), (held_out, wanted - few))):
            rng = np.random.default_rng([seed, i, pool])  # one each: the package may grow without moving the rest
            chosen = [doc for doc in documents if doc.domain == domain]
            windows += cut_windows(chosen, share, tokens, rng, model_dir)
        if len(windows) < wanted:
            raise UserError(f"domain {domain}: the unseen text gives {len(windows)} requests, {wanted} are asked for")
        pools.append([windows[j] for j in np.random.default_rng([seed, i]).permutation(wanted)])
    return [(DOMAINS[i % len(DOMAINS)], pools[i % len(DOMAINS)][i // len(DOMAINS)]) for i in range(requests)]


def cut_windows(
    documents: Iterable[Document], wanted: int, tokens: int, rng: np.random.Generator, model_dir: Path
) -> list[np.ndarray]:
    """At most `wanted` windows of varied length, each opened by the end-of-text token, spread over all documents."""
    tokenizer = load_tokenizer(model_dir)
    low, high = (round(share * tokens) for share in LENGTH_SHARE)
    windows = []
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        rest = np.asarray(encoding.ids, dtype=np.int64)
        while len(rest) >= low:
            length = int(rng.integers(low, high + 1)) - 1
            windows.append(np.concatenate([[END_OF_TEXT_ID], rest[:length]]))
            rest = rest[length:]
    return [windows[j] for j in rng.permutation(len(windows))[:wanted]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.models.record_tiny", description=(__doc__ or "")[:70])
    parser.add_argument("--out", default=str(TRACE_PATH))
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=192, help="mean tokens of a request")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    trace = record_tiny(options.out, options.requests, options.tokens, options.seed)
    size = Path(options.out).stat().st_size
    print(
        f"{options.out}: {trace.num_requests} requests, {trace.num_tokens} tokens, {size / 1e6:.2f} MB, {trace.digest}"
    )


if __name__ == "__main__":
    main()
