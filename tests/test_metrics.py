from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from tiercache import __version__
from tiercache.metrics.definitions import DEFINITIONS, SECONDS_BUCKETS, Kind, Metrics
from tiercache.metrics.exporter import CONTENT_TYPE, render

DOCS = Path(__file__).parent.parent / "docs" / "metrics.md"
CLASSES = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(page.decode())
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def test_every_declared_metric_is_an_attribute_and_the_reverse() -> None:
    attributes = {name for name, value in vars(Metrics()).items() if isinstance(value, tuple(CLASSES.values()))}
    assert attributes == {definition.attribute for definition in DEFINITIONS}


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.attribute)
def test_a_declaration_is_kept_and_named_as_prometheus_wants(definition) -> None:  # type: ignore[no-untyped-def]
    metric = getattr(Metrics(), definition.attribute)
    assert type(metric) is CLASSES[definition.kind]
    assert metric._labelnames == definition.labels
    assert re.fullmatch(r"tiercache_[a-z]+(_[a-z]+)*", definition.name)
    assert definition.name.endswith("_total") == (definition.kind is Kind.COUNTER)
    assert definition.name.removesuffix("_total").endswith(f"_{definition.unit}") or not definition.unit
    assert definition.unit in ("", "seconds", "bytes")
    assert not re.search(r"_(seconds|bytes)(_|$)", definition.attribute) or definition.unit
    assert definition.help
    assert not definition.help.endswith(".")


def test_the_docs_page_and_the_declarations_say_the_same() -> None:
    rows = re.findall(r"^\| `(tiercache_\w+)` \| (\w+) \| (.*?) \| (\w+) \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    documented = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)), stability, text) for name, kind, labels, stability, text in rows
    }
    declared = {
        definition.name: (definition.kind.value, definition.labels, definition.stability.value, definition.help)
        for definition in DEFINITIONS
    }
    assert documented == declared
    assert len(rows) == len(documented), "a row stands there twice"


def test_every_label_and_every_metric_of_the_docs_exists() -> None:
    text = DOCS.read_text()
    labels = {label for definition in DEFINITIONS for label in definition.labels}
    section = text.partition("| label | values |")[2].partition("\n\n")[0]
    documented = {
        label for cell in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE) for label in re.findall(r"`(\w+)`", cell)
    }
    assert documented == labels
    assert set(re.findall(r"\btiercache_\w+", text)) == {definition.name for definition in DEFINITIONS}


def test_the_page_has_what_was_counted() -> None:
    metrics = Metrics()
    metrics.read_bytes.labels(dataset="a", tier="hot").inc(4096)
    metrics.hot_used_bytes.labels(directory='/odd "path"\\\n').set(7)
    metrics.request_seconds.labels(tier="cold", operation="read").observe(0.02)
    found = samples(render(metrics))
    assert found[("tiercache_read_bytes_total", (("dataset", "a"), ("tier", "hot")))] == 4096
    assert found[("tiercache_hot_used_bytes", (("directory", '/odd "path"\\\n'),))] == 7
    labels = (("operation", "read"), ("tier", "cold"))
    assert found[("tiercache_request_seconds_count", labels)] == 1
    assert found[("tiercache_request_seconds_bucket", (("le", "0.01"), *labels))] == 0
    assert found[("tiercache_request_seconds_bucket", (("le", "0.025"), *labels))] == 1
    assert found[("tiercache_verify_failures_total", ())] == 0, "an unlabelled counter is there from the start"
    info = [labels for name, labels in found if name == "tiercache_build_info"]
    assert ("version", __version__) in info[0]
    assert CONTENT_TYPE.startswith("text/plain")


def test_the_page_has_no_created_series_and_can_be_rendered_again() -> None:
    metrics = Metrics()
    metrics.opens.labels(dataset="a").inc()
    assert b"_created" not in render(metrics)
    assert render(metrics) == render(metrics)


def test_two_daemons_in_one_process_do_not_meet() -> None:
    first, second = Metrics(), Metrics()
    first.evictions.inc()
    assert samples(render(first))[("tiercache_evictions_total", ())] == 1
    assert samples(render(second))[("tiercache_evictions_total", ())] == 0


def test_the_buckets_span_a_page_in_memory_to_a_deadline() -> None:
    assert tuple(sorted(set(SECONDS_BUCKETS))) == SECONDS_BUCKETS
    assert (SECONDS_BUCKETS[0], SECONDS_BUCKETS[-1]) == (10e-6, 30.0)
