"""`semmoe trace`: look at a trace, record one from a Hugging Face MoE, or make a synthetic one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .errors import UserError
from .files import check_writable
from .inputs import ASSETS, load_trace
from .profile import Profile
from .trace import RoutingTrace


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="semmoe trace")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="sizes, domains and load of a trace; checks the whole file")
    info.add_argument("path", help="trace file; asset:traces/tiny_docs.npz is the bundled one")
    record = commands.add_parser("record", help="record routes of a Hugging Face MoE (needs semmoe[record])")
    record.add_argument(
        "model", help="local model directory with config.json, safetensors and tokenizer; tiny: the bundled"
    )
    record.add_argument(
        "text", nargs="*", type=Path, help="text files, one request each; none with 'tiny': its own corpus"
    )
    record.add_argument("--out", type=Path, required=True)
    record.add_argument("--requests", type=int, default=160, help="requests to record from the tiny model's corpus")
    record.add_argument("--max-tokens", type=int, default=192, help="longest request, prompt and output together")
    record.add_argument("--new-tokens", type=int, default=0, help="tokens to generate after each text")
    record.add_argument("--seed", type=int, default=0)
    synthetic = commands.add_parser("synthetic", help="make a synthetic trace: key=value for the dials of Synthetic")
    synthetic.add_argument("dials", nargs="*", help="for example requests=200 topics=8 concentration=0.9 seed=1")
    synthetic.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.command != "info":
        check_writable(options.out)
    return {"info": _info, "record": _record, "synthetic": _synthetic}[options.command](options)


def describe(trace: RoutingTrace) -> str:
    """A few lines on what a trace holds."""
    load_LE = Profile.fit(trace).load_LE
    skew = load_LE.max(axis=1) / load_LE.mean(axis=1)
    domains, counts = np.unique(trace.domain_R, return_counts=True)
    shown = ", ".join(f"{d} ({c})" for d, c in list(zip(domains, counts, strict=True))[:6])
    more = f" and {len(domains) - 6} more" if len(domains) > 6 else ""
    return "\n".join(
        [
            f"{trace.path}: {trace.model}, {trace.num_experts} experts, top-{trace.top_k}, {trace.num_layers} MoE layers",
            f"requests {trace.num_requests}, tokens {trace.num_tokens} ({int(trace.prompt_len_R.sum())} prompt), "
            f"{len(np.unique(trace.token_id_T))} distinct of {trace.vocab_size}",
            f"domains: {shown}{more}",
            f"expert load max/mean by layer: {skew.min():.2f} to {skew.max():.2f}",
            f"digest {trace.digest}",
        ]
    )


def _info(options: argparse.Namespace) -> int:
    print(describe(load_trace({"path": options.path})))
    return 0


def _bars_on_terminals_only() -> None:
    """transformers shows its progress bars everywhere unless told otherwise."""
    with contextlib.suppress(ImportError):
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()


def _record(options: argparse.Namespace) -> int:
    _bars_on_terminals_only()
    if options.model == "tiny" and not options.text:
        from .cli import _backend

        trace = _backend("harness.models.record_tiny", "record").record_tiny(
            options.out, options.requests, options.max_tokens, options.seed
        )
    else:
        from .sources.text import record_files

        directory = ASSETS / "tiny" if options.model == "tiny" else Path(options.model)
        trace = record_files(directory, options.text, options.max_tokens, options.new_tokens, options.seed)
        trace.save(options.out)
    print(describe(RoutingTrace.load(options.out)))
    return 0


def _synthetic(options: argparse.Namespace) -> int:

    dials: dict[str, object] = {"_target_": "semmoe.sources.synthetic.Synthetic"}
    for word in options.dials:
        key, sign, value = word.partition("=")
        if not sign:
            raise UserError(f"'{word}': key=value is right, such as requests=200")
        dials[key] = _number(value)
    trace = load_trace(dials)
    trace.save(options.out)
    print(describe(RoutingTrace.load(options.out)))
    return 0


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
