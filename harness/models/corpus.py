"""Text that every machine has: the Python standard library, in two domains.

`source` is a module's code without comments and docstrings, `docstrings` is the module's docstrings alone, so
the two domains share subjects and words and differ in form. A file belongs to the training or to the held-out part
as a whole, in both domains.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from semmoe.errors import UserError

DOMAINS = ("source", "docstrings")
MIN_CHARACTERS = 200  # shorter documents (empty __init__ files) teach nothing
# Tests repeat themselves, the others are tables rather than prose or code.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data", "_bundled"}
)


@dataclass(frozen=True)
class Document:
    name: str  # path below the root, with forward slashes
    domain: str
    text: str


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The library's Python files in sorted order, relative to `root` (default: the running interpreter's library)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = [path.relative_to(root) for path in _walk(root)]
    return sorted(found, key=lambda path: path.as_posix())


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and path.name not in SKIPPED_FOLDERS and not path.name.startswith("config-"):
            yield from _walk(path)
        elif path.suffix == ".py":
            yield path


def separate(python_text: str) -> dict[str, str]:
    """{'source': code without docstrings and comments, 'docstrings': docstrings joined by blank lines}.

    Source: `ast.unparse`, which drops comments and evens out the layout. Raises SyntaxError for text that is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules are not our concern
        tree = ast.parse(python_text)
    docstrings: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                docstrings.append(docstring.strip())
                node.body = node.body[1:] or [ast.Pass()]
    return {"source": ast.unparse(ast.fix_missing_locations(tree)), "docstrings": "\n\n".join(filter(None, docstrings))}


def documents_of(root: Path, files: list[Path]) -> list[Document]:
    """Both documents of each file, short ones and unreadable files left out."""
    documents = []
    for relative in files:
        try:
            texts = separate((root / relative).read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):  # Python 2 fixtures, files in other encodings
            continue
        documents += [
            Document(relative.as_posix(), domain, text) for domain, text in texts.items() if len(text) >= MIN_CHARACTERS
        ]
    return documents


def is_held_out(file: Path, fraction: float, seed: int) -> bool:
    """Whether a file is held out: by a hash of its path, so that the answer is the same in every Python version."""
    digest = hashlib.sha256(f"{seed}/{file.as_posix()}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@cache
def load_corpus(
    part: str, held_out_fraction: float = 0.1, seed: int = 0, root: Path | None = None
) -> tuple[Document, ...]:
    """Documents of one part ("train" or "held_out") in sorted order of their files; parsed once a process."""
    if part not in ("train", "held_out"):
        raise UserError(f"part={part!r} must be 'train' or 'held_out'")
    root = root or Path(sysconfig.get_paths()["stdlib"])
    wanted = part == "held_out"
    return tuple(
        documents_of(
            root, [path for path in stdlib_files(root) if is_held_out(path, held_out_fraction, seed) == wanted]
        )
    )
