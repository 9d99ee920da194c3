"""Writing a step's new tokens into the cache."""

from __future__ import annotations

from typing import Any

from jax import Array

from dsa_jax import xla
from dsa_jax.arguments import described
from dsa_jax.cache import Cache
from dsa_jax.forms import INDEX_FORMS, QUANT_BLOCK_SIZE
from dsa_jax.layout import SCALE_RULES, TIE_RULES, Role
from dsa_jax.metadata import Step
from dsa_jax.ops import gpu
from dsa_jax.ops.checks import Problems, check_cache, check_layer, check_step
from dsa_jax.ops.dispatch import Candidate, Choice, dispatch
from dsa_jax.pallas.tuning import KernelOrReference, choose
from dsa_jax.quant import ScaleRule, TieRule


def quantize_index_k(
    k: Array,
    form: str,
    *,
    scale_rule: ScaleRule = "ue8m0",
    tie_rule: TieRule = "deepgemm",
    implementation: Choice = None,
) -> tuple[Array, Array | None]:
    """Quantise indexer keys, or queries, as the cache stores them.

    Args:
        k: floats ``[N, D]``: after LayerNorm (keys), rotary and, where the layout says so, Hadamard.
        form: ``"fp8"``, ``"fp4"`` (D = 128) or ``"f32"``.
        scale_rule: of FP8: ``"ue8m0"`` (power-of-two scales, DeepSeek's default) or ``"fp32"``.
        tie_rule: of FP4: ``"deepgemm"`` (half-way values towards zero) or ``"even"``.
        implementation: see ``dsa_jax.ops``.

    Returns:
        ``(uint8[N, D], float32[N])`` for ``"fp8"``; ``(uint8[N, D/2], int32[N])`` for ``"fp4"``: two codes a byte, the even
        element in the low nibble, and four UE8M0 scale bytes a vector; ``(float32[N, D], None)`` for ``"f32"``.

    Raises:
        ValueError: for a wrong shape or dtype, or an unknown form or rule.

    >>> import jax.numpy as jnp
    >>> data, scale = quantize_index_k(jnp.full((1, 128), 448.0, jnp.float32), "fp8")
    >>> int(data[0, 0]), float(scale[0])
    (126, 1.0)
    """
    problems = Problems("quantize_index_k")
    problems.shape("k", k, (None, None), "N, D")
    problems.dtype("k", k, ("float",))
    width = k.shape[1] if getattr(k, "ndim", None) == 2 else None
    words = (
        ("form", form, INDEX_FORMS),
        ("scale_rule", scale_rule, SCALE_RULES),
        ("tie_rule", tie_rule, TIE_RULES),
    )
    for name, word, known in words:
        if not isinstance(word, str) or word not in known:
            problems.note(f"{name} is {described(word)}, wanted {' or '.join(map(repr, known))}")
        elif name == "form" and (width == 0 or (word == "fp4" and width not in (None, QUANT_BLOCK_SIZE))):
            problems.note(f"k has D = {width}, wanted {QUANT_BLOCK_SIZE if word == 'fp4' else 'at least 1'}")
    problems.raise_if_any("Pass float keys [N, D], one of the index forms and known rules.")
    candidates = (Candidate("xla", xla.quantize_index_k),)
    return dispatch("quantize_index_k", implementation, candidates, k, form, scale_rule, tie_rule)


