"""The training text: Python's help topics and the docstrings of Python, NumPy, SciPy and JAX as installed.

Docstrings are read from the parsed source files, without running them. Text that exists only at run time (C functions,
docstrings filled in from templates) is added by importing the packages' modules. Nothing is fetched.

A document is one docstring under its qualified name and signature. Documents are grouped by the module whose source
holds them, and whole modules go to one split, chosen by a hash of the module's name.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from dsa_jax.models.train.docstrings import collect
from dsa_jax.models.train.documents import Document

SPLITS = ("train", "validation", "heldout")
SPLIT_PERCENT = {"validation": 4, "heldout": 6}
"""Share of the modules in the two small splits; the rest is trained on."""

LICENCES = {"python": "PSF-2.0", "numpy": "BSD-3-Clause", "scipy": "BSD-3-Clause", "jax": "Apache-2.0"}
MINIMUM_CHARACTERS = 40
"""Shorter docstrings ("See above.") teach nothing and are dropped."""

RUN = 2
REPEATED_SHARE = 0.5
"""A document is a near repeat if more than this share of its runs of `RUN` lines stand in earlier documents."""

_CORPUS_NAME = "corpus.jsonl.xz"
_MANIFEST_NAME = "manifest.json"


def split_of(module: str) -> str:
    """The split of a module: a hash of its name, hence the same on every machine and for every corpus.

    Args:
        module: dotted module name.

    Returns:
        One of `SPLITS`.
    """
    draw = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") % 100
    for name, percent in SPLIT_PERCENT.items():
        if draw < percent:
            return name
        draw -= percent
    return "train"


def deduplicate(documents: Iterable[Document]) -> list[Document]:
    """Drops repeats, near repeats (most of the lines stand in earlier documents) and what is too short to use.

    The heading line (name and signature) is left out of the comparison, so that an alias does not count as new text.
    Near repeats matter for the split: a method's text inherited in another module must not be held out and trained on.
    """
    seen: set[tuple[str, ...]] = set()
    kept = []
    for document in documents:
        body = document.text.partition("\n\n")[2] or document.text
        if len(body) < MINIMUM_CHARACTERS:
            continue
        lines = [line.strip() for line in body.split("\n") if line.strip()]
        runs = {tuple(lines[start : start + RUN]) for start in range(max(1, len(lines) - RUN + 1))}
        if len(runs & seen) <= REPEATED_SHARE * len(runs):
            kept.append(document)
            seen |= runs
    return kept


def build() -> list[Document]:
    """Collects the corpus from this installation, ordered by source, module and place in the module.

    Returns:
        Documents with distinct docstrings.
    """
    collected = deduplicate(collect())
    order = {name: number for number, name in enumerate(LICENCES)}
    return sorted(collected, key=lambda document: (order[document.source], document.module))


def manifest(documents: Iterable[Document]) -> dict:
    """Counts of the corpus by source and split, with versions and licences.

    Returns:
        A mapping ready for JSON: per source its licence, version, modules, documents and characters; per split the
        modules, documents and characters; the totals and the digest of all text.
    """
    sources: dict[str, dict] = {}
    splits: dict[str, dict] = {}
    modules: dict[str, set] = defaultdict(set)
    digest = hashlib.sha256()
    total = 0
    for document in documents:
        split = split_of(document.module)
        for group, key in ((sources, document.source), (splits, split)):
            entry = group.setdefault(key, {"modules": 0, "documents": 0, "characters": 0})
            entry["documents"] += 1
            entry["characters"] += len(document.text)
            modules[key].add(document.module)
        total += len(document.text)
        digest.update(document.text.encode())
    for key, entry in [*sources.items(), *splits.items()]:
        entry["modules"] = len(modules[key])
    for name, entry in sources.items():
        entry["licence"] = LICENCES[name]
        entry["version"] = platform.python_version() if name == "python" else metadata.version(name)
    return {"characters": total, "sources": sources, "splits": splits, "sha256": digest.hexdigest()}


def save(documents: list[Document], folder: Path) -> dict:
    """Writes the corpus as one compressed file with its manifest beside it.

    Args:
        documents: what to write, in order.
        folder: created if absent.

    Returns:
        The manifest written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in documents)
    (folder / _CORPUS_NAME).write_bytes(lzma.compress(lines.encode(), preset=9))
    facts = manifest(documents)
    (folder / _MANIFEST_NAME).write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def load(folder: Path) -> list[Document]:
    """Reads a corpus that `save` wrote.

    Args:
        folder: the folder given to `save`.

    Returns:
        The documents in their order.

    Raises:
        ValueError: there is no corpus in the folder.
    """
    path = folder / _CORPUS_NAME
    if not path.is_file():
        raise ValueError(
            f"load corpus: folder {str(folder)!r} holds no {_CORPUS_NAME}; "
            "want a folder written by `python -m dsa_jax.models.train corpus --data FOLDER`: run that first"
        )
    # Not splitlines(): JSON leaves other line separators of Unicode as they are.
    lines = lzma.decompress(path.read_bytes()).decode().split("\n")
    return [Document(**json.loads(line)) for line in lines if line]


def load_manifest(folder: Path) -> dict:
    """Reads the manifest beside a corpus."""
    return json.loads((folder / _MANIFEST_NAME).read_text())


def by_module(documents: Iterable[Document]) -> Mapping[str, list[Document]]:
    """Groups documents by module, modules and documents in their order."""
    groups: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        groups[document.module].append(document)
    return groups
