"""Who can reach the address that a server listens on. Knows addresses, no keys and no requests."""

import ipaddress

from sayfa.base.config import ServerOptions
from sayfa.base.errors import ConfigError


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


def check_access(server: ServerOptions) -> None:
    """Raise ConfigError if strangers could call a server that asks for no key."""
    if not (server.api_key or server.insecure_no_auth or is_local(server)):
        raise ConfigError(
            f"--host {server.host} can be reached from other machines and no --api-key is set: add one, or say "
            "--insecure-no-auth if something else guards this address"
        )
