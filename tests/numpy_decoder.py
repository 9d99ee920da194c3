"""A whole model in NumPy float64, token by token, written from the published description and not from the library.

It knows the weights by their checkpoint names and the configuration by its fields; it shares no code with what it checks.
"""

from __future__ import annotations

import math

import numpy as np
from flax import nnx

from dsa_jax.models.config import ModelConfig
from dsa_jax.models.decoder import Decoder


def weights_of(model: Decoder) -> dict[str, np.ndarray]:
    """All weights as float64 by dotted path."""
    state = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(v[...], np.float64) for path, v in state}


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def frequencies(config: ModelConfig):
    rope, half = config.dsa.rope, config.dsa.qk_rope_head_dim // 2
    plain = np.array([rope.theta ** (-i / half) for i in range(half)])
    if rope.type == "default":
        return plain
    edge = [
        half * math.log(rope.original_max_position_embeddings / (2 * math.pi * turns)) / math.log(rope.theta)
        for turns in (rope.beta_fast, rope.beta_slow)
    ]
    low, high = max(math.floor(edge[0]), 0), min(math.ceil(edge[1]), 2 * half - 1)
    out = []
    for i, f in enumerate(plain):
        slowed = min(max((i - low) / (high - low), 0), 1)
        out.append(f * (1 - slowed) + f / rope.factor * slowed)
    return np.array(out)


def turn(x, position, freqs, interleaved):
    """Rotate the pairs of a vector by complex multiplication."""
    half = len(freqs)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    z = (first + 1j * second) * np.exp(1j * position * freqs)
    out = np.empty_like(x)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = z.real, z.imag
    else:
        out[..., :half], out[..., half:] = z.real, z.imag
    return out


def sylvester(n):
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(n)


def index_query_key_weights(w, prefix, config, x, q_lora, position):
    """Queries [H, D], key [D] and head weights [H] of one token."""
    dsa = config.dsa
    freqs, width, rotated = frequencies(config), dsa.index_head_dim, dsa.qk_rope_head_dim
    q = (w[prefix + "wq_b.weight"] @ q_lora).reshape(dsa.index_n_heads, width)
    k = w[prefix + "wk.weight"] @ x
    k = (k - k.mean()) / np.sqrt(k.var() + 1e-6) * w[prefix + "k_norm.weight"] + w[prefix + "k_norm.bias"]
    for vector in (q, k):
        vector[..., :rotated] = turn(vector[..., :rotated], position, freqs, dsa.indexer_rope_interleave)
    if dsa.index_hadamard:
        q, k = q @ sylvester(width), k @ sylvester(width)
    head = w[prefix + "weights_proj.weight"] @ x / math.sqrt(dsa.index_n_heads) / math.sqrt(width)
    return q, k, head


def index_score_rows(w, prefix, config, xs, q_loras):
    """Scores [S, S] of a sequence, minus infinity above the diagonal."""
    parts = [
        index_query_key_weights(w, prefix, config, x, ql, t)
        for t, (x, ql) in enumerate(zip(xs, q_loras, strict=True))
    ]
    scores = np.full((len(xs), len(xs)), -np.inf)
    for t, (q, _, head) in enumerate(parts):
        for s in range(t + 1):
            scores[t, s] = sum(h * max(0.0, float(v)) for h, v in zip(head, q @ parts[s][1], strict=True))
    return scores


def selected_rows(scores, k):
    """For each row the positions of its k best finite scores, lowest first on ties."""
    return [
        sorted(sorted(range(t + 1), key=lambda s, row=row: (-row[s], s))[:k]) for t, row in enumerate(scores)
    ]


def q_lora_of(w, prefix, x):
    return rms(w[prefix + "q_a_proj.weight"] @ x, w[prefix + "q_a_layernorm.weight"], 1e-6)


