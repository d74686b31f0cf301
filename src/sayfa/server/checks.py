"""What of the options can be found wrong before the address is taken: files of TLS, addresses, names that never fit.

Called by `serve.bind`, and by `sayfa serve --check-config`, which is why it imports nothing that is slow to load.
"""

import re

from sayfa.base.config import ServerOptions
from sayfa.base.errors import ConfigError
from sayfa.base.quoting import quoted
from sayfa.server.gate import networks
from sayfa.server.tls import check_tls

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
_USUAL_PORT = re.compile(r"(http://.*:80|https://.*:443)")
_HOST = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


def check_options(options: ServerOptions) -> None:
    """Raise ConfigError for files and addresses with which nothing could be served, and for names that nobody sends."""
    networks(options.trusted_proxies)
    for origin in options.cors_origins:
        if not _ORIGIN.fullmatch(origin) or _USUAL_PORT.fullmatch(origin):
            raise ConfigError(
                f"--cors-origins holds {quoted(origin, 100)}, which no browser sends; write scheme://host in small "
                "letters, with :port only where it is not the usual one, and no path (* for all)"
            )
    for host in options.allowed_hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"--allowed-hosts holds {quoted(host, 100)}, which would fit no request; write a host's name or "
                "address without scheme, port and path, IPv6 in brackets (* alone for all)"
            )
    if options.ssl_certfile and options.ssl_keyfile:
        check_tls(options.ssl_certfile, options.ssl_keyfile)
