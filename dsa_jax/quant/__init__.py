"""The only place that turns values into cache bytes and cache bytes into values.

Quantised bytes are ``uint8`` everywhere: a float8 scatter copies its pool on CPU, and sm80 cannot load float8 at all.
Scales that are powers of two are built from the bits of the float, because ``exp2(ceil(log2(x)))`` misses the right power
next to powers of two. Nothing is decoded by converting from a small float: inside one ``jit`` XLA cancels such a
conversion against the one that encoded, and the quantisation would vanish.

Ops go through ``encode_index``, ``encode_latent``, ``decode_query``, ``decode_keys`` and ``decode_latent``, which know the
storage forms; they never look at bytes themselves.
"""

from dsa_jax.quant.forms import Query as Query
from dsa_jax.quant.forms import decode_index as decode_index
from dsa_jax.quant.forms import decode_keys as decode_keys
from dsa_jax.quant.forms import decode_latent as decode_latent
from dsa_jax.quant.forms import decode_query as decode_query
from dsa_jax.quant.forms import encode_index as encode_index
from dsa_jax.quant.forms import encode_latent as encode_latent
from dsa_jax.quant.fp4 import TieRule as TieRule
from dsa_jax.quant.fp4 import decode_e2m1 as decode_e2m1
from dsa_jax.quant.fp4 import dequantize_fp4 as dequantize_fp4
from dsa_jax.quant.fp4 import encode_e2m1 as encode_e2m1
from dsa_jax.quant.fp4 import quantize_fp4 as quantize_fp4
from dsa_jax.quant.fp8 import AMAX_FLOOR as AMAX_FLOOR
from dsa_jax.quant.fp8 import E4M3_MAX as E4M3_MAX
from dsa_jax.quant.fp8 import ScaleRule as ScaleRule
from dsa_jax.quant.fp8 import decode_e4m3 as decode_e4m3
from dsa_jax.quant.fp8 import dequantize_fp8 as dequantize_fp8
from dsa_jax.quant.fp8 import encode_e4m3 as encode_e4m3
from dsa_jax.quant.fp8 import pow2_ceil as pow2_ceil
from dsa_jax.quant.fp8 import quantize_fp8 as quantize_fp8
from dsa_jax.quant.nvfp4 import dequantize_nvfp4 as dequantize_nvfp4
from dsa_jax.quant.nvfp4 import quantize_nvfp4 as quantize_nvfp4
from dsa_jax.quant.rotation import hadamard as hadamard
