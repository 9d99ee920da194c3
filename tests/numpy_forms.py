"""A second opinion on storage forms: FP4, NVFP4 and the 656-byte token in NumPy, in plain loops.

As ``numpy_model``, this restates definitions and knows nothing of the library. An *entry* is what one token leaves in the
pools: a dict from pool name to that pool's part.
"""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np

from numpy_model import E4M3, encode_e4m3, pow2_ceil, quantize_fp8

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)])
"""Values of the sixteen e2m1 codes."""


def e2m1_code(value: float, rule: str) -> int:
    """Nearest code of one value: ties towards zero and no -0 ("deepgemm"), or to the even code and -0 kept ("even")."""
    if np.isnan(value):
        return 0
    size = min(abs(float(value)), 6.0)
    distance = [abs(size - m) for m in MAGNITUDES]
    best = [code for code in range(8) if distance[code] == min(distance)]
    code = best[0] if rule == "deepgemm" or best[0] % 2 == 0 else best[-1]
    negative = bool(np.signbit(value)) and (rule == "even" or code > 0)
    return code + 8 * negative


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even element in the low nibble."""
    return np.array([int(a) + 16 * int(b) for a, b in zip(codes[0::2], codes[1::2], strict=True)], np.uint8)


def unpack(packed: np.ndarray) -> np.ndarray:
    """Codes of packed bytes."""
    return np.array([nibble for byte in packed.tolist() for nibble in (byte & 15, byte >> 4)])


def quantize_fp4(vectors: np.ndarray, rule: str = "deepgemm") -> tuple[np.ndarray, np.ndarray]:
    """``uint8[n, 64]`` and ``int32[n]`` of finite vectors ``[n, 128]``: a power of two for each 32 elements."""
    packed, words = [], []
    for vector in np.asarray(vectors, np.float64):
        codes, exponents = [], []
        for group in vector.reshape(4, 32):
            scale = pow2_ceil(max(np.abs(group).max(), float(np.float32(1e-4))) / 6)
            exponents.append(int(np.log2(scale)) + 127)
            codes += [e2m1_code(x / scale, rule) for x in group]
        packed.append(pack(np.array(codes)))
        words.append(struct.unpack("<i", bytes(exponents))[0])
    return np.array(packed, np.uint8).reshape(-1, 64), np.array(words, np.int32)


def dequantize_fp4(packed: np.ndarray, words: np.ndarray) -> np.ndarray:
    """``float64[n, 128]``."""
    out = []
    for row, word in zip(packed, words, strict=True):
        scales = [2.0 ** (byte - 127) for byte in struct.pack("<i", int(word))]
        out.append(E2M1[unpack(row)] * np.repeat(scales, 32))
    return np.array(out).reshape(-1, 128)


def quantize_nvfp4(vectors: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """``uint8[n, w/2]`` and ``uint8[n, w/16]``; every quotient and product rounded to float32, as it is defined."""
    packed, scales, g = [], [], np.float32(global_scale)
    for vector in np.asarray(vectors, np.float32):
        codes, own = [], []
        for group in vector.reshape(-1, 16):
            code = encode_e4m3(np.float32(np.abs(group).max() / np.float32(np.float32(6) * g)))
            scale = np.float32(np.float32(E4M3[int(code)]) * g)
            own.append(int(code))
            codes += [e2m1_code(np.float32(x / scale), "even") if scale > 0 else 0 for x in group]
        packed.append(pack(np.array(codes)))
        scales.append(own)
    width = np.shape(vectors)[1]
    return np.array(packed, np.uint8).reshape(-1, width // 2), np.array(scales, np.uint8).reshape(
        -1, width // 16
    )


def dequantize_nvfp4(packed: np.ndarray, scales: np.ndarray, global_scale: float) -> np.ndarray:
    """``float64[n, w]``."""
    values = np.array([E2M1[unpack(row)] for row in packed])
    return values * np.repeat(E4M3[scales], 16, axis=1) * float(np.float32(global_scale))


def index_entries(keys: np.ndarray, form: str, *, scale_rule: str = "ue8m0", tie_rule: str = "deepgemm"):
    """Entries of indexer keys ``[n, D]``, stacked over tokens."""
    if form == "f32":
        return {"index_key": np.asarray(keys, np.float32)}
    data, scale = quantize_fp8(keys, scale_rule) if form == "fp8" else quantize_fp4(keys, tie_rule)
    return {"index_key": data, "index_scale": scale}


def index_values(entry: dict[str, np.ndarray], form: str) -> np.ndarray:
    """Values of indexer keys, ``float64[n, D]``."""
    if form == "f32":
        return entry["index_key"].astype(np.float64)
    if form == "fp8":
        return E4M3[entry["index_key"]] * entry["index_scale"][:, None].astype(np.float64)
    return dequantize_fp4(entry["index_key"], entry["index_scale"])


def latent_entries(latent: np.ndarray, rope: np.ndarray, form: str, key_scale: float = 1.0):
    """Entries of latents ``[n, latent]`` and rotary keys ``[n, rope]``, stacked over tokens."""
    both = np.concatenate([latent, rope], axis=1).astype(np.float32)
    if form == "f32":
        return {"key": both}
    if form == "bf16":
        return {"key": both.astype(ml_dtypes.bfloat16)}
    if form == "fp8":
        return {"key": encode_e4m3(both / np.float32(key_scale))}
    if form == "nvfp4":
        packed, scales = quantize_nvfp4(both, key_scale)
        return {"key": packed, "key_scale": scales}
    tiles = np.asarray(latent, np.float64).reshape(len(latent), -1, 128)
    scale = np.array([[pow2_ceil(max(np.abs(tile).max() / 448, 1e-4)) for tile in token] for token in tiles])
    codes = encode_e4m3(tiles / scale[:, :, None]).reshape(np.shape(latent))
    rope = np.asarray(rope, np.float32).astype(ml_dtypes.bfloat16)
    return {"key": codes, "key_scale": scale.astype(np.float32), "key_rope": rope}


def latent_values(entry: dict[str, np.ndarray], form: str, key_scale: float = 1.0) -> np.ndarray:
    """Values of latents, ``float64[n, latent + rope]``."""
    if form in ("f32", "bf16"):
        return entry["key"].astype(np.float64)
    if form == "fp8":
        return E4M3[entry["key"]] * float(np.float32(key_scale))
    if form == "nvfp4":
        return dequantize_nvfp4(entry["key"], entry["key_scale"], key_scale)
    scales = np.repeat(entry["key_scale"].astype(np.float64), 128, axis=1)
    return np.concatenate([E4M3[entry["key"]] * scales, entry["key_rope"].astype(np.float64)], axis=1)


def page_bytes(entry: dict[str, np.ndarray], form: str) -> dict[str, bytes]:
    """One page, given as the entries of its tokens in order, as other tools keep it: bytes of each buffer.

    The indexer's page is planar, the 656-byte token interleaved, and the two parts of NVFP4 are buffers of their own.
    """
    little = lambda name: np.ascontiguousarray(entry[name]).tobytes()
    if form == "fp8_ds_mla":
        tokens = [
            b"".join(entry[name][t].tobytes() for name in ("key", "key_scale", "key_rope"))
            for t in range(len(entry["key"]))
        ]
        return {"key": b"".join(tokens)}
    if "index_key" in entry:
        return {"index_key": little("index_key") + (little("index_scale") if "index_scale" in entry else b"")}
    buffers = {"key": little("key")}
    return buffers | ({"key_block_scale": little("key_scale")} if form == "nvfp4" else {})
