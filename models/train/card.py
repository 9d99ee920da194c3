"""Writes CARD.md and the loss plot from what training and evaluation measured; no number is typed by hand."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa_jax.models.train.drafts import WANTED_SHARE as WANTED_DRAFTS
from dsa_jax.models.train.evaluate import SPARSE_LIMIT
from dsa_jax.models.train.text import WANTED_SHARE

PLOT = "loss.png"
_NAMES = {
    "dense": "dense",
    "sparse_f32": "sparse, indexer with f32 keys",
    "sparse_fp8": "sparse, indexer with FP8 keys",
    "sparse_recent": "sparse, the most recent tokens (control)",
    "sparse_random": "sparse, random tokens (control)",
}


def write(folder: Path) -> None:
    """Writes ``CARD.md`` and ``loss.png`` into a checkpoint's folder.

    Args:
        folder: holds ``config.json``, ``corpus.json`` (the manifest of the corpus), ``training.json``,
            ``evaluation.json`` and ``text.json``; ``drafts.json`` and ``speed.json`` (a list of ``{"device", "what",
            "tokens_per_second"}``) are used if they are there.

    Raises:
        ValueError: a file is missing.
    """
    names = ("config", "corpus", "training", "evaluation", "text")
    missing = [f"{name}.json" for name in names if not (folder / f"{name}.json").is_file()]
    if missing:
        raise ValueError(
            f"write card: folder {str(folder)!r} lacks {', '.join(missing)}; want a trained, evaluated and sampled "
            "checkpoint: run the steps train, evaluate and text first"
        )
    config, manifest, training, evaluation, text = (
        json.loads((folder / f"{name}.json").read_text()) for name in names
    )
    drafts, speed = (
        json.loads(path.read_text()) if (path := folder / f"{name}.json").is_file() else None
        for name in ("drafts", "speed")
    )
    plot(training["records"], folder / PLOT)
    parts = [
        _head(folder.name, config, training),
        _figures(config, evaluation, training),
        _drafts(drafts),
        _sample(text),
        _speed(speed),
        _data(manifest),
        _recipe(training),
        _limits(),
    ]
    (folder / "CARD.md").write_text("\n\n".join(_fill(part) for part in parts if part) + "\n")


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draws training and validation loss over time, one panel for the language model, one for the indexers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps, done, last = [], 0, 0
    for number, record in enumerate(records):
        if number and record["stage"] != records[number - 1]["stage"]:
            done += last
        last = record["step"]
        steps.append(done + last)
    for axes, part, title in (
        (left, "loss", "next token, nats"),
        (right, "index_kl", "indexers' divergence, nats"),
    ):
        for kind in ("training", "validation"):
            shown = [
                (step, record[kind][part])
                for step, record in zip(steps, records, strict=True)
                if part == "loss" or record["stage"] != "dense"
            ]
            if shown:
                axes.plot(*zip(*shown, strict=True), marker=".", label=kind)
        axes.set(title=title, xlabel="optimizer steps, all stages")
        for number, record in enumerate(records[1:], start=1):
            if record["stage"] != records[number - 1]["stage"]:
                axes.axvline(steps[number - 1], color="grey", linewidth=0.7)
        axes.legend()
    figure.savefig(path)


def _fill(part: str) -> str:
    """Wraps the paragraphs; numbers leave lines of any length. Tables, lists, code and headings stay as they are."""
    if "```" in part:
        before, fence, after = part.partition("```")
        return _fill(before.rstrip("\n")) + "\n\n" + fence + after
    kept = ("|", "*", "#", "!")
    return "\n\n".join(
        block
        if block.startswith(kept)
        else textwrap.fill(block, 110, break_long_words=False, break_on_hyphens=False)
        for block in part.split("\n\n")
    )


def _head(name: str, config: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    return f"""# {name}

A small DeepSeek-V3.2 language model: multi-head latent attention, lightning indexer, mixture of experts, one
multi-token-prediction layer. {training["parameters"] / 1e6:.2f} M parameters in bfloat16, vocabulary
{config["vocab_size"]}, context {config["max_position_embeddings"]}, {config["num_hidden_layers"]} layers,
{config["index_topk"]} attended tokens a query. It writes text in the style of Python documentation. It is there to
exercise caches and kernels with real weights, not to be believed. Licence of the weights: Apache-2.0."""


def _figures(config: Mapping[str, Any], found: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    best = {
        stage["name"]: _best(stage, training["records"])["validation"]
        for stage in training["settings"]["stages"]
    }
    loss, mass, bits = found["loss"], found["mass"], found["bits_per_byte"]
    rows = [
        f"| {_NAMES[mode]} | {value:.4f} | {value / loss['dense'] - 1:+.2%} |" for mode, value in loss.items()
    ]
    counts = ", ".join(f"{count} of {length} tokens" for length, count in found["contexts"].items())
    holds = "\n".join(f"* {name}: {'yes' if value else '**no**'}" for name, value in found["gates"].items())
    return f"""## Measured on held-out modules

All at positions from {found["first_position"]} on, in contexts that lie within one held-out module ({counts});
{found["tokens"]} predicted tokens. Weights and activations in bfloat16, {config["index_topk"]} tokens attended.

| Attention | Loss, nats a token | Against dense |
|---|---|---|
{chr(10).join(rows)}

