"""Schedules of the kernels as data: which configuration a kernel gets on a card for a shape.

``tuning.json`` beside this file holds the library's own rules, for every kernel and in it for every kind of device, in
order. They come from measurements on an H200 and, for cards that nothing was measured on, from what compiles well.

A rule is ``{"when": conditions, "config": fields of the kernel's Config, "why": a sentence}``. A condition names a number of
the shape and gives its closed interval ``[least, most]``, null for no bound, or names a word and lists those that it may be.
The first rule whose conditions all hold decides; fields that it leaves out keep the Config's defaults.

Kinds of device are names such as ``"NVIDIA H200"``, or words of one (``"H200"``); ``"default"`` is for every other device
and for shapes that the kind's own rules leave out. `load` puts the rules of a file of one's own before these; the command
``python -m benchmarks.tune`` writes such files. Nothing here measures anything: a choice depends on the device's name, the
shape and the rules alone. What is a formula (how many stages fit, how a row is cut) stays in the kernels' modules.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import jax

from dsa_jax.arguments import described
from dsa_jax.compat import Device, target_device
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.pallas.config_checks import check_types

DEFAULT = "default"
Bound = float | int | None


@dataclasses.dataclass(frozen=True)
class Preference:
    """Which kernel of an op is tried first where several can run.

    Attributes:
        first: ``"mosaic"`` or ``"triton"``.
    """

    first: Literal["mosaic", "triton"]


@dataclasses.dataclass(frozen=True)
class KernelOrReference:
    """Whether an op's one kernel is tried first, or the reference where a kernel gains nothing.

    Attributes:
        first: ``"triton"`` or ``"xla"``.
    """

    first: Literal["triton", "xla"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What rules of a kernel may speak of.

    Attributes:
        module: where the class of its configurations is, in ``dsa_jax.pallas``.
        config: the name of that class.
        facts: names of the numbers and words that conditions may use.
        forms: what the word ``form`` may be; a rule about any other would never hold.
    """

    module: str
    config: str
    facts: tuple[str, ...]
    forms: tuple[str, ...] = INDEX_FORMS

    def config_type(self) -> type:
        """The class of the configurations; importing it may import Mosaic or Triton."""
        return getattr(importlib.import_module(f"dsa_jax.pallas.{self.module}"), self.config)


_SCORES = ("heads", "new_tokens", "columns", "requests", "keys", "cores", "tiles_per_core")
_TOPK = ("rows", "columns", "cores", "rows_per_core")
_ATTENTION = ("form", "major", "tokens", "heads", "keys", "cores")
KERNELS = {
    "append_index_k": Kernel("tuning", "KernelOrReference", ("form", "tokens")),
    "append_triton": Kernel("append_triton", "Config", ("form", "tokens", "row_bytes")),
    "append_triton_latent": Kernel("append_triton", "Config", ("form", "tokens", "row_bytes"), KEY_FORMS),
    "gather_triton": Kernel("gather_triton", "Config", ("form", "rows")),
    "many_row_scores": Kernel("tuning", "Preference", ("form", "rows_per_request", "products")),
    "paged_logits_mosaic": Kernel("paged_logits_config", "PagedLogitsConfig", _SCORES),
    "paged_logits_mosaic_prefill": Kernel("paged_logits_config", "PagedLogitsConfig", ("heads",)),
    "paged_logits_fp4_mosaic": Kernel("paged_logits_fp4_mosaic", "PagedLogitsFp4Config", _SCORES[:-2]),
    "paged_logits_triton": Kernel(
        "paged_logits_triton", "Config", ("form", "page_size", *_SCORES[:-1], "major")
    ),
    "topk_mosaic": Kernel("topk_mosaic", "Config", _TOPK),
    "topk_triton": Kernel("topk_triton", "Config", (*_TOPK, "k", "programs_per_core")),
    "sparse_mla": Kernel("tuning", "Preference", ("form", "tokens", "heads"), KEY_FORMS),
    "sparse_mla_mosaic": Kernel("sparse_mla_mosaic", "Config", _ATTENTION, KEY_FORMS),
    "sparse_mla_triton": Kernel("sparse_mla_triton", "Config", _ATTENTION, KEY_FORMS),
}
"""Kernels, and choices between them, by the names that rules have. ``many_row_scores`` chooses for contexts and windows:
``products`` are rows x keys x heads, and all rows of windows are of one request. ``append_triton`` is for indexer keys,
``append_triton_latent`` for latents; ``row_bytes`` are a token's in the pool of keys or latents, ``tokens`` and gathered
``rows`` the places of the step, used or not. ``columns`` of scores are heads x new
tokens, of top-k the width of a row; ``keys`` are the width of the scores or the rows of a query; ``form`` of a kernel of
scores is ``"fp8"`` or ``"fp4"``, elsewhere the pool's form; ``major`` is the compute capability's first
number, 9 where unknown."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule of a file.

    Attributes:
        name: kernel, kind of device and place of the rule in its list, from 1, for messages.
        when: intervals ``(least, most)`` of numbers, or words, by the name of the fact.
        config: fields of the configuration.
        why: what it rests on.
    """

    name: str
    when: Mapping[str, tuple[Bound, Bound] | tuple[str, ...]]
    config: Mapping[str, Any]
    why: str = ""

    def holds(self, facts: Mapping[str, float | str]) -> bool:
        """Whether every condition holds."""
        return all(_within(facts[name], allowed) for name, allowed in self.when.items())

    def build[C](self, make: type[C]) -> C:
        """The configuration.

        Raises:
            ValueError: if the fields are not those of the class, with the rule's name.
        """
        fields = {name: _hashable(value) for name, value in self.config.items()}
        try:
            check_types(make, fields)
            return make(**fields)
        except ValueError as error:
            text = str(error).removesuffix(".")
            raise ValueError(f"tuning rule {self.name}: {text}. Correct the rule's config.") from None


