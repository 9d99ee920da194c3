"""Models on disk: ``model.safetensors``, ``config.json`` and ``tokenizer.json`` in a directory, as on Hugging Face.

Tensor names and shapes are those of the released DeepSeek-V3.2 checkpoints: a parameter's name is its path in the module
tree, except that each expert has tensors of its own in the file and all experts of a layer are one array in memory.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax import Array

from dsa_jax.arguments import described
from dsa_jax.models.config import ModelConfig
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.norm import Buffer
from dsa_jax.models.tensor_file import read_tensors, replace_file, write_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""Directory of the models that ship with the library."""

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"

# Copies of the main model's embedding and head that released prediction layers carry, and tables that are computed here.
_REDUNDANT = re.compile(
    r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight|.*\.rotary_emb\.inv_freq"
)
_SHOWN = 8


def available() -> list[str]:
    """Names of the shipped models."""
    return sorted(entry.parent.name for entry in CHECKPOINTS.glob(f"*/{CONFIG}"))


def find(name: str | Path) -> Path:
    """Directory of a model.

    Args:
        name: a directory, or the name of a shipped model; a shipped name wins.

    Raises:
        ValueError: there is neither.
    """
    if str(name) in available():
        return CHECKPOINTS / str(name)
    with contextlib.suppress(OSError):  # a name that no file system takes
        if Path(name).is_dir():
            return Path(name)
    shipped = ", ".join(available()) or "none"
    raise ValueError(
        f"load: {described(str(name))} is neither a directory nor a shipped model (shipped: {shipped}). "
        f"Pass a directory with {CONFIG} and {WEIGHTS}."
    )


def load_config(name: str | Path) -> ModelConfig:
    """Read the configuration of a model.

    Args:
        name: as in ``find``.

    Raises:
        ValueError: the file is missing, not JSON, or describes no model that can be run.
    """
    path = find(name) / CONFIG
    mapping = _read_json(path)
    try:
        return ModelConfig.from_hf(mapping)
    except ValueError as error:  # of several configurations one has to know which is meant
        raise ValueError(f"{path}: {error}") from error


def load_pretrained(name: str | Path, *, dtype: jnp.dtype | type | None = None) -> Decoder:
    """Load a model.

    Args:
        name: as in ``find``.
        dtype: of the weights in memory, which is also that of the activations; None keeps what the file has (bfloat16).
            The router's correction bias stays float32.

    Raises:
        ValueError: a file is missing, damaged or of another model: tensors that are missing, unknown or misshapen are
            named together. Nothing is returned half loaded.
    """
    directory = find(name)
    config = load_config(directory)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    tensors = read_tensors(directory / WEIGHTS)
    variables = dict(_variables(model))
    _check_tensors(directory / WEIGHTS, variables, tensors)
    for names, variable in variables.items():
        parts = [tensors[n] for n in names]
        whole = np.stack(parts) if _is_stacked(names) else parts[0]
        kept = jnp.float32 if isinstance(variable, Buffer) else dtype or whole.dtype
        variable.set_value(jnp.asarray(np.asarray(whole).astype(kept)))
    return model


def save_pretrained(model: Decoder, directory: str | Path, *, tokenizer: Tokenizer | None = None) -> None:
    """Write a model in bfloat16 (the router's correction bias in float32).

    Each file appears complete or not at all, the configuration last, so that a directory without it is not yet a model.

    Args:
        model: the weights.
        directory: made if missing.
        tokenizer: written to ``tokenizer.json``; None leaves that file as it is.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for names, variable in _variables(model):
        kept = np.float32 if isinstance(variable, Buffer) else ml_dtypes.bfloat16
        whole = np.asarray(variable[...]).astype(kept)
        tensors |= zip(names, whole if _is_stacked(names) else [whole], strict=True)
    write_tensors(directory / WEIGHTS, tensors)
    if tokenizer is not None:
        replace_file(directory / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    replace_file(directory / CONFIG, (json.dumps(model.config.to_hf(), indent=2) + "\n").encode())


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load a model's tokenizer.

    Args:
        name: as in ``find``.

    Raises:
        ValueError: the file is missing or damaged, or has tokens beyond the model's vocabulary.
    """
    from tokenizers import Tokenizer  # only text needs it, and its import takes a while

    path = find(name) / TOKENIZER
    _read_json(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a tokenizer ({error}). Fetch the file again.") from error
    size, limit = tokenizer.get_vocab_size(), load_config(name).vocab_size
    if size > limit:
        raise ValueError(
            f"{path}: {size} tokens, the model's vocabulary has {limit}. Use the tokenizer that belongs to the model."
        )
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error
    except (ValueError, RecursionError) as error:  # no JSON, a number of too many digits, too many brackets
        raise ValueError(f"{path}: not JSON ({error}). Fetch the file again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object. Fetch the file again.")
    return content


def _variables(model: Decoder) -> Iterator[tuple[tuple[str, ...], nnx.Variable[Array]]]:
    """Every variable with the name of its tensor, or the names of its slices along the first axis."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        *prefix, last = (str(part) for part in path)
        if prefix[-1] == "experts":
            stem = ".".join(prefix)
            yield tuple(f"{stem}.{e}.{last}.weight" for e in range(variable.shape[0])), variable
        else:
            yield (".".join([*prefix, last]),), variable


def _is_stacked(names: tuple[str, ...]) -> bool:
    return ".experts." in names[0]


def _check_tensors(path: Path, variables: dict, tensors: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless the file holds exactly the tensors of the model."""
    wanted = {
        name: tuple(variable.shape[1:]) if _is_stacked(names) else tuple(variable.shape)
        for names, variable in variables.items()
        for name in names
    }
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    for name, tensor in tensors.items():
        if name in wanted and tensor.shape != wanted[name]:
            problems.append(f"{name} is {list(tensor.shape)}, wanted {list(wanted[name])}")
        elif name in wanted and tensor.dtype.kind not in "fV":
            problems.append(f"{name} is {tensor.dtype}, wanted floats")
        elif name in wanted and tensor.dtype.itemsize < 2:
            problems.append(
                f"{name} is {tensor.dtype}; block-scaled weights are not supported, convert them to bfloat16"
            )
        elif name not in wanted and not _REDUNDANT.fullmatch(name):
            problems.append(f"{name} is not part of this model")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{path}: "
            + "; ".join(problems[:_SHOWN])
            + more
            + f". {CONFIG} and {WEIGHTS} must be of one model."
        )
