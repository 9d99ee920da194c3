"""Which manager is used, and which options go together.

Defaults of the model family are merged under the user's settings, "auto" is resolved once and the result says
so, and one check refuses combinations that do not work. The check and the table in the documentation read the
same rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from dsa_jax.forms import FP8_DS_MLA_PAGE_SIZE, INDEX_FORMS, KEY_FORMS, check_page_size

ATTENTIONS = ("dsa", "dense")
CONTEXT_PARALLEL = ("none", "helix", "star")

_V2_CACHE = MappingProxyType({"manager": "v2"})
MODEL_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": MappingProxyType({"attention": "dense", "cache": _V2_CACHE}),
        "DeepseekV32ForCausalLM": MappingProxyType({"attention": "dsa", "cache": _V2_CACHE}),
        "GlmMoeDsaForCausalLM": MappingProxyType({"attention": "dsa", "cache": _V2_CACHE}),
        "MistralLarge3ForCausalLM": MappingProxyType({"attention": "dense", "cache": _V2_CACHE}),
    }
)
"""Settings that a model family brings along; the user's own win."""

LIBRARY_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "attention": "dsa",
        "context_parallel": "none",
        "beam_width": 1,
        "external_connector": False,
        "cache": MappingProxyType(
            {"manager": "auto", "key_form": "bf16", "index_form": "fp8", "page_size": 64}
        ),
    }
)
"""Settings for whatever neither the user nor the model says. These are all settings there are."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination that is refused, for DSA and for dense attention alike.

    Attributes:
        options: (option, value) pairs that must all hold; the values are those of `_facts`.
        reason: why it does not work.
        remedy: what to do instead.
    """

    options: tuple[tuple[str, str], ...]
    reason: str
    remedy: str

    def named(self, attention: str) -> str:
        """The combination in words."""
        words = [_WORDS.get(option, f"{option[0]}={option[1]!r}") for option in self.options]
        return f"{attention} on {words[0]} with {' and '.join(words[1:])}"


_ATTENTION_WORDS = {"dsa": "DSA", "dense": "dense attention"}
_WORDS = {
    ("manager", "v2"): "manager V2",
    ("context_parallel", "star"): "STAR context parallelism",
    ("beam_width", "> 1"): "beam width > 1",
    ("external_connector", "yes"): "an external cache connector",
    ("page_size", "other"): f"a page size other than {FP8_DS_MLA_PAGE_SIZE}",
}

