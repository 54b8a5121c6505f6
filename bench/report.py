"""How results are shown: one line a row as soon as it is there, and what the daemon used at the end."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.measure import Result, Row, Summary, Take, Target, Verdict, interval

Measured = tuple[str, Row, Result]
"""With the name under which it was asked for."""

LEAST_SECONDS = 0.05  # of less CPU in all takes together no parts are told
_NAME_WIDTH = 32

_HEAD = f"{'row':{_NAME_WIDTH}}{'unit':>8}{'tiercache':>25}{'reference':>25}{'ratio':>19}  target"


def head(facts: Mapping[str, str], rows: Sequence[Row]) -> str:
    width = max(map(len, facts))
    lines = [f"{name:{width}}  {fact}" for name, fact in facts.items()]
    lines += [
        "",
        "What each row does, and [what it is compared with]:",
        *(f"  {row.name:24}{row.title} [{row.reference}]" for row in rows),
        "",
        "Figures are medians (least-most). Ratio: tiercache to reference in the same pair, the median and its 90 % interval;",
        "above 1 is faster, but for ms and us slower. A target is MISSED when the whole interval lies on the wrong side of it.",
    ]
    return "\n".join(lines)


def table_head(title: str) -> str:
    return f"{title}\n{_HEAD}"


def line(name: str, row: Row, result: Result) -> str:
    """One line, and more for further targets and remarks."""
    ratio = spread(result.ratios)
    text = f"{name:{_NAME_WIDTH}}{row.unit:>8}{_figures(result.figures):>25}{_figures(result.reference_figures):>25}{ratio:>19}"
    indent = " " * len(text)
    verdicts = [_verdict(target, result) for target in row.targets] or ["-"]
    lines = [f"{text}  {verdicts[0]}", *(f"{indent}  {verdict}" for verdict in verdicts[1:])]
    return "\n".join([*lines, *(f"{'':{_NAME_WIDTH}}  {remark}" for remark in result.remarks)])


def spread(values: Sequence[float]) -> str:
    """The median and its 90 % interval."""
    found = interval(values)
    ends = f"[{number(found[0])}-{number(found[1])}]" if found else "[?]"
    return f"{number(statistics.median(values))} {ends}"


def _verdict(target: Target, result: Result) -> str:
    sign = ">=" if target.at_least else "<="
    values = target.values(result)
    figure = "" if values == result.ratios else f"{spread(values)} "
    return f"{target.verdict(result).value}: {figure}{sign} {target.limit:g} {target.wording}"


def missed(results: Sequence[Measured]) -> str:
    """All rows that missed a target, in one line."""
    names = [name for name, row, result in results if any(target.verdict(result) is Verdict.MISSED for target in row.targets)]
    count = sum(bool(row.targets) for _, row, _ in results)
    return f"{len(names)} of {count} rows with a target MISSED it{': ' if names else ''}{', '.join(names)}."


def left_out(name: str, row: Row, reason: str) -> str:
    return f"{name:{_NAME_WIDTH}}{row.unit:>8}  not measured: {reason}"


def _figures(values: Summary) -> str:
    return f"{number(values.median)} ({number(values.least)}-{number(values.most)})"


def number(value: float) -> str:
    """Three digits or so: 0.0123, 1.23, 123, 12345, 123k."""
    if abs(value) >= 100_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def usage(results: Sequence[Measured], peak_resident_bytes: int) -> str:
    """CPU by row, what part of the daemon's may hold the GIL, and the most memory that a daemon ever had."""
    lines = [
        "CPU, user and system (medians)",
        "",
        f"{'':{_NAME_WIDTH + 9}}{' daemon ':-^53} {' reading the mount ':-^23} {' the reference ':-^23}",
    ]
    lines.append(
        f"{'row':{_NAME_WIDTH}}{'unit':>8}{'CPU':>10}{'event loop':>14}{'GIL at most':>14}{'GIL by py-spy':>16}"
        + f"{'readers':>12}{'server':>12}" * 2
    )
    lines += [_usage_line(name, row, result) for name, row, result in results if row.cpu_unit]
    lines += [
        "",
        "event loop: part of the daemon's CPU used by the thread of its event loop.",
        "GIL at most: that and the user time of the other threads, an upper estimate of the part spent holding the GIL.",
        "GIL by py-spy: samples in which a thread held the GIL, to the CPU of the same (extra) take. A thread that holds it and",
        "waits for a core counts too: above 100 % on a machine with other load. '-' without py-spy on the PATH.",
        "server: the S3 server, which shares the cores with all of this.",
        "",
        f"Peak resident memory of a daemon: {peak_resident_bytes / 2**20:.0f} MiB",
    ]
    complaints = {result.sampled.complaint for _, _, result in results if result.sampled and result.sampled.complaint}
    return "\n".join([*lines, *sorted(complaints)])


def _usage_line(name: str, row: Row, result: Result) -> str:
    factor = 1e3 if row.cpu_unit.startswith("ms") else 1.0

    def each(seconds: Callable[[Take], float], takes: Sequence[Take]) -> str:
        figure = statistics.median(seconds(take) / take.work for take in takes) * factor
        return f"{figure:.3g}" if figure >= 0.001 else "0"

    daemon = each(lambda take: take.usage.total_seconds if take.usage else 0.0, result.mount)
    text = f"{name:{_NAME_WIDTH}}{row.cpu_unit:>8}{daemon:>10}{_parts(result)}"
    for takes in (result.mount, result.reference):
        text += f"{each(lambda take: take.readers_seconds, takes):>12}{each(lambda take: take.server_seconds, takes):>12}"
    return text


def _parts(result: Result) -> str:
    """Of the daemon's CPU: event loop, GIL by the upper estimate, GIL as sampled."""
    used = [take.usage for take in result.mount if take.usage is not None]
    total_seconds = sum(usage.total_seconds for usage in used)
    sampled = "-" if result.sampled is None or result.sampled.ratio is None else f"{result.sampled.ratio:.0%}"
    if total_seconds < LEAST_SECONDS:
        return f"{'-':>14}{'-':>14}{sampled:>16}"
    loop = sum(usage.loop_seconds for usage in used) / total_seconds
    held = sum(usage.held_seconds for usage in used) / total_seconds
    return f"{loop:>14.0%}{held:>14.0%}{sampled:>16}"
