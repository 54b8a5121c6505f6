"""Reading a bucket through tiercache, JuiceFS, rclone and s3fs, all in one run on one SeaweedFS server.

    python -m bench.peers [--rounds N] [--minutes N] [--quick] [--contestant NAME]... [--directory DIR]

Peers that are not there are left out; it says how to get them. In each round every contestant gets new mounts with an empty
cache; the order changes from round to round. A row is BEHIND when the 90 % interval of its ratio to a peer lies wholly on the
wrong side of 1, which takes at least 5 rounds. Needs root (to drop the page cache). The exit code is 0 unless something is
broken.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bench import cold, machine
from bench.crowd import Broken
from bench.lab import FULL, QUICK, Lab, check_room, directory_below, settled_create_seconds
from bench.measure import interval
from bench.peers.contestants import ALL, AS_IT_IS, JUICEFS, ON_PLAIN_PATH, PEERS, Contestant
from bench.peers.measuring import RESIDENT, ROWS, SERVER, Figures, PeerRow, one_round
from bench.report import number
from tests.servers.weed import running_weed

DEFAULT_DIRECTORY = Path("/var/tmp")
DEFAULT_ROUNDS, DEFAULT_MINUTES = 5, 45

Rounds = dict[str, list[Figures]]


def main(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    if not machine.may_drop_caches():
        print("needs root: peers answer from the page cache unless it is dropped", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        with directory_below(chosen.directory) as directory:
            rounds = _measure(directory, chosen, began + chosen.minutes * 60)
    except Broken as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing is left behind", file=sys.stderr)
        return 130
    print(f"\n{table(rounds)}\n\n{verdicts(rounds)}\n\nThe run took {time.monotonic() - began:.0f} s.")
    return 0


def _measure(directory: Path, chosen: argparse.Namespace, end_seconds: float) -> Rounds:
    sizes = QUICK if chosen.quick else FULL
    contestants = [contestant for contestant in ALL if not chosen.contestant or contestant.name in chosen.contestant]
    for name, fact in machine.facts(directory).items():
        print(f"{name:12}{fact}")
    print(f"{'data':12}a large file of {sizes.big_bytes >> 20} MiB and {sizes.files_count} files of {sizes.file_bytes >> 10} KiB")
    print(f"{'rounds':12}{chosen.rounds}")
    for contestant in contestants:
        if obstacle := contestant.obstacle():
            print(f"without {contestant.name}: {obstacle}")
    contestants = [contestant for contestant in contestants if not contestant.obstacle()]
    check_room(directory, sizes)
    print(f"Creating a file takes {settled_create_seconds(directory) * 1e6:.0f} us here.", flush=True)
    rounds: Rounds = {contestant.name: [] for contestant in contestants}
    with running_weed(directory / SERVER) as server:
        lab = Lab(directory, sizes, server)
        lab.fill()
        cold.warm_server(lab)
        for contestant in contestants:
            contestant.prepare(lab, directory)
        for number in range(chosen.rounds):
            if number and time.monotonic() > end_seconds:
                print(f"time is up (--minutes): {number} rounds instead of {chosen.rounds}")
                break
            first = number % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                print(f"round {number + 1} of {chosen.rounds}: {contestant.name}", file=sys.stderr, flush=True)
                rounds[contestant.name].append(one_round(lab, contestant, directory))
    return rounds


def table(rounds: Rounds) -> str:
    """Medians, one line a row and one column a contestant."""
    lines = [f"{'row (medians)':24}{'unit':>8}" + "".join(f"{name:>12}" for name in rounds)]
    for row in ROWS:
        cells = [
            number(statistics.median(figures[row] for figures in found)) if row in found[0] else "-" for found in rounds.values()
        ]
        lines.append(f"{row.name:24}{row.unit:>8}" + "".join(f"{cell:>12}" for cell in cells))
    lines += ["", "What each row is:", *(f"  {row.name:24}{row.title}" for row in ROWS)]
    return "\n".join(lines)


def verdicts(rounds: Rounds) -> str:
    """Tiercache as it is against each peer, and on the plain path against JuiceFS where all is hot."""
    lines = ["Times better than the peer: median ratio of the rounds, and its 90 % interval ('?' with fewer than 5 rounds)"]
    peers = [peer.name for peer in PEERS]
    if AS_IT_IS.name in rounds:
        lines += [_verdict(rounds, AS_IT_IS, row, [JUICEFS] if row is RESIDENT else peers) for row in ROWS]
    for contestant in ON_PLAIN_PATH:
        if contestant.name in rounds:
            lines += [_verdict(rounds, contestant, row, [JUICEFS]) for row in ROWS if row.is_hot]
    return "\n".join(lines)


def _verdict(rounds: Rounds, ours: Contestant, row: PeerRow, peers: Sequence[str]) -> str:
    texts, behind = [], []
    for peer in peers:
        if peer not in rounds:
            continue
        ratios = advantages(row, rounds[ours.name], rounds[peer])
        ends = interval(ratios)
        spread = f"[{number(ends[0])}-{number(ends[1])}]" if ends else "[?]"
        texts.append(f"{peer} {number(statistics.median(ratios))} {spread}")
        if statistics.median(ratios) < 1:
            behind.append(f"not ahead of {peer}" if ends is None or ends[1] >= 1 else f"BEHIND {peer}")
    word = ", ".join(behind) if behind else "ahead" if texts else "no peer"
    return f"{ours.name + '/' + row.name:34}{'  '.join(f'{text:28}' for text in texts)}{word}"


def advantages(row: PeerRow, ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[float]:
    """How many times better each round was; a time that cannot be told from 0 counts as a tiny one."""
    pairs = [(max(our[row], 1e-9), max(their[row], 1e-9)) for our, their in zip(ours, theirs, strict=True)]
    return [our / their if row.more_is_better else their / our for our, their in pairs]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    names = [contestant.name for contestant in ALL]
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, metavar="N", help=f"default {DEFAULT_ROUNDS}")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, metavar="N",
                        help=f"after which no round begins, but the first (default {DEFAULT_MINUTES})")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works; the figures say little")
    parser.add_argument("--contestant", action="append", choices=names, metavar="NAME",
                        help=f"only this one (may be repeated): {', '.join(names)}")  # fmt: skip
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR",
                        help=f"on the disk to measure; what is made in it is removed (default {DEFAULT_DIRECTORY})")  # fmt: skip
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error(f"--rounds {chosen.rounds}: at least 1")
    if not chosen.directory.is_dir():
        parser.error(f"--directory {chosen.directory}: not a directory")
    chosen.directory = chosen.directory.resolve()
    return chosen


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
