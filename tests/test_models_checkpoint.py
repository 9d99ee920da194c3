"""Checkpoints: what is written is read back, by others too, and damage is described."""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dsa_jax.models import checkpoint
from dsa_jax.models.checkpoint import find, load_pretrained, load_tokenizer, save_pretrained
from dsa_jax.models.tensor_file import read_tensors, write_tensors
from random_models import random_model


@pytest.fixture(scope="module")
def model():
    return random_model("tiny-glm")


@pytest.fixture
def saved(model, tmp_path):
    save_pretrained(
        model, tmp_path / "model", tokenizer=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    )
    return tmp_path / "model"


def leaves(model):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def rewrite(saved, **changes):
    """Change tensors of a saved file; None deletes."""
    tensors = dict(read_tensors(saved / "model.safetensors")) | {
        k.replace("__", "."): v for k, v in changes.items()
    }
    write_tensors(saved / "model.safetensors", {k: v for k, v in tensors.items() if v is not None})


def test_round_trip(model, saved):
    loaded = load_pretrained(saved)
    assert loaded.config == model.config
    wanted = leaves(model)
    for path, value in leaves(loaded).items():
        exact = path[-1] == "e_score_correction_bias"
        assert value.dtype == (np.float32 if exact else ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            value, wanted[path] if exact else wanted[path].astype(ml_dtypes.bfloat16)
        )
    save_pretrained(loaded, saved.parent / "again")
    for name in ("model.safetensors", "config.json"):
        assert (saved.parent / "again" / name).read_bytes() == (saved / name).read_bytes()
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_dtype_in_memory(saved):
    assert {v.dtype for v in leaves(load_pretrained(saved, dtype=jnp.float32)).values()} == {
        np.dtype(np.float32)
    }


def test_other_readers_see_the_released_names(model, saved):
    with safetensors.safe_open(saved / "model.safetensors", "numpy") as file:
        names = set(file.keys())
        expert = file.get_slice("model.layers.1.mlp.experts.7.down_proj.weight").get_shape()
    assert expert == [48, 24]
    assert "model.layers.0.self_attn.indexer.k_norm.bias" in names
    assert "model.layers.4.eh_proj.weight" in names
    # Layers 0, 1 and the prediction layer are full; shared layers have no indexer.
    full = {int(m[1]) for n in names if (m := re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.wk", n))}
    assert full == {i for i, f in enumerate(model.config.dsa.full_layers) if f}
    assert len(full) < 5


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 40_000])
def test_truncated(saved, kept):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="truncated"):
        load_pretrained(saved)


def test_one_byte_short_and_one_too_many(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for content, message in ((whole[:-1], "it is truncated"), (whole + b"x", "longer than its header says")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_pretrained(saved)


def test_wrong_tensors_are_named_together(saved):
    rewrite(
        saved,
        model__norm__weight=None,
        lm_head__weight=np.zeros((96, 47), np.float32),
        model__layers__0__mlp__up_proj__weight=np.zeros((64, 48), np.int32),
        model__layers__2__self_attn__indexer__wk__weight=np.zeros((128, 48), np.float32),
        model__layers__1__mlp__experts__3__up_proj__weight=np.zeros((24, 48), ml_dtypes.float8_e4m3fn),
    )
    with pytest.raises(ValueError) as caught:
        load_pretrained(saved)
    for part in (
        "model.norm.weight is missing",
        "lm_head.weight is [96, 47], wanted [96, 48]",
        "up_proj.weight is int32, wanted floats",
        "layers.2.self_attn.indexer.wk.weight is not part of this model",
        "block-scaled weights are not supported",
    ):
        assert part in str(caught.value)


def test_copies_of_embedding_and_head_are_ignored(saved):
    rewrite(
        saved,
        model__layers__4__embed_tokens__weight=np.zeros((96, 48), np.float32),
        model__layers__4__shared_head__head__weight=np.zeros((96, 48), np.float32),
    )
    load_pretrained(saved)


def header_file(path, header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header is not JSON"),
        (b"[1]", "not a JSON object"),
        ({"a": 3}, "a: the entry is not an object"),
        ({"a": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}, "dtype 'F9'"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "not a list of sizes"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, r"not \[begin, end\]"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "4 bytes for F32"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, "starts at byte 2, wanted 0"),
    ],
)
def test_bad_headers(tmp_path, header, message):
    with pytest.raises(ValueError, match=message):
        read_tensors(header_file(tmp_path / "x.safetensors", header, b"\0" * 4))


def test_overlapping_tensors(tmp_path):
    entry = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    other = {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}
    with pytest.raises(ValueError, match="b starts at byte 2, wanted 3"):
        read_tensors(header_file(tmp_path / "x.safetensors", {"a": entry, "b": other}, b"\0" * 4))


def test_files_by_safetensors_are_read(tmp_path):
    from safetensors.numpy import save_file

    tensors = {
        "b": np.arange(6, dtype=np.int64).reshape(2, 3),
        "a": np.array([[1.5]], np.float32),
        "empty": np.zeros((0, 4)),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    got = read_tensors(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        np.testing.assert_array_equal(got[name], tensor)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.array([1.0], np.float32)})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="a is complex64"):
        write_tensors(path, {"a": np.array([1.0], np.complex64)})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tensors(path, {"a": np.array([2.0], np.float32)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_tokenizer(saved):
    assert load_tokenizer(saved).encode("a").ids == [0]
    Tokenizer(WordLevel({str(i): i for i in range(97)}, unk_token="0")).save(str(saved / "tokenizer.json"))
    with pytest.raises(ValueError, match="97 tokens, the model's vocabulary has 96"):
        load_tokenizer(saved)
    (saved / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="not a tokenizer"):
        load_tokenizer(saved)
    (saved / "tokenizer.json").write_bytes(b'{"model"')
    with pytest.raises(ValueError, match="not JSON"):
        load_tokenizer(saved)


def test_missing_files_and_names(saved, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="neither a directory nor a shipped model"):
        find(tmp_path / "nothing")
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read"):
        load_tokenizer(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors: cannot be read"):
        load_pretrained(saved)
    monkeypatch.setattr(checkpoint, "CHECKPOINTS", saved.parent)
    assert checkpoint.available() == ["model"]
    assert find("model") == saved


def test_a_bad_configuration_names_its_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    with pytest.raises(ValueError, match=r"config\.json: DSAConfig\.from_hf.*num_hidden_layers is missing"):
        checkpoint.load_config(tmp_path)
