"""Counting kept drafts after held-out prompts: which prompts, what is counted, and what the checkpoint promises."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.models import checkpoint
from dsa_jax.models.train import drafts
from dsa_jax.models.train.corpus import split_of
from dsa_jax.models.train.documents import Document
from dsa_jax.models.train.text import PROMPT_TOKENS
from train_models import one_layer

TOKENIZER = checkpoint.load_tokenizer("docs-8m")
HELD_OUT = [name for name in (f"package.module{i}" for i in range(200)) if split_of(name) == "heldout"]
LONG = "Return the sum of the array elements over the given axis, or of all of them. " * 3


def document(module: str, text: str = LONG) -> Document:
    return Document(source="python", module=module, name=f"{module}.f", text=f"{module}.f(x)\n\n{text}")


def test_prompts_come_from_held_out_modules():
    """Of each module the first document that is long enough; modules with none, and of other splits, are left out."""
    a, b, short, *_ = HELD_OUT
    documents = [
        document(short, "Too short."),
        document(a, "Short."),
        document(a),
        document(b),
        document("package.module0"),
    ]
    assert split_of("package.module0") == "train"
    found = drafts.heldout_prompts(documents, TOKENIZER, bos=0, count=2)
    assert set(found) == {a, b}
    wanted = [0, *TOKENIZER.encode(document(a).text).ids[: PROMPT_TOKENS - 1]]
    assert found[a] == wanted and len(wanted) == PROMPT_TOKENS == 32
    with pytest.raises(
        ValueError, match="2 modules have a document of 31 tokens; want count=3: ask for fewer"
    ):
        drafts.heldout_prompts(documents, TOKENIZER, bos=0, count=3)


def test_the_choice_depends_on_names_alone():
    """The order of the corpus, other splits and modules that lose the draw change nothing."""
    documents = [document(name) for name in HELD_OUT[:6]]
    three = drafts.heldout_prompts(documents, TOKENIZER, bos=0, count=3)
    others = [document(f"package.module{i}") for i in range(40) if split_of(f"package.module{i}") == "train"]
    assert drafts.heldout_prompts([*others, *documents[::-1]], TOKENIZER, bos=0, count=3) == three
    left = [d for d in documents if d.module in three]
    assert drafts.heldout_prompts(left, TOKENIZER, bos=0, count=3) == three


@pytest.mark.full
def test_counts_of_a_random_model():
    """Every turn gives one token and the drafts that it keeps; the last one may be cut."""
    random = np.random.default_rng(0)
    prompts = {f"m{i}": random.integers(0, 96, PROMPT_TOKENS).tolist() for i in range(4)}
    found = drafts.check(one_layer(), prompts, tokens=5, batch=2)
    assert (found["prompts"], found["tokens"], found["prompt_tokens"]) == (4, 5, 32)
    assert 4 * 5 <= found["drafted"] + found["accepted"] <= 4 * 6
    assert found["share"] == found["accepted"] / found["drafted"]
    assert 0 <= found["least_share_of_a_prompt"] <= found["share"] <= 1
    with pytest.raises(ValueError, match="4 prompts in batches of 3; want full batches"):
        drafts.check(one_layer(), prompts, batch=3)


@pytest.mark.full
def test_a_broken_prediction_layer_is_seen():
    """The shipped model keeps most drafts after its samples' prompts; with another state joined it keeps few."""
    texts = json.loads((checkpoint.find("docs-8m") / "text.json").read_text())["texts"][:8]
    prompts = {
        str(i): TOKENIZER.encode(t["prompt"] + t["continuation"]).ids[:32] for i, t in enumerate(texts)
    }
    model = checkpoint.load_pretrained("docs-8m", dtype=jnp.float32)
    good = drafts.check(model, prompts, tokens=24, batch=8)["share"]
    weight = model.prediction_layers[0].eh_proj.weight
    weight.set_value(jnp.roll(weight[...], 1, axis=-1))
    assert good >= drafts.WANTED_SHARE > 2 * drafts.check(model, prompts, tokens=24, batch=8)["share"]


@pytest.mark.parametrize("name", checkpoint.available())
def test_the_checkpoint_keeps_its_promise(name):
    found = json.loads((checkpoint.find(name) / "drafts.json").read_text())
    assert found["prompts"] >= 64 and found["tokens"] == 64
    assert found["share"] == found["accepted"] / found["drafted"] >= drafts.WANTED_SHARE
    assert found["prompts"] * 64 <= found["drafted"] + found["accepted"] <= found["prompts"] * 65
