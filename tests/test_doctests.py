"""The examples in the docstrings of every module, under the module's installed name."""

import doctest
import importlib
import pkgutil

import pytest

import dsa_jax
import dsa_jax.models

# An editable install keeps the models in a folder of their own: walk both.
PACKAGES = {package.__name__: package.__path__ for package in (dsa_jax, dsa_jax.models)}
MODULES = sorted(
    PACKAGES.keys()
    | {m.name for name, path in PACKAGES.items() for m in pkgutil.walk_packages(path, f"{name}.")}
)


def test_models_are_among_the_modules():
    assert any(name.startswith("dsa_jax.models.") for name in MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0, (
        f"{result.failed} of {result.attempted} examples of {name} fail: see the output above"
    )
