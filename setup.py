"""The C extensions. What is fixed about the package stands in pyproject.toml; here is only what depends on the machine.

Each extension is optional: where its libraries or a compiler are missing it is left out, tiercache runs without what it gives,
and `tiercache status` says so. TIERCACHE_STRICT_BUILD=1 (set by the Makefile) makes warnings errors and a missing
extension a failure.
"""

import os
import subprocess

from setuptools import Extension, setup

STRICT = bool(os.environ.get("TIERCACHE_STRICT_BUILD"))
FLAGS = [
    "-std=gnu11",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-fvisibility=hidden",
    *(["-Werror"] if STRICT else []),
]


def asked(*arguments: str) -> list[str] | None:
    """What pkg-config says; None where it, or the library, is missing."""
    try:
        done = subprocess.run(["pkg-config", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.split() if done.returncode == 0 else None


def extension(name: str, sources: list[str], *libraries: str, link: bool = True) -> list[Extension]:
    cflags, ldflags = asked("--cflags", *libraries), asked("--libs", *libraries) if link else []
    if cflags is None or ldflags is None:
        if STRICT:
            raise SystemExit(f"{name} cannot be built: pkg-config does not know all of {', '.join(libraries)}")
        return []
    return [Extension(name, sources, extra_compile_args=[*FLAGS, *cflags], extra_link_args=ldflags, optional=not STRICT)]


setup(
    ext_modules=[
        # not linked: pyfuse3 has loaded its libfuse, and ours must be the same one
        *extension(
            "tiercache.fuse._kernel",
            [
                f"tiercache/fuse/{name}.c"
                for name in (
                    "_kernel",
                    "mounting",
                    "serving",
                    "queues",
                    "placed",
                    "hot_files",
                    "replies",
                    "interrupts",
                    "open_table",
                    "inflight",
                    "names",
                    "requests",
                )
            ],
            "fuse3",
            link=False,
        ),
        *extension("tiercache.tiers.cold._fetch", ["tiercache/tiers/cold/_fetch.c"], "libcurl", "libcrypto", "libxxhash"),
    ]
)
