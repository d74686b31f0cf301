"""Both ends of the socket between server and engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from sayfa.wire.sockets import Connection, make_pair


@contextmanager
def connected_pair() -> Iterator[tuple]:
    """Give our raw socket and a Connection over the other one; close both."""
    ours, theirs = make_pair()
    connection = Connection(theirs)
    try:
        yield ours, connection
    finally:
        connection.close()
        ours.close()
