"""GPU kernels.

One file per kernel: ``<op>_mosaic.py`` for Mosaic GPU, ``<op>_triton.py`` for Pallas-Triton (deprecated in JAX; such a
file can be deleted without touching anything else). A kernel file takes plain arrays and has a ``supported_on`` that
raises ``NotImplementedError`` with the reason where the kernel cannot run.
"""