RULES = (
    Rule(
        (("manager", "v2"), ("context_parallel", "star")),
        "the V2 manager does not split its pages the way STAR splits the context",
        "use another context_parallel mode, or cache.manager='v1'",
    ),
    Rule(
        (("manager", "v2"), ("beam_width", "> 1")),
        "beams of one request would write into shared pages",
        "use beam_width=1, or cache.manager='v1'",
    ),
    Rule(
        (("manager", "v2"), ("external_connector", "yes")),
        "a connector that moves KEY pages alone leaves the indexer's pages unset",
        "use external_connector=False, or cache.manager='v1'",
    ),
    Rule(
        (("key_form", "fp8_ds_mla"), ("page_size", "other")),
        "the 656-byte token is defined for one page size",
        f"use cache.page_size={FP8_DS_MLA_PAGE_SIZE}, or another cache.key_form",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Resolved settings.

    Attributes:
        manager: "v1" or "v2".
        source: who chose the manager: "user", "model" (its family's default) or "library".
        settings: all settings after merging, with the manager written back into
            `settings["cache"]["manager"]`.
    """

    manager: Literal["v1", "v2"]
    source: Literal["user", "model", "library"]
    settings: Mapping[str, Any]


def select(architecture: str, settings: Mapping[str, Any] | None = None) -> Selection:
    """Merges defaults, resolves "auto" and refuses combinations that do not work.

    Args:
        architecture: Hugging Face class name; one that has no defaults of its own gets the library's.
        settings: the user's, nested like `LIBRARY_DEFAULTS`.

    Returns:
        The selection. Nothing the user set is changed, except that "auto" is replaced by what it stands for.

    Raises:
        ValueError: a setting is unknown or has an unknown value, or settings do not go together; all in one
            message.
    """
    settings = settings or {}
    _refuse_unknown(settings, LIBRARY_DEFAULTS)
    model = MODEL_DEFAULTS.get(architecture, {})
    merged = merge_defaults(settings, merge_defaults(model, LIBRARY_DEFAULTS))
    user_cache = settings.get("cache", {})
    manager, source = resolve_manager(
        user_cache.get("manager", "auto"), model.get("cache", {}).get("manager", "auto")
    )
    merged["cache"]["manager"] = manager
    check(merged)
    if merged["attention"] == "dsa" and model.get("attention") == "dense":
        raise ValueError(
            f"select: attention='dsa', but {architecture} has no indexer; use attention='dense' or a model "
            "with an indexer"
        )
    return Selection(manager=manager, source=source, settings=merged)


def merge_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fills what `settings` leaves open with `defaults`, level by level.

    Only leaves that the user did not set are filled; siblings on both sides survive. Where the user replaced
    a mapping by something else, the default for that whole key is dropped. Neither argument is changed.
    """
    merged = {
        key: merge_defaults(value, {}) if isinstance(value, Mapping) else value
        for key, value in settings.items()
    }
    for key, default in defaults.items():
        if isinstance(default, Mapping):
            if key not in merged or isinstance(merged[key], Mapping):
                merged[key] = merge_defaults(merged.get(key, {}), default)
        elif key not in merged:
            merged[key] = default
    return merged


def resolve_manager(
    setting: str | bool, model_default: str | bool = "auto"
) -> tuple[Literal["v1", "v2"], Literal["user", "model", "library"]]:
    """Turns a manager setting into "v1" or "v2".

    Args:
        setting: the user's: "auto", "v1" or "v2"; False and True stand for the last two. Explicit ones are
            returned as they are.
        model_default: what "auto" stands for in the model's family; "auto" leaves it to the library, which
            takes "v1".

    Returns:
        The manager and who chose it.

    Raises:
        ValueError: one of the two is another value.
    """
    for name, value in (("cache.manager", setting), ("the model's default for cache.manager", model_default)):
        if not (isinstance(value, bool) or (isinstance(value, str) and value in ("auto", "v1", "v2"))):
            raise ValueError(
                f"resolve_manager: {name}={value!r} is unknown; use 'auto', 'v1', 'v2', False or True"
            )
    if setting != "auto":
        return _version(setting), "user"
    if model_default != "auto":
        return _version(model_default), "model"
    return "v1", "library"


def check(settings: Mapping[str, Any]) -> None:
    """Refuses settings that do not go together.

    Args:
        settings: complete settings with a resolved manager, as in `Selection.settings`.

    Raises:
        ValueError: every value that is unknown, or else every rule that is broken, with its remedy.
    """
    cache = settings["cache"]
    problems = []
    for name, value, known in (
        ("attention", settings["attention"], ATTENTIONS),
        ("context_parallel", settings["context_parallel"], CONTEXT_PARALLEL),
        ("cache.manager", cache["manager"], ("v1", "v2")),
        ("cache.key_form", cache["key_form"], KEY_FORMS),
        ("cache.index_form", cache["index_form"], INDEX_FORMS),
        ("external_connector", settings["external_connector"], (False, True)),
    ):
        if value not in known:
            problems.append(f"{name}={value!r} is unknown, choose one of {', '.join(map(str, known))}")
    beam_width = settings["beam_width"]
    if isinstance(beam_width, bool) or not isinstance(beam_width, int) or beam_width < 1:
        problems.append(f"beam_width={beam_width!r} must be an integer of at least 1")
    try:
        check_page_size(cache["page_size"])
    except ValueError as error:
        problems.append(f"cache.{error}")
    if not problems:
        facts, attention = _facts(settings), _ATTENTION_WORDS[settings["attention"]]
        problems = [
            f"{rule.named(attention)} does not work: {rule.reason}; {rule.remedy}"
            for rule in RULES
            if all(facts[option] == value for option, value in rule.options)
        ]
    if problems:
        raise ValueError("select: " + "; ".join(problems))


def compatibility_table() -> str:
    """The rules as a Markdown table, for the documentation."""
    lines = ["| Combination | Why it is refused | Instead |", "|---|---|---|"]
    lines += [f"| {rule.named('DSA or dense attention')} | {rule.reason} | {rule.remedy} |" for rule in RULES]
    return "\n".join(lines)


def _facts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings in the words of the rules."""
    cache = settings["cache"]
    return {
        "context_parallel": settings["context_parallel"],
        "beam_width": "> 1" if settings["beam_width"] > 1 else "1",
        "external_connector": "yes" if settings["external_connector"] else "no",
        "manager": cache["manager"],
        "key_form": cache["key_form"],
        "index_form": cache["index_form"],
        "page_size": str(cache["page_size"]) if cache["page_size"] == FP8_DS_MLA_PAGE_SIZE else "other",
    }


def _version(setting: str | bool) -> Literal["v1", "v2"]:
    return "v2" if setting in (True, "v2") else "v1"


def _refuse_unknown(settings: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> None:
    problems = []
    for key, value in settings.items():
        if key not in known:
            problems.append(
                f"{prefix}{key} is no setting, known are {', '.join(prefix + name for name in known)}"
            )
        elif isinstance(known[key], Mapping):
            if not isinstance(value, Mapping):
                problems.append(f"{prefix}{key}={value!r} must be a mapping of {', '.join(known[key])}")
            else:
                _refuse_unknown(value, known[key], f"{prefix}{key}.")
    if problems:
        raise ValueError("select: " + "; ".join(problems))
