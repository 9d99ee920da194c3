"""Run by the wheel check with the Python that the wheel is installed in: ``check_installed.py CHECKOUT``."""

import importlib
import importlib.metadata
import json
import pkgutil
import sys
from importlib.resources import files
from pathlib import Path

import dsa_jax


def main(checkout: Path) -> None:
    """Import every module, and compare the shipped files with those of the checkout."""
    installed = Path(dsa_jax.__file__).parent
    assert not installed.is_relative_to(checkout), f"dsa_jax came from the checkout: {installed}"
    assert importlib.metadata.version("dsa-jax") == dsa_jax.__version__
    names = [module.name for module in pkgutil.walk_packages(dsa_jax.__path__, "dsa_jax.")]
    for name in names:
        importlib.import_module(name)
    for package, folder in (("dsa_jax", checkout / "dsa_jax"), ("dsa_jax.models", checkout / "models")):
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if path.is_dir() or "__pycache__" in path.parts or path.suffix == ".pyc":
                continue
            shipped = files(package).joinpath(*relative.parts)
            assert shipped.is_file(), f"{path.relative_to(checkout)} is not in the wheel"
            assert shipped.read_bytes() == path.read_bytes(), f"{relative} differs in the wheel"
    for checkpoint in (installed / "models" / "checkpoints").glob("*/config.json"):
        json.loads(checkpoint.read_text())
    print(f"wheel-check: {len(names)} modules import, all files of the checkout's packages are there")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
