"""The corpus: what is taken from source files, what is dropped, and that no module is in two splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsa_jax.models.train import corpus, docstrings
from dsa_jax.models.train.documents import Document, normalise


def document(module: str, text: str, source: str = "numpy") -> Document:
    return Document(source=source, module=module, name=module, text=text)


def test_normalise_removes_trailing_space_tabs_and_runs_of_empty_lines():
    assert normalise("\n a \t\r\n\tb  \n\n\n\n\nc\n") == " a\n        b\n\n\nc"


def test_split_is_a_function_of_the_name_with_about_the_wanted_shares():
    names = [f"package.module{number}" for number in range(4000)]
    splits = [corpus.split_of(name) for name in names]
    assert splits == [corpus.split_of(name) for name in names]
    for split, percent in corpus.SPLIT_PERCENT.items():
        # Standard deviation of the share is at most 0.4 percentage points.
        assert splits.count(split) / 40 == pytest.approx(percent, abs=1.6)
    assert set(splits) == set(corpus.SPLITS)


def test_split_of_known_names_does_not_move():
    """Another hash would silently mix a shipped model's training text into its held-out text."""
    assert corpus.split_of("scipy.stats._stats_py") == "heldout"
    assert corpus.split_of("numpy") == "validation"
    assert corpus.split_of("scipy.special") == "train"


def test_deduplicate_ignores_headings_and_drops_near_repeats_and_short_texts():
    lines = [f"line number {number} of a docstring" for number in range(6)]
    first = document("a", "a.f(x)\n\n" + "\n".join(lines))
    alias = document("b", "b.g(y)\n\n" + "\n".join(lines))
    # Three of five pairs of lines are repeats: more than half.
    near = document("c", "c.h(z)\n\n" + "\n".join([*lines[:4], "another line of text", "and one more line"]))
    other = document(
        "d", "d.k(z)\n\n" + "\n".join([*lines[:2], *(f"something else, part {n}" for n in range(4))])
    )
    short = document("e", "e.m()\n\nSee above.")
    assert corpus.deduplicate([first, alias, near, other, short]) == [first, other]


def test_parsed_documents_takes_docstrings_with_signatures_and_skips_tests(tmp_path: Path):
    package = tmp_path / "package"
    (package / "tests").mkdir(parents=True)
    (package / "__init__.py").write_text('"""The package."""\nraise RuntimeError("must not be run")\n')
    (package / "part.py").write_text(
        'class Thing:\n    """A thing."""\n\n    def act(self, x: int = 1, *rest):\n        """Acts.\n\n'
        '        Really.\n        """\n\n    def template(self):\n        """Takes %(params)s."""\n'
    )
    (package / "broken.py").write_text("def (:\n")
    (package / "tests" / "test_part.py").write_text('"""Not documentation."""\n')
    found = [(d.module, d.text) for d in docstrings.parsed_documents("numpy", "package", package)]
    assert found == [
        ("package", "package\n\nThe package."),
        ("package.part", "package.part.Thing\n\nA thing."),
        ("package.part", "package.part.Thing.act(self, x: int=1, *rest)\n\nActs.\n\nReally."),
    ]


def test_save_and_load_keep_every_document_and_count_it(tmp_path: Path):
    texts = ["word " * 10, "ünïcode λ → ∑ and more", 'quotes " and \\ backslashes \u2028 separators']
    documents = [
        document("numpy", texts[0]),
        document("scipy.special", texts[1], "scipy"),
        document("scipy.special", texts[2], "scipy"),
    ]
    facts = corpus.save(documents, tmp_path)
    assert corpus.load(tmp_path) == documents
    assert corpus.load_manifest(tmp_path) == facts
    assert facts["characters"] == sum(len(text) for text in texts)
    assert facts["sources"]["scipy"] | {"version": ""} == {
        "modules": 1,
        "documents": 2,
        "characters": len(texts[1]) + len(texts[2]),
        "licence": "BSD-3-Clause",
        "version": "",
    }
    assert facts["splits"]["validation"] == {"modules": 1, "documents": 1, "characters": len(texts[0])}


def test_load_names_the_missing_file_and_the_step_that_makes_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"corpus\.jsonl\.xz.*models\.train corpus"):
        corpus.load(tmp_path)
