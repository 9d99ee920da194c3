"""The project as a whole: metadata, shipped files, sizes, docstrings and the direction of imports."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import dsa_jax
import dsa_jax.models

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted([*(ROOT / "dsa_jax").rglob("*.py"), *(ROOT / "models").rglob("*.py")])
LONGEST_FILE = 500

# From the bottom of the house to the top. A file may import from its own floor and from those below.
FLOORS = (
    (
        "arguments",
        "compat",
        "forms",
        "quant",
        "hf_fields",
        "rope_parameters",
        "full_layers",
        "config",
        "presets",
    ),
    ("page_index", "coalesce", "pool_views", "typed_arrays", "layout_v1", "layout", "layout_text"),
    ("planning", "sizing", "selection", "chunking"),
    ("codec", "cache", "bucket", "metadata", "transfer"),
    ("xla", "pallas"),
    ("ops",),
    ("pages", "support"),
    ("draft", "sampling", "sharding"),
    ("models", "loops"),
    ("engine", "draft_engine"),
    ("cli", "viz"),
    ("__main__",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def project_files() -> list[Path]:
    """The files that git tracks or would track; outside a repository, those of the folders that hold the project."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode == 0 and listing.stdout:
        found = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        folders = ("dsa_jax", "models", "tests", "benchmarks", "notebooks", "scripts")
        found = [
            path
            for folder in folders
            for path in (ROOT / folder).rglob("*")
            if "__pycache__" not in path.parts
        ]
    return sorted(path for path in found if path.is_file())


def module_name(path: Path) -> str:
    """The name that a source file is imported under once installed."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "models":
        parts = ("dsa_jax", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imported_modules(name: str, tree: ast.Module, modules=frozenset(MODULES)) -> set[str]:
    """The project's modules that a module imports anywhere, also inside functions and for types alone."""
    package = name if MODULES.get(name, Path("x.py")).name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if base == "dsa_jax" and alias.name.startswith("__"):
                    continue  # the version is no dependency on what __init__ exports
                found.add(inner if inner in modules else base)
    return {module for module in found if module.split(".")[0] == "dsa_jax"}


def floor(module: str) -> int:
    """The floor of a module; the top package's own exports sit above everything."""
    parts = module.split(".")
    return len(FLOORS) if len(parts) == 1 else FLOOR_OF.get(parts[1], 0)


