"""A secret that somebody wrote into a URL is never shown: not in a message, not in a hint, wherever the URL came from."""

from __future__ import annotations

import pytest

from tiercache.cli.main import USAGE, main
from tiercache.config.location import parse_source
from tiercache.errors import SetupError, TiercacheError, UsageError, masked
from tiercache.tiers.cold.endpoint import Endpoint

SECRET = "wJal/rXUt+nFEMI"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIA:{SECRET}@bucket/prefix",
        f"s3://{SECRET.replace('/', '-')}@bucket",
        f"s3://AKIA:{SECRET} x@bucket",
        f"https://AKIA:{SECRET}@store/bucket",
        f"file://user:{SECRET}@host/data",
        f"AKIA:{SECRET}@bucket/prefix",
    ],
)
def test_a_source_with_credentials_is_refused_without_showing_them(url: str) -> None:
    with pytest.raises(UsageError, match="holds credentials") as caught:
        parse_source(url)
    assert "wJal" not in caught.value.line
    assert all(way in caught.value.hint for way in ("--profile", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "~/.aws/credentials"))


def test_a_signed_url_is_not_repeated() -> None:
    with pytest.raises(UsageError, match="unknown scheme https://") as caught:
        parse_source(f"https://bucket.example.org/key?X-Amz-Signature={SECRET}")
    assert SECRET not in caught.value.line


@pytest.mark.parametrize("url", ["s3://bucket/user@host/x:y@z", "file:///data/a:b@c", "file:///data/a@b"])
def test_an_at_sign_in_a_path_is_no_secret(url: str) -> None:
    parse_source(url)
    assert masked(url) == url


@pytest.mark.parametrize("text", [f"x s3://k:{SECRET}@b/p y", f"x 'https://{SECRET.replace('/', '-')}@b/p' y"])
def test_every_error_masks_what_it_quotes(text: str) -> None:
    error = TiercacheError(text, hint=text)
    assert "wJal" not in error.line
    assert str(error).startswith("x ")
    assert "://***@b/p" in error.hint
    assert str(error).endswith(" y")


def test_the_command_line_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    source = f"s3://AKIA:{SECRET}@bucket/prefix"
    for arguments in (
        ["mount", source, "/mnt/a"],
        ["mount", "s3://bucket", "/mnt/a", source],
        ["mount", source, "/mnt/a", "--json"],
    ):
        assert main(arguments) == USAGE
        shown = capsys.readouterr()
        assert "wJal" not in shown.out + shown.err


@pytest.mark.parametrize("url", [f"http://u:{SECRET}@store:9000", "http://u:wJalsecret@store:9000", "http://u:wJal@store:port"])
def test_an_endpoint_of_the_environment_with_credentials_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    for given in (None, url):
        with pytest.raises(SetupError) as caught:
            Endpoint(given, anonymous=True)
        assert "wJal" not in caught.value.line


@pytest.mark.parametrize("url", [f"http://u:{SECRET}@proxy:3128", "http://u:wJal@proxy:port", "ftp://u:wJal@proxy"])
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", url)
    with pytest.raises(SetupError, match="https_proxy") as caught:
        Endpoint("https://store.invalid", anonymous=True).route("bucket")
    assert "wJal" not in caught.value.line
    assert caught.value.__cause__ is None
