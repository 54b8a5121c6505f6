from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "tiercache.service"

# systemd.exec(5): each of these gives the service a mount namespace, or takes /dev/fuse away.
HIDES_THE_MOUNT = re.compile(
    r"(Private(Mounts|Tmp|Devices|Users|IPC)|Protect\w+|(Read(Write|Only)|Inaccessible|Exec|NoExec)Paths|Bind(ReadOnly)?Paths"
    r"|TemporaryFileSystem|MountImages|Root(Directory|Image)|DynamicUser|MountFlags|MountAPIVFS|Device(Policy|Allow))"
)


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_readiness_is_notified_by_the_daemon_itself(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert service["ExecStart"] == "/usr/local/bin/tiercache serve --config /etc/tiercache/tiercache.toml"


def test_case_13_only_the_daemon_unmounts(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert not {"ExecStop", "ExecStopPost", "ExecReload"} & set(service)
    assert service["KillMode"] == "mixed", "the daemon gets SIGTERM first, and what is left of it SIGKILL"


def test_it_comes_back_after_a_crash_but_not_for_ever(unit: configparser.ConfigParser) -> None:
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["RestartPreventExitStatus"] == "2"
    assert int(unit["Unit"]["StartLimitBurst"]) * int(unit["Service"]["RestartSec"]) < int(unit["Unit"]["StartLimitIntervalSec"])


def test_no_setting_hides_the_mount_or_the_device(unit: configparser.ConfigParser) -> None:
    assert [key for key in unit["Service"] if HIDES_THE_MOUNT.fullmatch(key)] == []
    assert "CAP_SYS_ADMIN" in unit["Service"]["CapabilityBoundingSet"].split()


def test_sockets_of_other_daemons_outlive_the_unit(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("tiercache", "yes")
    assert (service["CacheDirectory"], service["CacheDirectoryMode"]) == ("tiercache", "0700")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (package systemd)")
def test_systemd_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    """With an executable that is there: systemd checks that too, and the package may not be installed for the system."""
    program = tmp_path / "tiercache"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / "tiercache.service"
    copy.write_text(UNIT.read_text().replace("ExecStart=/usr/local/bin/tiercache ", f"ExecStart={program} "))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", os.fspath(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "tiercache" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr
