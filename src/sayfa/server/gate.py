"""Counts open connections, in all and by address, and says why one more is too many.

Called by `connection` at each beginning and end. Knows addresses; no HTTP, no requests. Of an IPv6 address the first
64 bits count, since one machine may have all that follow; Unix sockets and trusted addresses count in all only.

Invariant (`check`): `num_open` connections have entered and not left; no address is kept that has none.
"""

import ipaddress
import logging
import resource
from collections.abc import Callable, Sequence

from sayfa.base.errors import ConfigError, Overloaded, RateLimited, RequestError

log = logging.getLogger("sayfa.server")

LOOPBACK = ("127.0.0.0/8", "::1/128")
"""A proxy on this machine, or its user: there the limit in all is the only one."""
SPARE_DESCRIPTORS = 64
"""What the process needs beside its connections: files, the engine's socket, the listening one, connections refused."""
NETWORK_BITS = 64
RETRY_AFTER_S = 5

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Gate:
    """Lets connections in up to two limits.

    most: in all. most_per_address: from one address that is not in `trusted` (addresses or networks in CIDR notation).
    on_refused: told the code of each refusal, and of every other end before a request was there.
    """

    def __init__(
        self, most: int, most_per_address: int, trusted: Sequence[str], on_refused: Callable[[str], None]
    ) -> None:
        self.most = most
        self.num_open = 0
        self.on_refused = on_refused
        self._most_per_address = most_per_address
        self._trusted = networks([*LOOPBACK, *trusted])
        self._open_of: dict[str, int] = {}

    def key(self, address: str | None) -> str | None:
        """What an address counts under; None if it counts in all only."""
        try:
            ip = ipaddress.ip_address(address or "")
        except ValueError:
            return None  # a Unix socket has none
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if any(ip in network for network in self._trusted):
            return None
        if isinstance(ip, ipaddress.IPv4Address):
            return str(ip)
        return str(ipaddress.ip_network((int(ip) >> NETWORK_BITS << NETWORK_BITS, NETWORK_BITS)))

    def why_not(self, key: str | None) -> RequestError | None:
        """Say why one more connection cannot enter; None if it can."""
        if self.num_open >= self.most:
            sentence = f"The server has {self.num_open} connections, which is its limit; try again in a moment."
            return Overloaded(sentence, code="too_many_connections", retry_after_s=RETRY_AFTER_S)
        if key is not None and self._open_of.get(key, 0) >= self._most_per_address:
            sentence = (
                f"Your address has {self._most_per_address} connections here, which is the limit for one; use them "
                "for several requests, or close some."
            )
            return RateLimited(sentence, code="too_many_connections_of_address", retry_after_s=RETRY_AFTER_S)
        return None

    def enter(self, key: str | None) -> None:
        """Count a connection in."""
        self.num_open += 1
        if key is not None:
            self._open_of[key] = self._open_of.get(key, 0) + 1

    def leave(self, key: str | None) -> None:
        """Count one out that had entered under this key."""
        self.num_open -= 1
        if key is not None:
            self._open_of[key] -= 1
            if not self._open_of[key]:
                del self._open_of[key]

    def check(self) -> None:
        """Raise RuntimeError if the counts contradict each other."""
        if self.num_open < sum(self._open_of.values()) or min(self._open_of.values(), default=1) < 1:
            raise RuntimeError(f"{self.num_open} connections are open, by address: {self._open_of}")


def networks(listed: Sequence[str]) -> list[Network]:
    """Read addresses and networks; raise ConfigError for what is neither."""
    found: list[Network] = []
    for text in listed:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ConfigError(
                f"--trusted-proxies {text}: {error}; give an address (10.0.0.7) or a network (10.0.0.0/8)."
            ) from None
    return found


def within_descriptors(most: int) -> int:
    """Return how many connections this process can hold, at most `most`; its own limit of descriptors is raised to it.

    Beyond that limit the kernel would leave new connections unanswered, where a refusal tells what to do.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return most
    reached = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if reached > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    room = max(1, reached - SPARE_DESCRIPTORS)
    if room < most:
        log.warning(
            "--max-connections is %d, but this process may open %d descriptors: %d connections are taken. Raise its "
            "limit (ulimit -n), or lower --max-connections.", most, reached, room,
        )  # fmt: skip
    return min(most, room)
