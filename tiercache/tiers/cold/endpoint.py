"""Where requests go and who signs them: region, endpoint, addressing style, TLS, proxy, credentials, in one place.

Everything is taken from where boto3 takes it: the same session, profile, environment, configuration files and
credential chain. The address of a bucket is not computed here: an unsigned client is asked for one object and the
URL that it is about to request is read off before anything is sent, so that addressing style, dual stack, FIPS,
access points and `AWS_ENDPOINT_URL_S3` come out exactly as with boto3. (A pre-signed URL will not do: for those
boto3 uses the global endpoint.)

Credentials are asked for in worker threads, since they may wait for a metadata endpoint or a program (`chain.py` bounds
that), and a failure is remembered for `FAILURE_PAUSE_SECONDS`, so that thirty waiting reads do not try thirty times in a
row. When the store calls credentials expired that the chain still believes in (a rewritten ~/.aws/credentials), the chain
is walked afresh.
"""

from __future__ import annotations

import base64
import io
import math
import os
import ssl
import threading
import time
import urllib.request
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import botocore.config
import botocore.exceptions
import botocore.session
from botocore import UNSIGNED
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.httpsession import get_cert_path
from botocore.loaders import create_loader

from tiercache.errors import AccessDenied, SetupError, Unavailable
from tiercache.tiers.cold.chain import METADATA_TIMEOUT_SECONDS, Chain
from tiercache.tiers.cold.sigv4 import Keys

DEFAULT_REGION = "us-east-1"
FAILURE_PAUSE_SECONDS = 5.0
_DEFAULT_PORTS = {"http": 80, "https": 443}
_SOUGHT_KEY = "key"


@dataclass(frozen=True)
class Proxy:
    host: str
    port: int
    authorization: str | None  # value of Proxy-Authorization

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Authorities:
    """Whom TLS trusts: certificates, and a directory with more of them or None."""

    pem: bytes
    directory: str | None


@dataclass(frozen=True)
class Route:
    """How to reach one bucket. `authority` is the Host header; `base_path` stands before '/' + key ('' or '/bucket').

    `authorities` says for libcurl what `tls` says for Python.
    """

    host: str
    port: int
    authority: str
    base_path: str
    region: str
    tls: ssl.SSLContext | None
    proxy: Proxy | None
    authorities: Authorities | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def server(self) -> str:
        """For messages: with the proxy, which is as likely to be at fault."""
        return self.address if self.proxy is None else f"{self.address} (through proxy {self.proxy.address})"


