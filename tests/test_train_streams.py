"""Tokenizer and token streams: lossless, split by module, each window once an epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsa_jax.models.train import corpus, streams, tokenizer
from dsa_jax.models.train.documents import Document

TEXTS = [
    "numpy.sum(a, axis=None)\n\nSum of array elements over a given axis.\n\n    Parameters\n    ----------\n",
    ">>> np.sum([[0, 1], [0, 5]], axis=0)\narray([0, 6])\n",
    "def f(x_range, *args):\n        return 3.14159 * x_range\n",
]


@pytest.fixture(scope="module")
def trained():
    return tokenizer.train(TEXTS * 3, vocabulary=300)


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        "",
        " ",
        "\n\n   \n",
        "tab\tand\r\nreturn",
        "λ → ∑ 日本語 🙂",
        "trailing   ",
        "   leading",
        "2048",
        "\x00\x7f",
    ],
)
def test_tokenizer_gives_back_what_it_took(trained, text: str):
    assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_spells_numbers_digit_by_digit_and_keeps_indentation_together(trained):
    assert trained.encode("3142").tokens == ["3", "1", "4", "2"]
    pieces = [text for text, _ in trained.pre_tokenizer.pre_tokenize_str("a:\n\n    b 12")]
    assert pieces == ["a", ":", "ĊĊĠĠĠ", "Ġb", "Ġ1", "2"]


def test_special_tokens_come_first(trained):
    assert tokenizer.specials(trained) == (0, 1)
    assert trained.get_vocab_size() == 300


def test_tokenizer_refuses_a_vocabulary_without_room_and_text_without_merges():
    with pytest.raises(ValueError, match="vocabulary=257.*at least 258"):
        tokenizer.train(TEXTS, vocabulary=257)
    with pytest.raises(ValueError, match="want 2048.*smaller vocabulary"):
        tokenizer.train(["ab"], vocabulary=2048)


def test_token_bytes_counts_the_text(trained):
    sizes = streams.token_bytes(trained)
    for text in [*TEXTS, "λ → ∑"]:
        assert sizes[trained.encode(text).ids].sum() == len(text.encode())
    assert sizes[:2].tolist() == [0, 0]


def test_encode_brackets_documents_and_keeps_modules_apart(trained, tmp_path: Path):
    modules = {"train": "scipy.special", "validation": "numpy", "heldout": "scipy.stats._stats_py"}
    documents = [
        Document(source="scipy", module=module, name=module, text=text)
        for module in modules.values()
        for text in TEXTS[:2]
    ]
    encoded = streams.encode(documents, trained)
    expected = [token for text in TEXTS[:2] for token in [0, *trained.encode(text).ids, 1]]
    for split in corpus.SPLITS:
        assert [run.tolist() for run in encoded.modules(split)] == [expected]
    streams.save(encoded, trained, tmp_path)
    loaded, again = streams.load(tmp_path)
    assert again.to_str() == trained.to_str()
    for split in corpus.SPLITS:
        assert loaded.tokens[split].tolist() == expected
        assert loaded.starts[split].tolist() == [0, len(expected)]


def test_load_names_what_is_missing(tmp_path: Path):
    with pytest.raises(ValueError, match=r"tokens\.npz, tokenizer\.json"):
        streams.load(tmp_path)


def test_windows_take_the_longest_first_and_no_token_twice():
    runs = [np.arange(25), 100 + np.arange(7), 200 + np.arange(3)]
    found = streams.windows(runs, [4, 10])
    assert list(found) == [10, 4]
    assert found[10].tolist() == [list(range(10)), list(range(10, 20))]
    assert found[4].tolist() == [[20, 21, 22, 23], [100, 101, 102, 103]]


def test_sampler_shows_every_window_once_an_epoch_and_the_same_after_a_resume():
    sampler = streams.Sampler(105, length=10, batch=3, seed=5)
    assert sampler.windows == 9  # (105 - 10) // 10
    starts = sampler.starts(0, 6)
    first, second = starts[:3].ravel(), starts[3:].ravel()
    for epoch in (first, second):
        assert np.diff(np.sort(epoch)).tolist() == [10] * 8
        assert epoch.min() >= 0
        assert epoch.max() + 10 <= 105
    assert first.tolist() != second.tolist()
    resumed = streams.Sampler(105, length=10, batch=3, seed=5)
    assert resumed.starts(4, 2).tolist() == starts[4:].tolist()
    assert streams.Sampler(105, length=10, batch=3, seed=6).starts(0, 3).tolist() != starts[:3].tolist()


def test_sampler_refuses_too_little_text():
    with pytest.raises(ValueError, match="1 contexts of 10.*batch=3"):
        streams.Sampler(20, length=10, batch=3, seed=0)
