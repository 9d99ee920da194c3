"""Finds the packages: ``models/`` installs as ``dsa_jax.models``, which pyproject.toml alone cannot say."""

from setuptools import find_packages, setup

core = find_packages(include=["dsa_jax", "dsa_jax.*"])
models = ["dsa_jax.models", *(f"dsa_jax.models.{name}" for name in find_packages("models"))]
setup(packages=core + models, package_dir={"dsa_jax": "dsa_jax", "dsa_jax.models": "models"})
