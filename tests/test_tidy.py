"""Style that can be checked is checked: what is listed here is not argued about in reviews."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tiercache"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("tiercache", "tests", "bench", "docs", "config", "systemd", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.suffix not in (".pyc", ".so") and path != Path(__file__)
) + sorted(path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt") or path.name == "Makefile")

MAX_LINES = 450  # about 300 is the aim
MAX_FUNCTION_LINES = 70  # about 40 is the aim
BANNED_WORDS = ("Manager", "Helper", "Util", "Utils", "Common", "Handler", "Service", "Base", "Impl")
BANNED_NAME = re.compile(rf"(?:{'|'.join(BANNED_WORDS)})(?![a-z])")
BANNED_MODULES = re.compile(r"(?:^|_)(?:managers?|helpers?|utils?|common|handlers?|services?|base|impl|types|misc)(?:_|$)")
UNITLESS = re.compile(r"(?:^|_)(?:timeout|ttl|delay|interval|elapsed|duration|bytesize|ms|secs?|millis|kb|mb|gb)$")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(), str(path)))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"line {node.lineno}: {node.name}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_names_say_what_a_thing_is(path: Path) -> None:
    assert not BANNED_MODULES.search(path.stem)
    for node in nodes(path):
        if isinstance(node, ast.ClassDef):
            assert not BANNED_NAME.search(node.name), f"line {node.lineno}: {node.name}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_quantities_carry_their_unit(path: Path) -> None:
    """Fields of classes and parameters with a number's type; texts of options and trio's own words are none."""
    numbers = ("int", "float", "int | None", "float | None")
    for node in nodes(path):
        if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) in numbers:
            assert not UNITLESS.search(node.arg), f"line {node.lineno}: {node.arg}"
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and ast.unparse(node.annotation) in numbers:
            assert not UNITLESS.search(node.target.id), f"line {node.lineno}: {node.target.id}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_errors_are_caught_by_name(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {ast.unparse(each) for each in caught}
            assert "Exception" not in names, f"line {node.lineno}: a bug must crash"
            if "BaseException" in names:
                reraised = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
                assert reraised, f"line {node.lineno}: cancellation must go on"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            assert not {"Exception", "BaseException"} & {ast.unparse(each) for each in node.args}, f"line {node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.is_relative_to(PACKAGE / "cli"):
        return
    child_program = '__name__ == "__main__"' in path.read_text()  # its standard output is an answer to its parent
    banned = ("print",) if child_program else ("print", "sys.stdout.write", "sys.stderr.write")
    for node in nodes(path):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in banned, f"line {node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "a module docstring is missing"


@pytest.mark.parametrize("path", [path for path in TEXTS if path.suffix == ".py"], ids=relative)
def test_nothing_is_put_off_and_no_test_sleeps(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    if path.is_relative_to(ROOT / "tests"):
        virtual = "autojump_clock" in text or "MockClock" in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", *(() if virtual else ("trio.sleep",))):
                assert _is_short(node.args[0]), f"line {node.lineno}: wait for a condition, not for a time"


def _is_short(pause: ast.expr) -> bool:
    """Between two looks at a condition with a deadline a pause is needed."""
    if isinstance(pause, ast.Constant) and isinstance(pause.value, int | float):
        return pause.value <= 0.1
    return not isinstance(pause, ast.Constant)


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_texts_name_no_machine_and_no_registry(path: Path) -> None:
    text = path.read_text(errors="replace")
    assert not re.search(r"pypi\.org|pythonhosted|registry\.npmjs|deb\.debian\.org|--index-url|--find-links", text)


def test_the_pins_are_names_and_versions_only() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line)] == []
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names)), "a package is pinned twice"
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*tables["dependencies"], *tables["optional-dependencies"]["dev"]]
    wanted = {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=]", entry)[0]).lower() for entry in listed}
    assert wanted - set(names) == set(), "a dependency has no pin"


def test_no_module_is_dead() -> None:
    """Every module is imported by another one of the package, or is an entry point that something starts by name."""
    entries = {"tiercache.__main__", *re.findall(r'"(tiercache[\w.]+)', (ROOT / "pyproject.toml").read_text())}
    imported = set()
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                entries |= set(re.findall(r"^tiercache(?:\.\w+)+$", node.value))
    dead = []
    for path in SOURCES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.stem != "__init__" and name not in imported | entries:
            dead.append(name)
    # Doubles of the seams that simulations, models and other people's tests build on.
    assert set(dead) - {"tiercache.tiers.memory", "tiercache.tiers.faulty", "tiercache.index.memory"} == set()
