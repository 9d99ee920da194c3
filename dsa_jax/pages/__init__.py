"""Host side of the cache: which request owns which page slot."""

from dsa_jax.pages.allocator import OutOfPages as OutOfPages
from dsa_jax.pages.allocator import PagePoolState as PagePoolState
from dsa_jax.pages.allocator import fork as fork
from dsa_jax.pages.allocator import free as free
from dsa_jax.pages.allocator import grow as grow
from dsa_jax.pages.allocator import shrink as shrink
