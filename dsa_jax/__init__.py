"""DeepSeek Sparse Attention in JAX: its caches as one immutable pytree, and pure functions over it.

The cache is a ``Cache`` (page pools and per-layer index maps) described by a static ``CacheLayout``. A step's facts are
``StepMetadata``; ``derive()`` turns them into a ``Step`` at the top of the jitted step; the ops in ``dsa_jax.ops`` take
both. Models that use them live in ``dsa_jax.models``.
"""

from dsa_jax.cache import Cache as Cache
from dsa_jax.config import DSAConfig as DSAConfig
from dsa_jax.layout import CacheLayout as CacheLayout
from dsa_jax.layout import PageIndex as PageIndex
from dsa_jax.layout import Role as Role
from dsa_jax.metadata import Bucket as Bucket
from dsa_jax.metadata import Step as Step
from dsa_jax.metadata import StepMetadata as StepMetadata
from dsa_jax.pages import PagePoolState as PagePoolState

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "Cache",
    "CacheLayout",
    "DSAConfig",
    "PageIndex",
    "PagePoolState",
    "Role",
    "Step",
    "StepMetadata",
]
