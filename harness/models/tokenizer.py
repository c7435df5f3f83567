"""The tiny model's byte-level BPE tokenizer (any text round-trips; no unknown token)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from semmoe.errors import UserError

from .checkpoint import END_OF_TEXT_ID, TINY_DIR
from .corpus import Document

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: list[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Learn `vocab_size` entries from `texts` and write tokenizer.json and tokenizer_config.json into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "tokenizer.json.partial"
    tokenizer.save(str(partial), pretty=False)
    os.replace(partial, folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def load_tokenizer(folder: Path = TINY_DIR) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; `python -m harness.models.train` makes one")
    return Tokenizer.from_file(str(path))


def encode_documents(documents: list[Document], folder: Path) -> np.ndarray:
    """All documents end to end, each opened by the end-of-text token (uint16)."""
    encoded = load_tokenizer(folder).encode_batch([document.text for document in documents])
    ids = [np.asarray([END_OF_TEXT_ID, *encoding.ids], dtype=np.uint16) for encoding in encoded]
    return np.concatenate(ids) if ids else np.empty(0, dtype=np.uint16)
