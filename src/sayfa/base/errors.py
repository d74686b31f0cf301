"""Every error that Sayfa raises on purpose, in one tree.

    SayfaError
    ├── ConfigError            the operator's settings are wrong; the process ends with exit code 2
    ├── ModelError             a model cannot be served: files, architecture, types, memory; exit code 2
    │   └── WeightFileError    a weight file is damaged, truncated or hostile; names file and field
    ├── RequestError           the client's request is wrong or cannot be taken; becomes an HTTP answer
    │   ├── InvalidRequest     400  a field has a value that cannot be served
    │   ├── Unauthorized       401  no key, or a key that is not ours
    │   ├── NotFound           404  unknown model or route
    │   ├── TooLarge           413  the body is over its limit
    │   ├── Overloaded         503  queue full or draining; carries `retry_after_s`
    │   └── RateLimited        429  the caller's own limit; carries `retry_after_s`
    └── EngineError            the engine failed one request, or died; becomes 500 or 503
        ├── EngineDead         503  the engine process is gone; a restart is under way
        └── LostStateError          inside the engine: what two parts know contradicts; its process ends and is replaced

The message is written for the one who can act on it: field, value, limit, way out. `server.errors` maps the
tree to HTTP in one place; nothing else knows statuses.
"""


class SayfaError(Exception):
    """Base of all errors raised on purpose. The message is fit to be shown to a user."""


class ConfigError(SayfaError):
    """A setting, flag, file key or environment variable cannot be used."""


class ModelError(SayfaError):
    """A model cannot be loaded or does not fit."""


class WeightFileError(ModelError):
    """A weight file is damaged, truncated or hostile.

    `file` is the file's name without its folder (messages may reach people who must not see paths), `field` the part
    of the file that is wrong.
    """

    def __init__(self, file: str, field: str, problem: str) -> None:
        super().__init__(f"{file}: {field}: {problem}")
        self.file = file
        self.field = field


class RequestError(SayfaError):
    """A request that is answered with an error in OpenAI's form.

    `param` names the field in the request or is None; `code` is a short stable word for programs.
    """

    status = 400
    kind = "invalid_request_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """A field has a value that cannot be served (400)."""


class Unauthorized(RequestError):
    """No key, or a key that is not ours (401)."""

    status = 401
    kind = "authentication_error"


class NotFound(RequestError):
    """An unknown model or route (404)."""

    status = 404
    kind = "not_found_error"


class TooLarge(RequestError):
    """The body is over its limit (413)."""

    status = 413


class RateLimited(RequestError):
    """The caller's own limit is reached (429)."""

    status = 429
    kind = "rate_limit_error"


class Overloaded(RequestError):
    """The server is full or draining (503)."""

    status = 503
    kind = "overloaded_error"


class EngineError(SayfaError):
    """The engine failed a request. `code` is a short stable word, for example `numerical_error`."""

    def __init__(self, message: str, *, code: str = "engine_error") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class EngineDead(EngineError):
    """The engine process is gone; requests that were with it are lost."""

    def __init__(self, message: str = "") -> None:
        sentence = message or "the engine process ended; it is being restarted, send the request again"
        super().__init__(sentence, code="engine_dead")


class LostStateError(EngineError):
    """A part of the engine could not follow the others; nothing that it holds can be trusted any more."""
