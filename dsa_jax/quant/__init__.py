"""The only place that turns values into cache bytes and cache bytes into values.

Quantised bytes are ``uint8`` everywhere: a float8 scatter copies its pool on CPU, and sm80 cannot load float8 at all.
Scales that are powers of two are built from the bits of the float, because ``exp2(ceil(log2(x)))`` misses the right power
next to powers of two. Nothing is decoded by converting from a small float: inside one ``jit`` XLA cancels such a
conversion against the one that encoded, and the quantisation would vanish.

Ops go through ``encode_index``, ``encode_latent``, ``decode_query``, ``decode_keys`` and ``decode_latent``, which know the
storage forms; they never look at bytes themselves.
"""

from dsa_jax.quant.forms import (
    Query,
    decode_index,
    decode_keys,
    decode_latent,
    decode_query,
    encode_index,
    encode_latent,
)
from dsa_jax.quant.fp4 import TieRule, decode_e2m1, dequantize_fp4, encode_e2m1, quantize_fp4
from dsa_jax.quant.fp8 import (
    AMAX_FLOOR,
    E4M3_MAX,
    ScaleRule,
    decode_e4m3,
    dequantize_fp8,
    encode_e4m3,
    pow2_ceil,
    quantize_fp8,
)
from dsa_jax.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from dsa_jax.quant.rotation import hadamard

__all__ = [
    "AMAX_FLOOR",
    "E4M3_MAX",
    "Query",
    "ScaleRule",
    "TieRule",
    "decode_e2m1",
    "decode_e4m3",
    "decode_index",
    "decode_keys",
    "decode_latent",
    "decode_query",
    "dequantize_fp4",
    "dequantize_fp8",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "encode_index",
    "encode_latent",
    "hadamard",
    "pow2_ceil",
    "quantize_fp4",
    "quantize_fp8",
    "quantize_nvfp4",
]