def attention(w, prefix, config, xs, selection):
    """Absorbed attention of a sequence; returns outputs [S, hidden] and the selection of each row."""
    dsa, freqs = config.dsa, frequencies(config)
    heads, nope, rope, latent = dsa.num_heads, dsa.qk_nope_head_dim, dsa.qk_rope_head_dim, dsa.kv_lora_rank
    scale = (nope + rope) ** -0.5
    if dsa.rope.type == "yarn":
        scale *= (0.1 * math.log(dsa.rope.factor) + 1) ** 2
    up = w[prefix + "kv_b_proj.weight"].reshape(heads, nope + dsa.v_head_dim, latent)
    q_loras = [q_lora_of(w, prefix, x) for x in xs]
    if prefix + "indexer.wk.weight" in w:
        selection = selected_rows(
            index_score_rows(w, prefix + "indexer.", config, xs, q_loras), dsa.index_topk
        )
    cached = []
    for t, x in enumerate(xs):
        both = w[prefix + "kv_a_proj_with_mqa.weight"] @ x
        c = rms(both[:latent], w[prefix + "kv_a_layernorm.weight"], 1e-6)
        cached.append(np.concatenate([c, turn(both[latent:], t, freqs, True)]))
    out = []
    for t, q_lora in enumerate(q_loras):
        keys = np.array([cached[s] for s in selection[t]])
        values = []
        for h, q in enumerate((w[prefix + "q_b_proj.weight"] @ q_lora).reshape(heads, nope + rope)):
            query = np.concatenate([q[:nope] @ up[h, :nope], turn(q[nope:], t, freqs, True)])
            p = np.exp((keys @ query) * scale - np.max((keys @ query) * scale))
            values.append(up[h, nope:] @ ((p / p.sum()) @ keys[:, :latent]))
        out.append(w[prefix + "o_proj.weight"] @ np.concatenate(values))
    return np.array(out), selection


def choose_experts(scores, bias, config: ModelConfig):
    """Experts and weights of one token from its sigmoid scores."""
    size = len(scores) // config.n_group
    biased = scores + bias
    groups = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(config.n_group)]
    kept = sorted(range(config.n_group), key=lambda g: (-groups[g], g))[: config.topk_group]
    candidates = [e for e in range(len(scores)) if e // size in kept]
    chosen = sorted(candidates, key=lambda e: (-biased[e], e))[: config.num_experts_per_tok]
    weights = scores[chosen] / (scores[chosen].sum() if config.norm_topk_prob else 1.0)
    return chosen, weights * config.routed_scaling_factor


def feed_forward(w, prefix, config, x):
    def mlp(stem):
        return w[stem + "down_proj.weight"] @ (
            silu(w[stem + "gate_proj.weight"] @ x) * (w[stem + "up_proj.weight"] @ x)
        )

    if prefix + "gate.weight" not in w:
        return mlp(prefix)
    scores = sigmoid(w[prefix + "gate.weight"] @ x)
    out = mlp(prefix + "shared_experts.")
    chosen, weights = choose_experts(scores, w[prefix + "gate.e_score_correction_bias"], config)
    for e, weight in zip(chosen, weights, strict=True):
        gate, up, down = (w[f"{prefix}experts.{name}_proj"][e] for name in ("gate", "up", "down"))
        out = out + weight * (down @ (silu(gate @ x) * (up @ x)))
    return out


def decoder_layer(w, number, config, xs, selection):
    prefix, eps = f"model.layers.{number}.", config.rms_norm_eps
    attended, selection = attention(
        w, prefix + "self_attn.", config, rms(xs, w[prefix + "input_layernorm.weight"], eps), selection
    )
    xs = xs + attended
    normed = rms(xs, w[prefix + "post_attention_layernorm.weight"], eps)
    return xs + np.array([feed_forward(w, prefix + "mlp.", config, x) for x in normed]), selection


def forward(model: Decoder, tokens) -> tuple[np.ndarray, np.ndarray]:
    """Logits [S, vocab] of one sequence, and those of the prediction layer [S - 1, vocab]."""
    w, config = weights_of(model), model.config
    embedding, eps, count = w["model.embed_tokens.weight"], config.rms_norm_eps, config.dsa.num_layers
    xs, selection = embedding[tokens], None
    for number in range(count):
        xs, selection = decoder_layer(w, number, config, xs, selection)
    hidden = rms(xs, w["model.norm.weight"], eps)
    prefix = f"model.layers.{count}."
    joined = np.concatenate(
        [
            rms(embedding[tokens[1:]], w[prefix + "enorm.weight"], eps),
            rms(hidden[:-1], w[prefix + "hnorm.weight"], eps),
        ],
        axis=-1,
    )
    ys, _ = decoder_layer(w, count, config, joined @ w[prefix + "eh_proj.weight"].T, None)
    predicted = rms(ys, w[prefix + "shared_head.norm.weight"], eps)
    return hidden @ w["lm_head.weight"].T, predicted @ w["lm_head.weight"].T
