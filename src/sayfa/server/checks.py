"""What of the options can be found wrong before the address is taken: files of TLS, addresses of proxies.

Called by `serve.bind`, and by `sayfa serve --check-config`, which is why it imports nothing that is slow to load.
"""

from sayfa.base.config import ServerOptions
from sayfa.server.gate import networks
from sayfa.server.tls import check_tls


def check_options(options: ServerOptions) -> None:
    """Raise ConfigError for files and addresses with which nothing could be served."""
    networks(options.trusted_proxies)
    if options.ssl_certfile and options.ssl_keyfile:
        check_tls(options.ssl_certfile, options.ssl_keyfile)
