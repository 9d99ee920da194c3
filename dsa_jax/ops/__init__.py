"""The ops of a DeepSeek-Sparse-Attention layer, as pure functions over a ``Cache`` and a ``Step``.

A layer is a straight line: project, ``append_index_k``, ``select_rows``, ``append_latent``, ``sparse_mla``, project.
``select_rows`` is ``select_tokens`` and ``to_rows`` in one. Attention reads every key back from the cache, this step's
keys too.

Every op takes ``implementation``: None lets the library choose and never fails, because the exact XLA reference is last;
``"mosaic"``, ``"triton"`` or ``"xla"`` is used or raises; a sequence is tried in order and all reasons are reported
together.

Ops whose kernels have schedules take ``config``, an instance of the named kernel's own class in ``dsa_jax.pallas``. It
changes how long the kernel takes, and at most the rounding of what it computes; it needs ``implementation`` to name that
one kernel. None lets the rules of ``dsa_jax.pallas.tuning`` choose by device and shape.
"""

from dsa_jax.ops.append import append_index_k as append_index_k
from dsa_jax.ops.append import append_latent as append_latent
from dsa_jax.ops.append import quantize_index_k as quantize_index_k
from dsa_jax.ops.gather import gather_index_k as gather_index_k
from dsa_jax.ops.logits import mqa_logits as mqa_logits
from dsa_jax.ops.logits import paged_mqa_logits as paged_mqa_logits
from dsa_jax.ops.select import select_rows as select_rows
from dsa_jax.ops.select import select_tokens as select_tokens
from dsa_jax.ops.select import to_rows as to_rows
from dsa_jax.ops.select import topk_indices as topk_indices
from dsa_jax.ops.sparse_mla import sparse_mla as sparse_mla

__all__ = [
    "append_index_k",
    "append_latent",
    "gather_index_k",
    "mqa_logits",
    "paged_mqa_logits",
    "quantize_index_k",
    "select_rows",
    "select_tokens",
    "sparse_mla",
    "to_rows",
    "topk_indices",
]
