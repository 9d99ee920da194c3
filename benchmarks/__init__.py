"""Benchmarks of the GPU kernels: ``python -m benchmarks`` on a machine with an NVIDIA card."""