All rows are of the final weights, which the sparse stage has fitted to sparse attention; that makes the dense row
worse than it could be. On the validation modules (all positions) the best loss with dense attention, before the sparse
stage, was {best["dense"]["loss"]:.4f}, the best with sparse attention after it {best["sparse"]["loss"]:.4f}.

Share of the dense attention (mean over heads and layers) that falls on the selected tokens: indexer
{mass["indexer"]:.3f}, most recent {mass["recent"]:.3f}, random {mass["random"]:.3f}.

Next token right: {found["accuracy"]:.3f}. MTP layer, the token after: right {found["mtp_accuracy"]:.3f}, equal to
the model's own choice one step later {found["mtp_agreement"]:.3f} (both given the true text).

Bits per byte: {bits["model"]:.3f} (sparse, FP8 keys), against {bits["ngram"]:.3f} of an interpolated modified Kneser-Ney
5-gram model over the same tokens, trained on the same text.

Wanted relations (sparse may lose up to {SPARSE_LIMIT - 1:.0%} of the dense loss):

{holds}"""


def _sample(text: Mapping[str, Any]) -> str:
    example = text["texts"][0]
    shown = (example["prompt"] + "⟦" + example["continuation"] + "⟧").replace("```", "'''")
    verdict = "at least" if text["share"] >= WANTED_SHARE else "**less than**"
    return f"""## Text

In {text["samples"]} continuations of {text["tokens"]} tokens (prompts from held-out modules, temperature
{text["temperature"]}), {text["known"]} of {text["words"]} words ({text["share"]:.1%}, {verdict} {WANTED_SHARE:.0%}) occur
in the corpus. The first of them, the model's part in brackets:

```text
{shown}
```"""


def _drafts(found: Mapping[str, Any] | None) -> str:
    if not found:
        return ""
    verdict = "at least" if found["share"] >= WANTED_DRAFTS else "**less than**"
    return f"""## Drafts

After {found["prompts"]} prompts (the first {found["prompt_tokens"]} tokens of as many held-out modules), {found["tokens"]}
tokens each at temperature 0 with one draft token a turn: {found["accepted"]:,} of {found["drafted"]:,} drafts were kept
({found["share"]:.1%}, {verdict} {WANTED_DRAFTS:.0%}; {found["least_share_of_a_prompt"]:.0%} for the worst prompt).
Activations in {found["activations"]}."""


def _speed(speed: list[dict[str, Any]] | None) -> str:
    if not speed:
        return ""
    rows = [f"| {entry['device']} | {entry['what']} | {entry['tokens_per_second']:.0f} |" for entry in speed]
    return "## Speed\n\n| Device | What | Tokens a second |\n|---|---|---|\n" + "\n".join(rows)


def _data(manifest: Mapping[str, Any]) -> str:
    rows = [
        f"| {name} {entry['version']} | {entry['licence']} | {entry['modules']} | {entry['documents']} "
        f"| {entry['characters']:,} |"
        for name, entry in manifest["sources"].items()
    ]
    splits = ", ".join(
        f"{name} {entry['modules']} modules with {entry['characters']:,} characters"
        for name, entry in manifest["splits"].items()
    )
    return f"""## Data

Help topics of Python and docstrings of Python's standard library, NumPy, SciPy and JAX as installed;
{manifest["characters"]:,} characters after repeats and near repeats were dropped.

| Source | Licence | Modules | Documents | Characters |
|---|---|---|---|---|
{chr(10).join(rows)}

Whole modules go to one split, by a hash of the name: {splits}. Tokenizer and 5-gram model saw the training part only."""


def _recipe(training: Mapping[str, Any]) -> str:
    settings, records = training["settings"], training["records"]
    lines = []
    for stage in settings["stages"]:
        steps = max(record["step"] for record in records if record["stage"] == stage["name"])
        best = _best(stage, records)["validation"]
        parts = ", ".join(f"{name} {value:.3f}" for name, value in best.items() if value)
        lines.append(
            f"| {stage['name']} | {stage['attention']} | {steps} | {stage['main_rate']:g} | "
            f"{stage['index_rate']:g} | {stage['noise']:.1%} | {parts} |"
        )
    return f"""## Recipe

That of the DeepSeek-V3.2 report in small: dense language modelling with the MTP loss (weight
{settings["mtp_weight"]}), indexer warm-up on the dense attention summed over heads, then sparse attention with the
indexers' inputs detached. AdamW with cosine decay, weight decay {settings["decay"]}, {settings["batch"]} contexts of
{settings["length"]} tokens a step, input tokens replaced by random ones against overfitting (noise), experts balanced by
their correction bias alone, the best validation result of each stage kept. {records[-1]["seconds"] / 60:.1f} minutes on
{training["device"]}, compilation included.

| Stage | Attention | Steps | Peak rate, model | Peak rate, indexers | Noise | Best validation |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

![Loss over the steps]({PLOT})"""


def _best(stage: Mapping[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record whose weights the stage kept."""
    mine = [record for record in records if record["stage"] == stage["name"]]
    return min(mine, key=lambda record: record["validation"]["loss" if stage["language"] else "index_kl"])


def _limits() -> str:
    return """## Limits

The model knows nothing but the form of documentation: signatures, parameters and examples that it writes are invented.
English only. Held-out modules resemble training modules of the same package, so the figures say how well it fits such text,
not how well it would do elsewhere. Longer contexts than it was trained on are refused."""
