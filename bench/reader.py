"""A reader: a process of its own that does one job (`python -m bench.reader`).

The job comes as one line of JSON. When it is prepared the reader says `ready`, and begins when it is told `go`, so that the
start of an interpreter is in no figure. Its answer is one line again, with the time of begin and end on the clock
that all processes share (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import sys
import time

import msgspec

from bench.gets import Direct, Download, FirstByte, Objects
from bench.reads import Churn, Digest, Files, Forget, Lacking, Latencies, Names, Outcome, Random, Sequential, Stats
from bench.shards import Encode, Evict, Series, Shards, Spread

Reads = Sequential | Random | Latencies | Churn | Files | Names | Stats | Digest | Lacking | Forget
Warm = Evict | Series | Spread | Encode | Shards
Job = Reads | Warm | Direct | Download | FirstByte | Objects

READY, GO = b"ready\n", b"go\n"


class Answer(msgspec.Struct):
    """`cpu_seconds` are this process's, between begin and end."""

    began_seconds: float
    ended_seconds: float
    cpu_seconds: float
    outcome: Outcome


def main() -> None:
    job: Job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    work = job.prepare()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    if sys.stdin.buffer.readline() != GO:
        return
    began, used = time.monotonic(), time.process_time()
    outcome = work()
    answer = Answer(began, time.monotonic(), time.process_time() - used, outcome)
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
