"""What the documents name exists, and what they state as a number is the number in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

from tiercache.admin import connections
from tiercache.cli import main as cli
from tiercache.config import load
from tiercache.config.settings import (
    DEFAULT_METADATA_TTL_SECONDS,
    AdminSettings,
    ColdSettings,
    DatasetSettings,
    HotSettings,
    MountSettings,
    PolicySettings,
    WarmSettings,
)
from tiercache.core import admission, eviction, freshness, pin, prefetch, watermark
from tiercache.core.naming import Level
from tiercache.core.record import Listed, Page
from tiercache.engine import fill, pinning
from tiercache.fuse.errnos import ERRNOS
from tiercache.metrics.definitions import DEFINITIONS, Kind

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "tiercache").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLES = {
    "mount": MountSettings,
    "hot": HotSettings,
    "warm": WarmSettings,
    "cold": ColdSettings,
    "policy": PolicySettings,
    "admin": AdminSettings,
    "datasets": DatasetSettings,
}
MIB = 2**20

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def commands() -> dict[str, click.Command]:
    group = typer.main.get_command(cli.app)
    return dict(group.commands)  # type: ignore[attr-defined]


def code(text: str) -> Iterator[str]:
    """Lines of code blocks, and spans of code."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)))


def flat(page: str) -> str:
    """A document as one line, so that a sentence can be looked for wherever its lines break."""
    return " ".join((ROOT / page).read_text().split())


@each_page
def test_commands_and_options_exist(page: Path) -> None:
    known = commands()
    everything = {option for command in known.values() for each in command.params for option in each.opts}
    for line in code(page.read_text()):
        for name, rest in re.findall(r"(?:^|[`$ ])tiercache ([a-z]+(?:-[a-z]+)*)\b([^;|`]*)", line):
            if line.startswith("tiercache: ") or name in ("process", "mount(8)"):
                continue  # a message
            assert name in known, f"`tiercache {name}` in: {line}"
            options = {option for each in known[name].params for option in each.opts} | {"--help"}
            assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest.partition("#")[0])) <= options, line
    foreign = {
        "--constraint",
        "--device",
        "--cap-add",
        "--security-opt",
        "--mount",
        "--now",
        "--version",
        "--help",
        "--unix-socket",
    }
    for line in code(page.read_text()):
        if line.startswith("--"):
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)) <= everything | foreign, line


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(page.read_text()):
        assert set(re.findall(r"^make ([a-z-]+)", line)) <= targets, line


@each_page
def test_metrics_exist(page: Path) -> None:
    names = {definition.name for definition in DEFINITIONS}
    for definition in DEFINITIONS:
        if definition.kind is Kind.HISTOGRAM:
            names |= {f"{definition.name}_{part}" for part in ("bucket", "sum", "count")}
    assert set(re.findall(r"\btiercache_[a-z_]+", page.read_text())) <= names