def append_index_k(
    cache: Cache,
    layer: int | Array,
    k: Array,
    step: Step,
    *,
    implementation: Choice = None,
    config: Any = None,
) -> Cache:
    """Quantise the step's indexer keys and write them at the step's rows.

    Padding tokens (row -1) write nothing. The keys must carry the Hadamard rotation exactly when
    ``cache.layout.hadamard`` is set, as must the queries.

    Args:
        cache: the cache; not changed. Under a ``jit`` that donates it, the pool is updated in place.
        layer: local layer number, a Python int or a traced ``int32`` scalar.
        k: floats ``[N, D]``.
        step: ``StepMetadata.derive()`` for this cache's layout.
        implementation, config: see ``dsa_jax.ops``; the schedule is ``append_triton.Config``.

    Returns:
        A cache with the new keys.

    Raises:
        ValueError: for a wrong shape or dtype, another cache's step, a shared-indexer layer, or a ``config`` that is not the
            named kernel's.
    """
    check_cache("append_index_k", cache)
    check_step("append_index_k", step)
    problems = Problems("append_index_k")
    problems.shape("k", k, (step.bucket.tokens, cache.layout.index_head_dim), "N, D")
    problems.dtype("k", k, ("float",))
    problems.same_layout(cache, step)
    problems.raise_if_any("Pass one float key per token place of the step's bucket.")
    check_layer("append_index_k", cache, layer, Role.INDEX_KEY)
    kernels, reference = gpu.append_index_k(cache), Candidate("xla", xla.append_index_k)
    facts = {"form": cache.layout.index_form, "tokens": step.bucket.tokens}
    first = choose("append_index_k", KernelOrReference, facts).first
    candidates = (reference, *kernels) if first == "xla" else (*kernels, reference)
    arguments = (cache, layer, k, step.rows)
    return dispatch("append_index_k", implementation, candidates, *arguments, config=config)


def append_latent(
    cache: Cache,
    layer: int | Array,
    latent: Array,
    k_rope: Array,
    step: Step,
    *,
    key_scale: float | Array | None = None,
    implementation: Choice = None,
    config: Any = None,
) -> Cache:
    """Write the step's MLA latents and rotary keys at the step's rows.

    Args:
        cache: the cache; not changed.
        layer: local layer number, a Python int or a traced ``int32`` scalar.
        latent: floats ``[N, latent_dim]``, after the latent's RMSNorm.
        k_rope: floats ``[N, rope_dim]``, after rotary.
        step: ``StepMetadata.derive()`` for this cache's layout.
        key_scale: positive per-tensor scale of the ``fp8`` form and global scale of ``nvfp4``, a number or a ``float32``
            scalar, 1 by default; what is stored are codes of ``x / key_scale``, so readers need the same scale. The other
            forms take none.
        implementation, config: see ``dsa_jax.ops``; the schedule is ``append_triton.Config``.

    Returns:
        A cache with the new latents.

    Raises:
        ValueError: for a wrong shape or dtype, another cache's step, an unknown layer, a ``key_scale`` that the form does
            not take, or a ``config`` that is not the named kernel's.
    """
    check_cache("append_latent", cache)
    check_step("append_latent", step)
    layout = cache.layout
    problems = Problems("append_latent")
    problems.shape("latent", latent, (step.bucket.tokens, layout.latent_dim), "N, latent_dim")
    problems.shape("k_rope", k_rope, (step.bucket.tokens, layout.rope_dim), "N, rope_dim")
    problems.dtype("latent", latent, ("float",))
    problems.dtype("k_rope", k_rope, ("float",))
    problems.same_layout(cache, step)
    check_key_scale(problems, cache, key_scale)
    problems.raise_if_any(
        "Pass one float row per token place of the step's bucket, and the key_scale that readers use, if any."
    )
    check_layer("append_latent", cache, layer, Role.KEY)
    candidates = (*gpu.append_latent(cache), Candidate("xla", xla.append_latent))
    arguments = (cache, layer, latent, k_rope, step.rows, key_scale)
    return dispatch("append_latent", implementation, candidates, *arguments, config=config)


def check_key_scale(problems: Problems, cache: Cache, key_scale: float | Array | None) -> None:
    """Note a ``key_scale`` that is no positive scalar, or is given to a form that has none."""
    if key_scale is None:
        return
    if cache.layout.key_form not in ("fp8", "nvfp4"):
        problems.note(
            f"key_scale is given, but key_form {cache.layout.key_form!r} has no per-tensor scale: leave it out"
        )
    problems.scale("key_scale", key_scale)
