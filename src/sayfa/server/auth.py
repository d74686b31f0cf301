"""Who may call what: keys, and the guard that asks for one on every route except the open ones.

Called by the edge for each request. Routes are matched by the router's own method on the same scope, so that no
spelling of a path is one route to the guard and another to the router. Deny by default: what the routing table does not
name as open needs a key, a route that does not exist too. Knows no bodies.
"""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from sayfa.base.access import MAX_KEY_CHARS
from sayfa.base.errors import Unauthorized
from sayfa.base.faults import fault

OPEN_ROUTES = frozenset({"health", "health_live", "health_ready", "ping", "version"})
"""Names of routes without secrets. `metrics` joins them where `protect_metrics`, or its default, leaves it open."""


class Keys:
    """The accepted keys, kept as SHA-256 digests; no key is kept itself."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def __bool__(self) -> bool:
        """Whether keys are asked for at all."""
        return bool(self._digests)

    def tenant(self, authorization: str) -> str:
        """The tenant of an Authorization header: a short name made from the key's hash.

        Raises Unauthorized, in the same way and after the same work, for a missing, malformed or unknown key.
        """
        fault("server.auth")
        scheme, _, key = authorization.partition(" ")
        well_formed = scheme.lower() == "bearer" and 0 < len(key) <= MAX_KEY_CHARS
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape") if well_formed else b"").digest()
        known = False
        for accepted in self._digests:
            # All are compared, so that the time does not tell which one was near.
            known |= hmac.compare_digest(accepted, digest)
        if not (known and well_formed):
            raise Unauthorized(
                "There is no valid API key in this request; send `Authorization: Bearer KEY`.", code="invalid_api_key"
            )
        return digest.hex()[:16]


class Guard:
    """Decides for a scope whether it may pass, by the routing table."""

    def __init__(self, keys: Keys, routes: list[BaseRoute], open_names: frozenset[str]) -> None:
        self._keys = keys
        self._routes = routes
        self._open_names = open_names

    def tenant_of(self, scope: Scope) -> str:
        """Return the caller's tenant ("" where no key is asked for); raise Unauthorized."""
        if not self._keys or self._is_open(scope):
            return ""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return self._keys.tenant(header.decode("latin-1"))

    def _is_open(self, scope: Scope) -> bool:
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return getattr(route, "name", None) in self._open_names
        return False