@each_page
def test_configuration_keys_exist_and_examples_load(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    for table, key in re.findall(r"\[(mount|hot|warm|cold|policy|admin)\] (\w+)", text):
        assert key in TABLES[table].__struct_encode_fields__, f"[{table}] {key}"
    for example in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        file = tmp_path / "tiercache.toml"
        file.write_text(example)
        assert load(file).datasets


def test_every_configuration_key_is_explained() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for table, settings in TABLES.items():
        for key in settings.__struct_encode_fields__:
            stands = f"`[{table}] {key}`" if table != "datasets" else f"`{key}"
            assert stands in text or (table == "datasets" and key in MountSettings.__struct_encode_fields__), stands


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = {path.relative_to(ROOT / "tiercache").as_posix() for path in SOURCES}
    plain = {path.name for path in SOURCES}
    for name in re.findall(r"[\w/]+\.py\b", text):
        found = name in names or name in plain or (ROOT / name).exists()
        assert found or any(each.endswith("/" + name) for each in names), name
    for folder in re.findall(r"`((?:tiers|engine|index|core|admin|fuse|cli)/(?:\w+/)*)`", text):
        assert (ROOT / "tiercache" / folder).is_dir(), folder


def test_exit_codes_are_those_of_the_command_line() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition("| exit code | meaning |")[2].partition("\n\n")[0]
    documented = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert documented == {0, cli.FAILED, cli.USAGE, cli.NO_DAEMON, cli.INTERRUPTED}


def test_errors_of_readers_are_those_of_the_map() -> None:
    import errno

    text = (ROOT / "docs" / "semantics.md").read_text()
    table = text.partition("| errno | when |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"^\| (E\w+) \|", table, re.MULTILINE))
    assert documented == {errno.errorcode[number] for _, number in ERRNOS} | {"EROFS"}
    headings = re.findall(r"\((E[A-Z]+)\)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert set(headings) == documented - {"ENOENT"}


def said() -> list[re.Pattern[str]]:
    """Every text of the sources that is long enough to be a message, as a pattern: its variable parts match anything."""
    patterns = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            texts = [part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None for part in parts]
            if sum(len(text) for text in texts if text) >= 8:
                patterns.append(re.compile("".join(".*" if text is None else re.escape(text) for text in texts) + r"(; .*)?"))
    return patterns


def test_messages_in_troubleshooting_are_said_by_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^tiercache: (.*)$", text, re.MULTILINE)
    patterns = said()
    assert len(quoted) > 30
    assert [line for line in quoted if not any(pattern.fullmatch(line) for pattern in patterns)] == []


@each_page
def test_log_events_exist(page: Path) -> None:
    sources = "".join(path.read_text() for path in SOURCES)
    for event in re.findall(r"event=(\w+)", page.read_text()):
        assert re.search(rf'log\.\w+\(\s*"{event}"|_log\("\w+", "{event}"', sources), event


@pytest.mark.parametrize(
    ("sentence", "holds"),
    [
        ("is believed for `metadata_ttl` (one minute)", DEFAULT_METADATA_TTL_SECONDS == 60),
        ("for `negative_ttl` (five seconds)", MountSettings(point="/m", allow_other=False).negative_ttl_seconds == 5),
        ("(`[cold] deadline`, 30 seconds without a new byte)", ColdSettings().deadline_seconds == 30),
        ("A file of one chunk (8 MiB)", HotSettings(paths=()).chunk_bytes == 8 * MIB),
        ("Files up to `whole_file` (64 MiB)", PolicySettings().whole_file_bytes == 64 * MIB),
        ("An object of up to 1 MiB is answered only when all of it has come", fill.VERIFIED_BYTES == MIB),
        ("the rest follows in the background when a quarter is there", admission.PROMOTE_PRESENT_SHARE == 4),
        (
            "has gone through an eighth and at least 64 MiB",
            (admission.PROMOTE_RUN_SHARE, admission.PROMOTE_RUN_BYTES) == (8, 64 * MIB),
        ),
        ("none that was used within the last two seconds", eviction.FRESH_SECONDS == 2),
        ("All pins together may take 90 % of the hot tier", pin.RESERVE_RATIO == 0.1),
        ("are fetched within ten minutes", pinning.REVISIT_SECONDS == 600),
    ],
)
def test_semantics_state_the_numbers_of_the_code(sentence: str, holds: bool) -> None:
    assert sentence in flat("docs/semantics.md")
    assert holds


@pytest.mark.parametrize(
    ("sentence", "holds"),
    [
        ("after 8 lookups each further one pays for one page", freshness.FREE_LOOKUPS == 8),
        ("A handle carries up to 16 streams", prefetch.MAX_STREAMS == 16),
        ("from 4 MiB on eight times that", (prefetch.ESTABLISHED_BYTES, prefetch.ESTABLISHED_FACTOR) == (4 * MIB, 8)),
        ("the oldest eighth go, the 64 best candidates are kept", (eviction.TAKE_SHARE, eviction.POOL_CAPACITY) == (8, 64)),
        ("(bytes, and half a MiB a request)", admission.REQUEST_BYTES == MIB // 2),
    ],
)
def test_architecture_states_the_numbers_of_the_code(sentence: str, holds: bool) -> None:
    assert sentence in flat("docs/architecture.md")
    assert holds


def test_operations_state_the_limits_of_connections() -> None:
    sentence = "take 64 connections each, of one user at most 32 on the socket. One that says nothing for ten seconds"
    assert sentence in flat("docs/operations.md")
    assert (connections.MAX_CONNECTIONS, connections.MAX_PER_USER, connections.WAIT_SECONDS) == (64, 32, 10)


def test_readme_states_the_limits_of_the_default_cache() -> None:
    sentence = "it takes at most 80 % of what is free and always leaves 10 % of the disk"
    assert sentence in flat("README.md")
    assert (watermark.DEFAULT_CAPACITY_RATIO, watermark.DEFAULT_MIN_FREE_RATIO) == (0.8, 0.1)


@pytest.mark.parametrize(
    ("keys", "names", "unreachable_count"),
    [
        (["%2F", " both ", "a+b", "\x01", "\udcff", "e\u0301", "\u00e9"], None, 0),
        (["x", "x/"], [b"x"], 1),
        (["dir/"], [b"dir"], 0),
        (["//", "../", "n" * 256, "ok"], [b"ok"], 3),
    ],
)
def test_case_15_names_are_as_the_table_of_semantics_says(
    keys: list[str], names: list[bytes] | None, unreachable_count: int
) -> None:
    """A key that ends in '/' stands for the prefix that the store shows."""
    ordered = sorted(keys, key=lambda key: key.encode("utf-8", "surrogateescape"))
    objects = tuple(Listed(key, "e:1", 1, 0) for key in ordered if not key.endswith("/"))
    level = Level("")
    found = level.take(Page(objects, tuple(key for key in ordered if key.endswith("/")), ""))
    expected = [key.encode("utf-8", "surrogateescape") for key in ordered] if names is None else names
    assert sorted(named.name for named in found) == expected
    assert level.unreachable_count == unreachable_count