Rules = dict[str, dict[str, list[Rule]]]


def choose[C](
    kernel: str, make: type[C], facts: Mapping[str, float | str], device: Device | None = None
) -> C:
    """The configuration of a kernel for a shape.

    Args:
        kernel: name in `KERNELS`.
        make: the class of its configurations.
        facts: every number and word of the kernel's ``facts``.
        device: the card; None for the one that code traced now will run on.

    Raises:
        ValueError: if no rule holds, which the package's own file rules out, or the rule's fields are not the class's.
    """
    return find(kernel, (device or target_device()).kind, facts).build(make)


def find(kernel: str, kind: str, facts: Mapping[str, float | str]) -> Rule:
    """The rule that decides; `kind` is the vendor's name of the card, the others are as in `choose`."""
    if set(facts) != set(KERNELS[kernel].facts):
        raise ValueError(
            f"tuning: {kernel} was asked about {sorted(facts)}; wanted {sorted(KERNELS[kernel].facts)}"
        )
    for rules in (_loaded, package()):
        for rule in _for_kind(rules.get(kernel, {}), kind):
            if rule.holds(facts):
                return rule
    raise ValueError(
        f"tuning: no rule of {kernel} holds on {kind!r} for {dict(facts)}; end its rules with one for all"
    )


def load(path: str | Path | None) -> int:
    """Put the rules of a file before the package's, in place of those loaded before; None takes them away.

    Programs that were traced before are traced again when they are next called, so that all follow the same rules; what was
    compiled ahead of time (``.lower().compile()``) stays as it is. Call it when a program starts.

    Args:
        path: a JSON file as `read` takes it.

    Returns:
        The number of rules.

    Raises:
        OSError: if the file cannot be read.
        ValueError: for a file that is no rules, with every problem and the rules that have them. Nothing is changed then.
    """
    global _loaded
    if path is not None and not isinstance(path, (str, Path)):
        raise ValueError(
            f"tuning: path is {described(path)}, wanted a file's path or None. Pass the name of a file."
        )
    rules: Rules = {} if path is None else read(_text(Path(path)), str(path))
    problems = []
    for kernel, rule in each(rules):
        try:
            rule.build(KERNELS[kernel].config_type())
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(f"tuning: {path}: " + " ".join(problems))
    _loaded = rules
    jax.clear_caches()
    return len(list(each(rules)))


@functools.cache
def package() -> Rules:
    """The rules that the package ships, read once."""
    source = files("dsa_jax.pallas").joinpath("tuning.json")
    return read(source.read_text(encoding="utf-8"), "dsa_jax/pallas/tuning.json")


