"""The exact reference of every op: the oracle of all tests, the CPU path, and the implementation that never refuses."""

from dsa_jax.xla.append import append_index_k as append_index_k
from dsa_jax.xla.append import append_latent as append_latent
from dsa_jax.xla.append import quantize_index_k as quantize_index_k
from dsa_jax.xla.gather import gather_index_k as gather_index_k
from dsa_jax.xla.logits import mqa_logits as mqa_logits
from dsa_jax.xla.logits import paged_mqa_logits as paged_mqa_logits
from dsa_jax.xla.rows import to_rows as to_rows
from dsa_jax.xla.sparse_mla import sparse_mla as sparse_mla
from dsa_jax.xla.topk import topk_indices as topk_indices
