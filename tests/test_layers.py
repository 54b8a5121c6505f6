"""Imports point down only, and `core` is pure: time, randomness and the outside world come as arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tiercache"

# From the top down. A module may import what stands in lower lines, and its own package.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("daemon",),
    ("admin", "fuse"),
    ("engine",),
    ("tiers", "index", "metrics.tally", "metrics.exporter"),
    ("core",),
    ("errors", "config", "metrics.definitions", "mountinfo", "detaching", "notify", "supervision", "keeper", "logs"),
)
LEAVES = LAYERS[-1]

OUTSIDE_WORLD = {
    "asyncio", "boto3", "botocore", "concurrent", "ctypes", "datetime", "fcntl", "glob", "http", "httpx", "io", "lmdb",
    "logging", "mmap", "multiprocessing", "os", "pathlib", "pyfuse3", "secrets", "shutil", "signal", "socket", "stat",
    "structlog", "subprocess", "sys", "tempfile", "threading", "time", "trio", "urllib", "uuid",
}  # fmt: skip
OUTSIDE_BUILTINS = {"open", "print", "input", "exec", "eval", "id", "hash"}


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name below `tiercache` ('' for the package itself)."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found


MODULES = modules()


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Full names of imported modules (or of what is imported from one), wherever the import stands, with lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def own_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The modules of this package that are imported ('' for the package's own names)."""
    for name, line in imports(tree):
        if name == "tiercache" or name.startswith("tiercache."):
            below = name.removeprefix("tiercache").removeprefix(".")
            while below and below not in MODULES:
                below = below.rpartition(".")[0]
            yield below, line


def layer_of(module: str) -> tuple[int, str]:
    """The layer's number from the top and the name that stands for the module there."""
    for number, names in enumerate(LAYERS):
        for name in names:
            if module == name or module.startswith(name + "."):
                return number, name
    raise AssertionError(
        f"tiercache/{module.replace('.', '/')}.py belongs to no layer: give it one in LAYERS, and in docs/architecture.md"
    )


def real_modules() -> list[str]:
    return [name for name, tree in MODULES.items() if name and name != "metrics" and tree.body]


@pytest.mark.parametrize("module", real_modules())
def test_imports_point_down(module: str) -> None:
    number, name = layer_of(module)
    wrong = []
    for target, line in own_imports(MODULES[module]):
        if not target:
            continue  # tiercache.__version__
        target_number, target_name = layer_of(target)
        leaves = name in LEAVES and target_name in LEAVES and name != "config"
        if not (target_number > number or target_name == name or leaves or target_name == "errors"):
            wrong.append(f"line {line}: {target}")
    assert wrong == [], f"{module} ({name}) imports from its own height or above"


def test_no_two_modules_import_each_other() -> None:
    graph = {name: {target for target, _ in own_imports(tree) if target and target != name} for name, tree in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"imports go round: {' -> '.join((*way, name))}"
        if name not in done:
            for target in graph.get(name, set()):
                visit(target, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


CORE = [name for name in real_modules() if name.startswith("core.")]


def test_there_is_a_core() -> None:
    assert {"core.record", "core.chunk", "core.admission", "core.eviction"} <= set(CORE)


@pytest.mark.parametrize("module", CORE)
def test_core_knows_nothing_of_the_outside(module: str) -> None:
    tree = MODULES[module]
    outside = [(name, line) for name, line in imports(tree) if name.partition(".")[0] in OUTSIDE_WORLD]
    assert outside == []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in OUTSIDE_BUILTINS, f"line {node.lineno}: {node.func.id}()"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            assert node.attr == "Random", f"line {node.lineno}: random.{node.attr} is random state of the whole process"
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), "core decides, it does not wait"
    assert [name for name, _ in imports(tree) if name.startswith("random.") and name != "random.Random"] == []