class Endpoint:
    """One account at one store. Raises SetupError for a malformed URL or an unknown profile; sends nothing."""

    def __init__(
        self,
        url: str | None = None,
        *,
        region: str | None = None,
        profile: str | None = None,
        anonymous: bool = False,
        requester_pays: bool = False,
    ) -> None:
        if url is not None:
            _check_url(url)
        self.requester_pays = requester_pays
        self.anonymous = anonymous
        self._profile = profile
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._chain = Chain(self._new_session)
        self._failure: AccessDenied | Unavailable | None = None
        self._barren_at_seconds = -math.inf  # when the chain last had nothing, or nothing new
        try:
            session = self._new_session()
            self.region = str(region or session.get_config_variable("region") or DEFAULT_REGION)
            self._ca_bundle: str | None = session.get_config_variable("ca_bundle")
            self._client = session.create_client(
                "s3",
                region_name=self.region,
                endpoint_url=url,
                config=botocore.config.Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1}),
            )
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            raise SetupError(f"S3 settings: {error}", hint="check the region, profile and endpoint URL") from error
        _check_url(self._client.meta.endpoint_url)  # it may come from the environment or ~/.aws/config

    @property
    def host(self) -> str:
        """Host, and port where it is not the usual one: equal on every node that is configured alike."""
        return str(urlsplit(self._client.meta.endpoint_url).netloc)

    def _new_session(self) -> Any:
        session = botocore.session.Session(profile=self._profile)
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        session.set_config_variable("metadata_service_timeout", METADATA_TIMEOUT_SECONDS)
        session.set_config_variable("metadata_service_num_attempts", 1)
        # For the clients that the chain itself makes (STS, SSO).
        session.set_default_client_config(
            botocore.config.Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1})
        )
        return session

    def route(self, bucket: str) -> Route:
        """Raises SetupError when boto3 refuses the bucket's name or the proxy is of a kind that is not supported."""
        if bucket.endswith("--x-s3"):
            raise SetupError(
                f"bucket {bucket!r} is an S3 Express directory bucket, which is not supported", hint="use a normal bucket"
            )
        parts = urlsplit(self._address(bucket))
        assert parts.hostname is not None
        if parts.scheme not in _DEFAULT_PORTS:
            raise SetupError(
                f"endpoint {parts.geturl()!r} is neither http nor https", hint="write --endpoint-url http://HOST:PORT"
            )
        return Route(
            host=parts.hostname,
            port=parts.port or _DEFAULT_PORTS[parts.scheme],
            authority=parts.netloc.rpartition("@")[2],
            base_path=parts.path.removesuffix("/" + _SOUGHT_KEY),
            region=self.region,
            tls=self._tls if parts.scheme == "https" else None,
            proxy=_proxy_for(parts.scheme, parts.netloc),
            authorities=self._authorities if parts.scheme == "https" else None,
        )

    def _address(self, bucket: str) -> str:
        """The URL that boto3 would request."""
        found: list[str] = []

        def capture(request: Any, **_: object) -> AWSResponse:
            found.append(request.url)
            return AWSResponse(request.url, 200, HTTPHeaders(), io.BytesIO())

        self._client.meta.events.register("before-send.s3.GetObject", capture)
        try:
            self._client.get_object(Bucket=bucket, Key=_SOUGHT_KEY)
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            raise SetupError(f"bucket {bucket!r}: {error}", hint="check the name in s3://BUCKET/PREFIX") from error
        finally:
            self._client.meta.events.unregister("before-send.s3.GetObject", capture)
        return found[0]

    @property
    def _bundle(self) -> str | None:
        return self._ca_bundle or os.environ.get("REQUESTS_CA_BUNDLE")

    @cached_property
    def _authorities(self) -> Authorities:
        """The same as `_tls` has loaded without complaint."""
        if self._bundle is not None:
            return Authorities(Path(self._bundle).read_bytes(), None)
        system = ssl.get_default_verify_paths()
        files = [path for path in (system.cafile, get_cert_path(True)) if path]
        return Authorities(b"\n".join(Path(path).read_bytes() for path in files), system.capath)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The system's authorities and botocore's own (a bare container has only those); a configured bundle replaces both."""
        bundle = self._bundle
        try:
            context = ssl.create_default_context(cafile=bundle)
            if bundle is None:
                context.load_verify_locations(get_cert_path(True))
        except OSError as error:
            raise SetupError(f"certificate bundle {bundle}: {error}", hint="check AWS_CA_BUNDLE") from error
        return context

    @property
    def has_keys_at_hand(self) -> bool:
        """Would `keys` answer without waiting for anything, so that the event loop may ask?"""
        credentials = self._credentials
        return self.anonymous or (credentials is not None and not getattr(credentials, "refresh_needed", _never)())

    def keys(self) -> Keys | None:
        """Credentials to sign with, None for anonymous requests. May wait for a metadata endpoint: call it in a thread.

        Raises AccessDenied when the chain has none, Unavailable when a source of them does not answer.
        """
        if self.anonymous:
            return None
        credentials = self._credentials
        if credentials is None:
            credentials = self._load()
        frozen = self._chain.frozen(credentials)
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    def _load(self) -> Any:
        with self._lock:
            if self._credentials is None:
                if self._failure is not None and self._is_pausing():
                    raise type(self._failure)(str(self._failure), hint=self._failure.hint)
                try:
                    self._credentials = self._chain.find()
                except (AccessDenied, Unavailable) as error:
                    self._failure, self._barren_at_seconds = error, time.monotonic()
                    raise
            return self._credentials

    def _is_pausing(self) -> bool:
        return time.monotonic() - self._barren_at_seconds < FAILURE_PAUSE_SECONDS

    def renew(self, stale: Keys) -> bool:
        """The store called `stale` expired: walk the chain afresh. True when there are other keys now.

        Raises like `keys`. After a walk that brought nothing new there is none for `FAILURE_PAUSE_SECONDS`.
        """
        with self._lock:
            if self.keys() != stale:
                return True  # another thread was faster
            if self._is_pausing():
                return False
            self._credentials = self._chain.find()
            if self.keys() == stale:
                self._barren_at_seconds = time.monotonic()
                return False
            return True


def _never() -> bool:
    return False


@cache
def _loader(data_path: str | None) -> Any:
    """botocore's service descriptions, read once a process (0.15 s) and not once a client."""
    return create_loader(data_path)


def _check_url(url: str) -> None:
    hint = "write --endpoint-url http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        reason = "is malformed" if "@" in url else f"{url!r}: {error}"  # a piece of a password may be quoted as a port
        raise SetupError(f"endpoint URL {reason}", hint=hint) from error
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise SetupError(f"endpoint URL {url!r} is malformed", hint=hint)
    if parts.username is not None:  # the URL is not repeated: what stands before the @ is a secret
        raise SetupError("the endpoint URL holds a user name", hint=f"{hint}, without what stands before an @")
    if parts.query or parts.fragment:
        raise SetupError(f"endpoint URL {url.partition('?')[0]!r} has parts that an endpoint cannot have", hint=hint)


def _proxy_for(scheme: str, netloc: str) -> Proxy | None:
    """From HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as boto3 does."""
    url = urllib.request.getproxies().get(scheme)
    if not url or urllib.request.proxy_bypass(netloc):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or 80
    except ValueError:  # neither the URL nor the error is shown: a password with a '/' makes a port of its first half
        raise SetupError(
            f"the URL in {scheme}_proxy is malformed",
            hint=f"set {scheme}_proxy to http://HOST:PORT; in a password write special characters as %2F",
        ) from None
    if parts.scheme != "http" or not parts.hostname:
        raise SetupError(
            f"the {parts.scheme}:// proxy in {scheme}_proxy is not supported",
            hint=f"set {scheme}_proxy to http://HOST:PORT, or no_proxy={netloc}",
        )
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.hostname, port, authorization)
