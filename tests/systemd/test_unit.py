from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "tiercache.service"
DETACH = UNIT.with_name("tiercache-detach.service")

# systemd.exec(5): each of these gives the service a mount namespace, or takes /dev/fuse away.
HIDES_THE_MOUNT = re.compile(
    r"(Private(Mounts|Tmp|Devices|Users|IPC)|Protect\w+|(Read(Write|Only)|Inaccessible|Exec|NoExec)Paths|Bind(ReadOnly)?Paths"
    r"|TemporaryFileSystem|MountImages|Root(Directory|Image)|DynamicUser|MountFlags|MountAPIVFS|Device(Policy|Allow))"
)


def read(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


@pytest.fixture
def unit() -> configparser.ConfigParser:
    return read(UNIT)


def test_readiness_is_notified_by_the_daemon_itself(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert service["ExecStart"] == "/usr/local/bin/tiercache serve --config /etc/tiercache/tiercache.toml"


def test_case_13_only_the_daemon_unmounts(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert not {"ExecStop", "ExecStopPost"} & set(service)
    assert service["KillMode"] == "mixed", "the daemon gets SIGTERM first, and what is left of it SIGKILL"


def test_it_comes_back_after_a_crash_but_not_for_ever(unit: configparser.ConfigParser) -> None:
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["RestartPreventExitStatus"] == "2"
    assert unit["Service"]["RestartSec"] == "100ms", "readers wait"
    assert int(unit["Unit"]["StartLimitBurst"]) * 10 < int(unit["Unit"]["StartLimitIntervalSec"]), "slow starts count too"


def test_the_mount_outlives_the_daemon_but_not_the_unit(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert int(service["FileDescriptorStoreMax"]) >= 4, "the two of a connection, and of the one before"
    assert service["ExecReload"] == service["ExecStart"].replace(" serve ", " upgrade ")
    assert unit["Unit"]["OnFailure"] == DETACH.name
    assert read(DETACH)["Service"]["ExecStart"] == service["ExecStart"].replace(" serve ", " umount --force ")


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
    for each in (UNIT, DETACH):
        (tmp_path / each.name).write_text(each.read_text().replace("=/usr/local/bin/tiercache ", f"={program} "))
    copy = tmp_path / UNIT.name
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", os.fspath(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "tiercache" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr
