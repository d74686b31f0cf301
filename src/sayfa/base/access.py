"""Who can reach the address that a server listens on, and which keys a client can send. Knows no requests."""

import ipaddress
from collections.abc import Iterable

from sayfa.base.config import ServerOptions
from sayfa.base.errors import ConfigError

MAX_KEY_CHARS = 512
"""Of a key that a request brings; a longer one is not even looked up."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name other than localhost may be anybody's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(server: ServerOptions) -> bool:
    """Whether only this machine can reach the server."""
    return bool(server.uds) or is_loopback(server.host)


def check_keys(keys: Iterable[str]) -> None:
    """Raise ConfigError, which shows no key, if one of them could never be sent."""
    for key in keys:
        if not key.strip() or not key.isascii() or not key.isprintable():
            raise ConfigError("--api-key: a key is empty or holds characters that no HTTP header can carry")
        if len(key) > MAX_KEY_CHARS:
            raise ConfigError(
                f"--api-key: a key is {len(key)} characters long, more than the {MAX_KEY_CHARS} that a request may "
                "bring; take a shorter one"
            )
        if "," in key:
            raise ConfigError(
                "--api-key: a key holds a comma, which stands between keys in SAYFA_API_KEY; take another"
            )


def check_access(server: ServerOptions) -> None:
    """Raise ConfigError if strangers could call a server that asks for no key."""
    if not (server.api_key or server.insecure_no_auth or is_local(server)):
        raise ConfigError(
            f"--host {server.host} can be reached from other machines and no --api-key is set: add one, or say "
            "--insecure-no-auth if something else guards this address"
        )
