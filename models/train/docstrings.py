"""Reads docstrings out of installed packages: from source files by parsing, and at run time for the rest."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import os
import pkgutil
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

from dsa_jax.models.train.documents import Document, normalise

_PACKAGES = ("numpy", "scipy", "jax")
_SKIPPED_PARTS = {
    "test", "tests", "testing", "conftest", "idlelib", "turtledemo", "turtle", "antigravity", "this", "lib2to3",
    "site-packages", "__main__", "__pycache__", "ensurepip", "pydoc_data", "_vendor", "vendored", "f2py", "tools",
    "_pyinstaller", "distutils",
}  # fmt: skip
"""Modules that open windows or browsers, run programs when imported, or hold no documentation."""

_TEMPLATE = re.compile(r"%\(\w+\)s|\{\w+\}\s*$", re.MULTILINE)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST_SIGNATURE = 300


def collect() -> Iterator[Document]:
    """Yields every document of this installation, aliases and repeats included.

    Topics come first, then parsed sources, then what only importing shows, so that a text found both ways keeps the
    module of its source file.
    """
    yield from _topics()
    roots = [("python", "", Path(sysconfig.get_path("stdlib")))]
    for name in _PACKAGES:
        location = importlib.import_module(name).__path__[0]
        roots.append((name, name, Path(location)))
    known = set()
    for source, prefix, root in roots:
        for document in parsed_documents(source, prefix, root):
            known.add((document.module, document.name))
            yield document
    for source, prefix, _ in roots:
        for document, origin in _imported(source, prefix):
            # Decorators that add a paragraph at run time would bring every text a second time.
            if origin not in known:
                yield document


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        # Each topic is a page of the language reference; they are split like modules.
        yield Document(source="python", module=f"pydoc_data.topics.{name}", name=name, text=normalise(text))


def _document(source: str, module: str, name: str, signature: str, docstring: str) -> Document:
    if len(signature) > _LONGEST_SIGNATURE:
        signature = "(...)"
    heading = _ADDRESS.sub("", f"{name}{signature}")
    return Document(source=source, module=module, name=name, text=f"{heading}\n\n{normalise(docstring)}")


# --- from source files --------------------------------------------------------------------------------------------


def parsed_documents(source: str, prefix: str, root: Path) -> Iterator[Document]:
    """Yields the docstrings of all source files below a folder, in the order of their paths; nothing is run.

    Args:
        source: key of the licence table, noted in the documents.
        prefix: dotted name of the package that lies at ``root``, empty for a folder of top-level modules.
        root: the folder.
    """
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_PARTS.intersection(parts) or any(part.startswith("test_") for part in parts):
            continue
        module = ".".join(filter(None, (prefix, *(part for part in parts if part != "__init__"))))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue  # not a source of this Python: nothing to learn from it
        yield from _in_tree(source, module, module, tree)


def _in_tree(source: str, module: str, name: str, node: ast.AST) -> Iterator[Document]:
    text = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
    if text and not _TEMPLATE.search(text):
        signature = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
        yield _document(source, module, name, signature, text)
    for child in ast.iter_child_nodes(node):
        label = getattr(child, "name", None) if isinstance(child, ast.ClassDef | ast.FunctionDef) else None
        yield from _in_tree(source, module, f"{name}.{label}" if label else name, child)


# --- at run time --------------------------------------------------------------------------------------------------


def _imported(source: str, prefix: str) -> Iterator[tuple[Document, tuple[str, str]]]:
    """Yields documents with the (module, name) that the parser would have given the same object."""
    names = [prefix] if prefix else sorted(set(sys.stdlib_module_names) - _SKIPPED_PARTS)
    modules = [found for name in names for found in _import_all(name)]
    for module in modules:
        for name, holder in sorted(vars(module).items()):
            if not name.startswith("__") and _belongs(holder, module, prefix):
                yield from _of_object(source, module.__name__, f"{module.__name__}.{name}", holder)


def _import_all(name: str) -> list[types.ModuleType]:
    found = []
    module = _import(name)
    if module is None:
        return found
    found.append(module)
    for info in pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}."):
        last = info.name.rpartition(".")[2]
        if last not in _SKIPPED_PARTS and not last.startswith("test_"):
            found += _import_all(info.name)
    return found


def _import(name: str) -> types.ModuleType | None:
    """Imports one module quietly; None where it cannot be imported here (another system, a missing extra)."""
    silence = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (Exception, SystemExit):  # a foreign module may raise anything when it is imported
            return None


def _belongs(holder: object, module: types.ModuleType, prefix: str) -> bool:
    if not (inspect.isclass(holder) or callable(holder)):
        return False
    home = getattr(holder, "__module__", None) or module.__name__
    if not isinstance(home, str):
        return False
    return home.partition(".")[0] == prefix if prefix else home.partition(".")[0] in sys.stdlib_module_names


def _of_object(
    source: str, module: str, name: str, holder: object
) -> Iterator[tuple[Document, tuple[str, str]]]:
    members = [(name, holder)]
    if inspect.isclass(holder):
        for label, member in sorted(vars(holder).items()):
            if not label.startswith("__") and not inspect.isclass(member):
                members.append((f"{name}.{label}", getattr(member, "__func__", member)))
    for label, member in members:
        text = _docstring(member)
        if text:
            home = _home(member) or _home(holder) or module
            origin = (home, f"{home}.{getattr(member, '__qualname__', label)}")
            yield _document(source, home, label, _signature(member), text), origin


def _docstring(holder: object) -> str | None:
    text = getattr(holder, "__doc__", None)
    # An instance shows the text of its class: that is counted where the class is.
    if not isinstance(text, str) or (not inspect.isclass(holder) and text == type(holder).__doc__):
        return None
    # The one line that dataclasses and named tuples get by themselves is their signature, addresses included.
    if inspect.isclass(holder) and text.startswith(f"{holder.__name__}(") and "\n" not in text:
        return None
    return inspect.cleandoc(text)


def _home(holder: object) -> str | None:
    """The module whose file holds the code, which `__module__` often hides behind a public name."""
    try:
        code = getattr(inspect.unwrap(holder), "__code__", None)  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError):
        code = None  # objects that answer every attribute (mock) wrap themselves without end
    if isinstance(code, types.CodeType):
        name = _module_of_file(code.co_filename)
        if name is not None:
            return name
    home = getattr(holder, "__module__", None)
    return home if isinstance(home, str) else None


@functools.cache
def _module_of_file(path: str) -> str | None:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == path:
            return name
    return None


def _signature(holder: object) -> str:
    try:
        return re.sub(os.linesep, " ", str(inspect.signature(holder)))  # type: ignore[arg-type]
    except (ValueError, TypeError, NameError, AttributeError):
        return ""
