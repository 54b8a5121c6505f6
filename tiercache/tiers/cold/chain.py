"""The credential chain of the AWS tools, asked with a limit: what hangs in it is named, and is not taken for the store.

A `credential_process` has no timeout of its own, and a metadata service that takes requests and answers none looks like
any other silence. So the chain is walked, and credentials are refreshed, in a thread beside the callers, who wait
`CREDENTIALS_SECONDS` and then raise the name of the source that is being asked. The thread goes on: whoever asks
next waits for the same walk, or gets what it has found meanwhile, so that a slow source is asked once, and one that
hangs costs one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import botocore.exceptions

from tiercache.errors import AccessDenied, TierError, Unavailable

CREDENTIALS_SECONDS = 3.0  # below the limit of the first contact, so that this message is the one that is seen
METADATA_TIMEOUT_SECONDS = 1
MANDATORY_SECONDS = 600  # botocore's: what expires sooner is refreshed before it is used
UNCLAIMED_SECONDS = 60.0  # for so long is an outcome kept that came after all who waited had gone
CREDENTIALS_HINT = (
    "give credentials by --profile, AWS_PROFILE, AWS_ACCESS_KEY_ID or ~/.aws/credentials, "
    "or --no-sign-request for a public bucket"
)
CHAIN_FAULTS = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)
"""What the credential chain raises: botocore passes on what a missing token file or an issuer that answers no JSON leads to."""

_SOURCES = {
    "custom-process": "the credential_process in ~/.aws/config",
    "iam-role": "the instance metadata service",
    "container-role": "the credential endpoint of this container",
    "assume-role": "AWS STS (assume role)",
    "assume-role-with-web-identity": "AWS STS (web identity)",
    "sso": "AWS SSO",
}
_SILENT_KINDS = ("iam-role", "container-role")
"""botocore takes their silence for 'none here' and says nothing."""


class _Walk:
    """One call in a thread of its own. `outcome` or `error` is there once `ended` is set."""

    def __init__(self, job: Callable[[], Any], subject: Any) -> None:
        self.subject = subject
        self.ended = threading.Event()
        self.ended_seconds = 0.0
        self.is_claimed = False
        self.outcome: Any = None
        self.error: Exception | None = None
        self._job = job
        threading.Thread(target=self._run, name="credentials", daemon=True).start()

    def _run(self) -> None:
        try:
            self.outcome = self._job()
        except (TierError, *CHAIN_FAULTS) as error:  # raised in the threads that wait
            self.error = error
        finally:
            self.ended_seconds = time.monotonic()
            self.ended.set()

    def serves(self, subject: Any) -> bool:
        """Is there something to wait for, or an outcome that nobody has had?"""
        is_kept = not self.is_claimed and time.monotonic() - self.ended_seconds < UNCLAIMED_SECONDS
        return self.subject is subject and (is_kept or not self.ended.is_set())


class Chain:
    """`new_session` makes a botocore session. The methods block, and may be called from any thread."""

    def __init__(self, new_session: Callable[[], Any]) -> None:
        self._new_session = new_session
        self._lock = threading.Lock()
        self._walks: dict[str, _Walk] = {}
        self._asking = ""

    def find(self) -> Any:
        """Credentials of the first source that has any. Raises AccessDenied when none has, Unavailable when one hangs."""
        try:
            found = self._bounded("find", self._load, None)
        except CHAIN_FAULTS as error:
            raise AccessDenied(f"credentials: {error}", hint=CREDENTIALS_HINT) from error
        return found

    def frozen(self, credentials: Any) -> Any:
        """What to sign with, refreshed when it must be. Raises Unavailable.

        A refresh that can wait is botocore's: one caller makes it, and the others go on with what is valid.
        """
        try:
            if not getattr(credentials, "refresh_needed", _never)(MANDATORY_SECONDS):
                return credentials.get_frozen_credentials()
            return self._bounded("refresh", lambda: self._refresh(credentials), credentials)
        except CHAIN_FAULTS as error:
            raise Unavailable(
                f"credentials cannot be refreshed: {error}", hint="log in again, or see what issues them"
            ) from error

    def _refresh(self, credentials: Any) -> Any:
        self._asking = _SOURCES.get(credentials.method, f"the source {credentials.method!r}")
        return credentials.get_frozen_credentials()

    def _load(self) -> Any:
        silent = []
        for provider in self._new_session().get_component("credential_provider").providers:
            self._asking = _SOURCES.get(provider.METHOD, f"the source {provider.METHOD!r}")
            began = time.monotonic()
            found = provider.load()
            if found is not None:
                return found
            if provider.METHOD in _SILENT_KINDS and time.monotonic() - began >= METADATA_TIMEOUT_SECONDS:
                silent.append(self._asking)
        but = f", and {' and '.join(silent)} did not answer" if silent else ""
        raise AccessDenied(f"no AWS credentials found{but}", hint=CREDENTIALS_HINT)

    def _bounded(self, kind: str, job: Callable[[], Any], subject: Any) -> Any:
        with self._lock:
            walk = self._walks.get(kind)
            if walk is None or not walk.serves(subject):
                walk = self._walks[kind] = _Walk(job, subject)
        if not walk.ended.wait(CREDENTIALS_SECONDS):
            raise Unavailable(
                f"{self._asking} gave no credentials within {CREDENTIALS_SECONDS:g} s",
                hint="see why it hangs; the store was not asked",
            )
        walk.is_claimed = True
        if isinstance(walk.error, TierError):
            raise type(walk.error)(str(walk.error), hint=walk.error.hint)  # each thread its own: a traceback grows
        if walk.error is not None:
            raise walk.error
        assert walk.outcome is not None, "a bug ended the walk; its traceback is in the log"
        return walk.outcome


def _never(_seconds: int) -> bool:
    return False