def upward_imports(name: str, tree: ast.Module) -> list[str]:
    """The imports of a module that point to a higher floor."""
    return sorted(other for other in imported_modules(name, tree) if floor(other) > floor(name))


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions, classes and methods without a docstring, by name."""
    missing = [] if ast.get_docstring(tree) or not tree.body else ["the module"]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if node.name.startswith("_") or "overload" in decorators or f"{node.name}.setter" in decorators:
                continue
            if not ast.get_docstring(node):
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return missing


def test_version_agrees():
    assert re.fullmatch(r"\d+\.\d+\.\d+", dsa_jax.__version__)
    assert importlib.metadata.version("dsa-jax") == dsa_jax.__version__


def test_console_script_is_installed():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="dsa-jax")
    assert [script.value for script in scripts] == ["dsa_jax.cli:main"]
    assert callable(next(iter(scripts)).load())


@pytest.mark.parametrize("package", ["dsa_jax", "dsa_jax.models"])
def test_type_hints_are_shipped(package):
    assert files(package).joinpath("py.typed").is_file()


def test_models_are_a_package_of_dsa_jax():
    assert Path(dsa_jax.models.__file__).parent.name == "models"
    assert dsa_jax.models.__name__ == "dsa_jax.models"


def test_every_folder_with_code_is_a_package():
    bare = {path.parent for path in SOURCES if not (path.parent / "__init__.py").exists()}
    assert not bare, f"no __init__.py, so the wheel leaves them out: {sorted(map(str, bare))}"


def test_every_data_file_is_declared():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    shipped = set()
    for package, folder in (("dsa_jax", ROOT / "dsa_jax"), ("dsa_jax.models", ROOT / "models")):
        shipped |= {path for pattern in patterns[package] for path in folder.glob(pattern)}
    data = {
        path
        for path in project_files()
        if path.suffix != ".py" and path.relative_to(ROOT).parts[0] in ("dsa_jax", "models")
    }
    assert data, "at least the py.typed files are there"
    assert not data - shipped, f"[tool.setuptools.package-data] leaves out {sorted(map(str, data - shipped))}"


def test_locks_hold_hashes_and_no_index():
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    assert len(locks) == 4
    for lock in locks:
        text = lock.read_text()
        assert "--hash=sha256:" in text
        assert not re.search(r"https?:|file:|--(extra-)?index|--find-links", text), (
            f"{lock.name} names a place"
        )
    assert "\njax==0.11.2" in (ROOT / "requirements" / "lock.txt").read_text()


def test_no_file_is_too_long():
    lengths = {path: len(path.read_text().splitlines()) for path in project_files() if path.suffix == ".py"}
    long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LONGEST_FILE}
    assert not long, f"over {LONGEST_FILE} lines: {long}"


def test_everything_public_is_documented():
    missing = {name: undocumented(ast.parse(path.read_text())) for name, path in MODULES.items()}
    missing = {name: what for name, what in missing.items() if what}
    assert not missing, f"without a docstring: {missing}"


def test_no_path_of_a_machine():
    # Put together here, so that this file does not find itself. A word before the slash makes it a relative path.
    folders = "|".join(["work", "root", "home", "Users", "tmp", "opt"])
    machine = re.compile(rf"(?<![\w.}}\])>*-])/(?:{folders})/")
    found = []
    for path in project_files():
        if path.name in ("tokenizer.json", Path(__file__).name):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}: {line.strip()}" for line in text.splitlines() if machine.search(line)
        ]
    assert not found, f"paths of a machine: {found}"


def test_every_module_has_a_floor():
    strangers = sorted(name for name in MODULES if name.count(".") and name.split(".")[1] not in FLOOR_OF)
    assert not strangers, f"give them a floor in {Path(__file__).name}: {strangers}"


def test_imports_point_downwards():
    upward = {name: upward_imports(name, ast.parse(path.read_text())) for name, path in MODULES.items()}
    upward = {name: others for name, others in upward.items() if others}
    assert not upward, f"imports that point upwards: {upward}"


def test_imports_have_no_cycle():
    graph = {
        name: imported_modules(name, ast.parse(path.read_text())) & MODULES.keys() - {name}
        for name, path in MODULES.items()
    }
    # Take away modules that import nothing left, or that nothing left imports; whatever remains stands on a cycle.
    while ready := {
        name
        for name, others in graph.items()
        if not others & graph.keys() or not any(name in more for more in graph.values())
    }:
        graph = {name: others for name, others in graph.items() if name not in ready}
    assert not graph, f"import cycle among {sorted(graph)}"


def test_only_compat_imports_private_jax():
    private = re.compile(r"^\s*(?:from|import)\s+jax(?:lib)?\.(?:[\w.]*\.)?_", re.MULTILINE)
    users = sorted(name for name, path in MODULES.items() if private.search(path.read_text()))
    assert not set(users) - {"dsa_jax.compat"}, f"private JAX modules belong in dsa_jax.compat: {users}"


@pytest.mark.parametrize(
    ("statement", "seen"),
    [
        ("from dsa_jax.engine import Engine", ["dsa_jax.engine"]),
        ("def f():\n    import dsa_jax.cli", ["dsa_jax.cli"]),
        ("from dsa_jax import ops", ["dsa_jax.ops"]),
        ("from ..ops import dispatch", ["dsa_jax.ops.dispatch"]),
        ("import dsa_jax", ["dsa_jax"]),
        ("from dsa_jax import quant, __version__", []),
        ("import jax", []),
    ],
)
def test_upward_imports_are_seen(statement, seen):
    tree = ast.parse(statement)
    modules = frozenset(
        {"dsa_jax.ops", "dsa_jax.ops.dispatch", "dsa_jax.engine", "dsa_jax.cli", "dsa_jax.quant"}
    )
    found = imported_modules("dsa_jax.xla.logits", tree, modules)
    assert sorted(other for other in found if floor(other) > floor("dsa_jax.xla.logits")) == seen


def test_missing_docstrings_are_seen():
    source = '"""x"""\ndef f(): ...\ndef _g(): ...\nclass C:\n    """x"""\n    def m(self): ...\n    def __len__(self): ...'
    assert undocumented(ast.parse(source)) == ["f", "C.m"]
