"""``python -m dsa_jax``: the command ``dsa-jax`` where its script is not on the path."""

from __future__ import annotations

import sys

from dsa_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
