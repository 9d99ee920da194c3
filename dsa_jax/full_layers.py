"""Which layers own an indexer: the one place that decides it, for the layout, the model and the sizing."""

from __future__ import annotations

from typing import Any

DEFAULT_SKIP_OFFSET = 2


def full_layer_mask(
    num_layers: int,
    num_mtp_layers: int,
    *,
    types: Any = None,
    pattern: Any = None,
    frequency: Any = None,
    offset: Any = None,
) -> tuple[bool, ...]:
    """Which layers own an indexer.

    A decoder layer i is full by frequency iff `max(i - offset + 1, 0) % frequency == 0`; with frequency 4,
    offset 3 gives 0, 1, 2, 6, 10, ... and the default offset 2 gives 0, 1, 5, 9, .... Prediction layers are
    always full.

    Args:
        num_layers: decoder layers.
        num_mtp_layers: prediction layers.
        types: explicit list of "full" or "shared" per decoder layer, or None.
        pattern: string or list of "F" or "S" per decoder layer, or None.
        frequency: `index_topk_freq`, at least 1, or None for 1.
        offset: `index_skip_topk_offset`, at least 0, or None for 2.

    Returns:
        One entry per global layer id, `num_layers + num_mtp_layers` in all.

    Raises:
        ValueError: a list or pattern has the wrong length or an unknown entry, the descriptions that are
            given disagree, a number is out of range, or layer 0 would be shared.
    """
    problems: list[str] = []
    described: dict[str, tuple[bool, ...]] = {}
    for name, entries, words in (
        ("indexer_types", types, {"full": True, "shared": False}),
        ("index_topk_pattern", pattern, {"f": True, "s": False}),
    ):
        if entries is None:
            continue
        if not isinstance(entries, (str, list, tuple)):
            problems.append(f"{name}={entries!r} is neither a list nor a string")
            continue
        unknown = sorted({str(e) for e in entries if str(e).lower() not in words})
        if unknown:
            problems.append(f"{name} has unknown entries {unknown}, wanted {sorted(words)}")
        elif len(entries) != num_layers:
            problems.append(
                f"{name} has {len(entries)} entries, wanted one for each of the {num_layers} decoder layers"
            )
        else:
            described[name] = tuple(words[str(e).lower()] for e in entries)
    numbers = {
        "index_topk_freq": (frequency, 1, 1),
        "index_skip_topk_offset": (offset, DEFAULT_SKIP_OFFSET, 0),
    }
    chosen = {}
    for name, (value, default, least) in numbers.items():
        chosen[name] = default if value is None else value
        if isinstance(chosen[name], bool) or not isinstance(chosen[name], int) or chosen[name] < least:
            problems.append(
                f"{name}={value!r} must be an integer of at least {least}; leave it out for {default}"
            )
    if problems:
        raise ValueError("full_layer_mask: " + "; ".join(problems))
    by_frequency = tuple(
        max(i - chosen["index_skip_topk_offset"] + 1, 0) % chosen["index_topk_freq"] == 0
        for i in range(num_layers)
    )
    if frequency is not None or not described:
        described["index_topk_freq"] = by_frequency
    first_name, mask = next(iter(described.items()))
    for name, other in described.items():
        if other != mask:
            where = next(i for i in range(num_layers) if other[i] != mask[i])
            raise ValueError(
                f"full_layer_mask: {first_name} and {name} disagree from layer {where} on; remove one of "
                "them or correct it"
            )
    if mask and not mask[0]:
        raise ValueError(
            f"full_layer_mask: {first_name} makes layer 0 shared, but no layer before it has a selection to "
            "reuse; make it full"
        )
    return mask + (True,) * num_mtp_layers