def read(text: str, source: str) -> Rules:
    """Rules from JSON: kernel -> kind of device -> list of rules.

    Args:
        text: the file.
        source: its name, for messages.

    Raises:
        ValueError: with all problems: no JSON, an unknown kernel, fact or key, an interval that is none or is empty.
    """
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"tuning: {source} is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"tuning: {source} is nested too deeply, wanted an object of kernels") from None
    except _Twice as error:
        raise ValueError(
            f"tuning: {source} has {error} twice in one object, wanted it once; join the two"
        ) from None
    problems: list[str] = []
    rules: Rules = {}
    if not isinstance(content, dict):
        problems.append(f"it holds a {type(content).__name__}, wanted an object of kernels")
        content = {}
    for kernel, kinds in content.items():
        if kernel not in KERNELS:
            problems.append(f"unknown kernel {kernel!r}, wanted one of {', '.join(KERNELS)}")
        elif not isinstance(kinds, dict) or not all(isinstance(given, list) for given in kinds.values()):
            problems.append(f"{kernel}: wanted an object of lists of rules by kind of device")
        elif "" in kinds:
            problems.append(
                f"{kernel}: a kind of device has no name, wanted one such as 'H200', or {DEFAULT!r}"
            )
        else:
            rules[kernel] = {
                kind: [
                    _rule(f"{kernel} / {kind} / {place}", kernel, entry, problems)
                    for place, entry in enumerate(given, 1)
                ]
                for kind, given in kinds.items()
            }
    if problems:
        raise ValueError(f"tuning: {source}: " + "; ".join(problems))
    return rules


def each(rules: Rules) -> Iterator[tuple[str, Rule]]:
    """All rules with their kernels."""
    for kernel, kinds in rules.items():
        for given in kinds.values():
            for rule in given:
                yield kernel, rule


_loaded: Rules = {}


def _for_kind(kinds: Mapping[str, list[Rule]], kind: str) -> Iterator[Rule]:
    for name, rules in kinds.items():
        if name != DEFAULT and (name == kind or re.search(rf"\b{re.escape(name)}\b", kind)):
            yield from rules
    yield from kinds.get(DEFAULT, ())


class _Twice(Exception):
    """A key that an object of JSON has twice; Python's reader takes the last and forgets the others."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for place, (key, _) in enumerate(pairs):
        if any(key == other for other, _ in pairs[:place]):
            raise _Twice(repr(key))
    return dict(pairs)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tuning: {path} is no UTF-8: {error}. Save it as UTF-8.") from None


def _rule(name: str, kernel: str, entry: Any, problems: list[str]) -> Rule:
    """Check one rule; what is wrong goes to `problems`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
        problems.append(f"rule {name}: wanted an object with a config")
        return Rule(name, {}, {})
    if unknown := sorted(set(entry) - {"when", "config", "why"}):
        problems.append(f"rule {name}: unknown {', '.join(unknown)}, wanted when, config and why")
    when, why = entry.get("when", {}), entry.get("why", "")
    if not isinstance(when, dict) or not isinstance(why, str):
        problems.append(f"rule {name}: wanted an object as when and a string as why")
        return Rule(name, {}, {})
    facts = KERNELS[kernel].facts
    for fact, allowed in when.items():
        if fact not in facts:
            problems.append(f"rule {name}: unknown condition {fact!r}, wanted one of {', '.join(facts)}")
        elif fact == "form":
            if not isinstance(allowed, list) or not allowed or not all(isinstance(x, str) for x in allowed):
                problems.append(f"rule {name}: {fact} is {allowed!r}, wanted a list of words")
            elif unknown := sorted({*allowed} - {*(known := KERNELS[kernel].forms)}):
                problems.append(f"rule {name}: unknown form {', '.join(unknown)}, wanted {', '.join(known)}")
        elif not _is_interval(allowed):
            problems.append(f"rule {name}: {fact} is {allowed!r}, wanted [least, most], null for no bound")
    return Rule(name, {fact: _hashable(allowed) for fact, allowed in when.items()}, entry["config"], why)


def _is_interval(allowed: Any) -> bool:
    number = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x == x
    if not isinstance(allowed, list) or len(allowed) != 2 or not all(x is None or number(x) for x in allowed):
        return False
    return None in allowed or allowed[0] <= allowed[1]


def _within(fact: float | str, allowed: tuple) -> bool:
    if isinstance(fact, str):
        return fact in allowed
    least, most = allowed
    return (least is None or fact >= least) and (most is None or fact <= most)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
