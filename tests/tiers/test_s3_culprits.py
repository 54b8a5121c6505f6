"""What stands between the daemon and the store is named when it fails, and the store is not blamed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.servers.process import free_ports
from tests.servers.scripted import Answer, reply, running_scripted
from tests.tiers.s3_tier import open_s3
from tiercache.errors import SetupError, Unavailable
from tiercache.tiers.cold import chain

STORE = "http://store.invalid"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "all_proxy",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_is_down(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = free_ports(1)
    monkeypatch.setenv(f"{scheme}_proxy", f"http://user:password@127.0.0.1:{port}")
    async with open_s3(f"{scheme}://store.invalid", anonymous=True) as tier:
        with pytest.raises(Unavailable, match=rf"^proxy 127\.0\.0\.1:{port} cannot be reached: ") as caught:
            await tier.head("k")
        assert "HTTPS_PROXY" in caught.value.hint
        assert "endpoint" not in caught.value.line
        assert "password" not in caught.value.line


async def test_a_proxy_whose_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    async with open_s3(STORE, anonymous=True) as tier:
        with pytest.raises(Unavailable, match=r"^proxy host name 'proxy\.invalid' cannot be resolved"):
            await tier.head("k")


async def test_a_proxy_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_scripted(lambda _: Answer(b"", "stall")) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        async with open_s3(STORE, anonymous=True, read_seconds=0.2) as tier:
            with pytest.raises(Unavailable, match=rf"store\.invalid:80 \(through proxy 127\.0\.0\.1:{proxy.port}\) was silent"):
                await tier.head("k")
        async with open_s3(STORE, anonymous=True) as tier:
            with pytest.raises(SetupError, match=r"\(through proxy 127\.0\.0\.1:\d+\) gave no answer within"):
                await tier.probe()


@pytest.fixture
def hanging_issuer(tmp_path: Path) -> Iterator[Path]:
    """A credential_process that waits until somebody writes into the pipe, then gives what was written."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {pipe}\n")
    yield pipe
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # whoever still opens it goes on, and sees its end
    os.close(descriptor)


GOOD = b'{"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "s", "SessionToken": "t"}'


async def test_a_credential_process_that_hangs_is_named_and_waited_for_by_all(
    hanging_issuer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "CREDENTIALS_SECONDS", 2.0)
    with running_scripted(lambda _: reply(404)) as server:
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(
                SetupError, match=r"^the credential_process in ~/\.aws/config gave no credentials within"
            ) as caught:
                await tier.probe()
            assert "store was not asked" in caught.value.hint
            async with trio.open_nursery() as nursery:
                for _ in range(3):  # the failure is remembered: nobody waits again
                    nursery.start_soon(_refused, tier.head)
    assert server.asked == []


async def _refused(head: object) -> None:
    assert callable(head)
    with trio.fail_after(5), pytest.raises(Unavailable, match="credential_process"):
        await head("k")


async def test_a_slow_credential_process_is_asked_once_and_serves_whoever_asks_later(
    hanging_issuer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "CREDENTIALS_SECONDS", 30.0)
    asked = chain.Chain(_session)
    found = []

    async def find() -> None:
        found.append(await trio.to_thread.run_sync(asked.find))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(find)
        with trio.fail_after(20):
            writing = await trio.to_thread.run_sync(os.open, hanging_issuer, os.O_WRONLY)  # waits until the process reads
        monkeypatch.setattr(chain, "CREDENTIALS_SECONDS", 0.05)
        for _ in range(2):
            with pytest.raises(Unavailable, match="credential_process"):
                await trio.to_thread.run_sync(asked.find)
        os.write(writing, GOOD)
        os.close(writing)
    assert asked.frozen(found[0]).access_key == "A"


async def test_an_outcome_that_came_when_all_had_gone_is_not_lost(hanging_issuer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "CREDENTIALS_SECONDS", 0.05)
    asked = chain.Chain(_session)
    with pytest.raises(Unavailable):
        await trio.to_thread.run_sync(asked.find)
    await trio.to_thread.run_sync(hanging_issuer.write_bytes, GOOD)
    monkeypatch.setattr(chain, "CREDENTIALS_SECONDS", 30.0)
    found = await trio.to_thread.run_sync(asked.find)
    assert asked.frozen(found).access_key == "A"


def _session() -> object:
    import botocore.session

    return botocore.session.Session()


async def test_a_metadata_service_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with running_scripted(lambda _: Answer(b"", "stall")) as metadata, running_scripted(lambda _: reply(404)) as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.endpoint_url)
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(SetupError, match="instance metadata service did not answer"):
                await tier.probe()
    assert server.asked == []


class Expiring:
    """Credentials whose refresh waits until it is let go."""

    method = "custom-process"

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.refreshes_count = 0

    def refresh_needed(self, _seconds: int) -> bool:
        return True

    def get_frozen_credentials(self) -> str:
        self.refreshes_count += 1
        self.may_end.wait()
        return "fresh"


async def test_a_refresh_that_hangs_is_named_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "CREDENTIALS_SECONDS", 0.05)
    asked, credentials = chain.Chain(_session), Expiring()
    for _ in range(3):
        with pytest.raises(Unavailable, match=r"^the credential_process in ~/\.aws/config gave no credentials within"):
            await trio.to_thread.run_sync(asked.frozen, credentials)
    assert credentials.refreshes_count == 1
    credentials.may_end.set()
    monkeypatch.setattr(chain, "CREDENTIALS_SECONDS", 30.0)
    assert await trio.to_thread.run_sync(asked.frozen, credentials) == "fresh"
    assert credentials.refreshes_count == 1
    assert await trio.to_thread.run_sync(asked.frozen, credentials) == "fresh"
    assert credentials.refreshes_count == 2
