"""Record routes over text files: tokenise, run the model, label each request with its file's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..trace import RoutingTrace
from .huggingface import record


def record_files(
    model_dir: Path, paths: Sequence[Path], max_tokens: int = 192, new_tokens: int = 0, seed: int = 0
) -> RoutingTrace:
    """One request per text file, cut to `max_tokens` prompt tokens; its domain is the name of the file's folder.

    Raises UserError for no files, an unreadable file, or one that is empty after tokenising.
    """
    if not paths:
        raise UserError("semmoe trace record needs at least one text file (or the model 'tiny' for its own corpus)")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("tokenizers is not installed; pip install 'semmoe[record]'") from None
    vocabulary = model_dir / "tokenizer.json"
    if not vocabulary.is_file():
        raise UserError(f"{vocabulary}: no such file; the model directory must hold the tokenizer as tokenizer.json")
    tokenizer = Tokenizer.from_file(str(vocabulary))
    requests, domains = [], []
    for path in paths:
        try:
            ids = tokenizer.encode(path.read_text(encoding="utf-8")).ids[:max_tokens]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not readable as UTF-8 text ({error})") from None
        if not ids:
            raise UserError(f"{path}: holds no tokens; leave empty files out")
        requests.append(ids)
        domains.append(path.resolve().parent.name)
    return record(model_dir, requests, domains, max_new_tokens=new_tokens, temperature=0.8, seed=seed)
