"""The protocol of systemd's service notification (sd_notify(3)): datagrams to the socket named by $NOTIFY_SOCKET.

Written out because it is this small, and a binding would be one more wheel to pin.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from tiercache.errors import SetupError


def notify(state: str, fds: Sequence[int] = ()) -> bool:
    """Send e.g. `READY=1` or `STOPPING=1\\nSTATUS=...` to the supervisor, with descriptors to keep; False when there is none.

    Raises SetupError when there is one and it cannot be reached: a unit of Type=notify would wait for ever.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # the abstract namespace, as an environment can hold it
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.connect(address)
            if fds:
                socket.send_fds(channel, [state.encode()], list(fds))
            else:
                channel.sendall(state.encode())
    except OSError as error:
        raise SetupError(
            f"NOTIFY_SOCKET {os.environ['NOTIFY_SOCKET']!r} cannot be reached: {error.strerror or error}",
            hint="unset NOTIFY_SOCKET, or start the daemon from a unit of Type=notify",
        ) from error
    return True
