"""What all handlers share, made once by `create_app`: the engine's client, the text side, options, metrics.

Nothing here belongs to one request. Knows no routes.
"""

import asyncio
import hashlib
import platform
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from sayfa.base.clock import AwakeClock, Clock, SystemClock
from sayfa.base.config import ServerOptions
from sayfa.base.errors import EngineDead, InvalidRequest, NotFound, Overloaded
from sayfa.base.faults import fault
from sayfa.base.messages import EngineInfo
from sayfa.server.books import Admissions
from sayfa.server.metrics import ServerMetrics
from sayfa.server.refusals import Refusals
from sayfa.server.sse import EventStream
from sayfa.server.trust import Trust
from sayfa.text.chat_template import ChatTemplate, load_chat_template
from sayfa.text.tokenizer import Tokenizer, load_tokenizer
from sayfa.wire.client import EngineClient

INLINE_SIZE = 4096
"""Of text work, in characters: a few milliseconds, and less than a hop to a thread costs and spares."""

Result = TypeVar("Result")


class TextTools:
    """Tokenizer and chat template of the model; there as soon as they are loaded."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template

    @classmethod
    def load(cls, model_path: str, template_source: str | None = None) -> "TextTools":
        """Load both from a model's files; `template_source` takes the place of the model's own template."""
        tokenizer = load_tokenizer(model_path)
        return cls(tokenizer, load_chat_template(tokenizer, template_source))

    def chat_ids(
        self,
        messages: list[dict[str, Any]],
        opens: bool,
        goes_on: bool,
        options: Mapping[str, Any],
        check: Callable[[str], None],
    ) -> list[int]:
        """Ids of a conversation after the template; `check` looks at its text before that is tokenized.

        Raises InvalidRequest if there is no template or it refuses, and what `check` raises.
        """
        if self.template is None:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions, or start the server with --chat-template.",
                code="no_chat_template",
            )
        fault("server.template")
        rendered = self.template.render(messages, opens, goes_on, options=options)
        check(rendered.text)
        return rendered.encode(self.tokenizer)


class ServerContext:
    """Shared state of the server.

    names: what clients may call the model; the first is shown. text: None while the tokenizer is loading. rng: where
    ids come from; nobody may guess those of others. awake: for limits on the silence of clients; `sse.sweep` ticks it.
    """

    def __init__(
        self,
        client: EngineClient,
        text: TextTools | None,
        options: ServerOptions,
        names: list[str],
        version: str,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.awake = AwakeClock(self.clock)
        self._rng = rng or random.SystemRandom()
        self.client = client
        self.text = text
        self.options = options
        self.names = names
        self.version = version
        self.created_s = self.now_s()
        self.draining = False
        self.admissions = Admissions()
        self.trust = Trust(self.clock)
        self.metrics = ServerMetrics(names[0], options.vllm_metric_names)
        self.refusals = Refusals(options.log_requests)
        self.streams: set[EventStream] = set()
        # Tokenizing long texts would hold up every stream; two threads, since the engine needs the cores.
        self.pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
        # Long bodies are parsed by one: each thread would keep the memory of its longest, and all wait for one lock.
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="body")
        self._inline_size = 0
        self._fingerprint: tuple[str, str] | None = None

    async def text_work(self, size: int, work: Callable[[], Result]) -> Result:
        """Do work on text or ids: at once if it is little, else in a thread, for which the other streams do not wait.

        size: characters, ids or values that it goes through.
        """
        if size <= INLINE_SIZE:
            # Hundreds of answers may each have a little: the others get their turn between them.
            self._inline_size += size
            if self._inline_size > INLINE_SIZE:
                self._inline_size = 0
                await asyncio.sleep(0)
            return work()
        fault("server.thread")
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def new_id(self, prefix: str) -> str:
        """An id of our own making, unique over restarts and replicas."""
        return f"{prefix}-{self.new_hex()}"

    def new_hex(self) -> str:
        """128 random bits as 32 hex digits."""
        return f"{self._rng.getrandbits(128):032x}"

    def now_s(self) -> int:
        """Whole seconds since 1970, for `created`."""
        return int(self.clock.wall())

    def check_model(self, name: str) -> str:
        """Return the name if clients may use it; raise NotFound (404 `model_not_found`) otherwise."""
        if name in self.names:
            return name
        known = ", ".join(f"`{known}`" for known in self.names)
        shown = name if len(name) <= 100 else name[:100] + "…"
        raise NotFound(
            f"There is no model `{shown}` here; this server has {known}.", param="model", code="model_not_found"
        )

    def ready_info(self) -> EngineInfo:
        """Facts of the running engine; raises Overloaded or EngineDead while there is none."""
        self.check_draining()
        info = self.client.info
        if self.client.state == "ready" and info is not None and self.text is not None:
            return info
        if self.client.state in ("dead", "failed"):
            raise EngineDead
        raise _still_loading()

    def check_draining(self) -> None:
        """Raise Overloaded if the server was asked to end."""
        if self.draining:
            raise Overloaded("The server is shutting down and takes no new requests.", code="draining", retry_after_s=5)

    @property
    def tools(self) -> TextTools:
        """Tokenizer and template; raises Overloaded while they are loading."""
        if self.text is None:
            raise _still_loading()
        return self.text

    def salt(self, tenant: str, caller_salt: str | None) -> str:
        """The salt of a request's pages: tenants never share pages, and a caller's own salt can only divide further."""
        if not tenant and caller_salt is None:
            return ""
        return msgspec.json.encode([tenant, caller_salt]).decode()

    def deadline(self, wished_s: float | None) -> float | None:
        """Seconds from arrival after which an answer is worthless; the operator's default if the caller says none."""
        return wished_s if wished_s is not None else (self.options.default_deadline or None)

    def fingerprint(self, info: EngineInfo) -> str:
        """`system_fingerprint`: changes when model, version or arithmetic change, that is when answers might."""
        # The machine, too: the instruction set "plain" fuses multiply-adds on AArch64 and does not on x86.
        facts = (info.model, info.architecture, info.dtype, info.kv_dtype, info.isa)
        key = "|".join((self.version, platform.machine(), *facts))
        if self._fingerprint is None or self._fingerprint[0] != key:
            self._fingerprint = (key, "fp_" + hashlib.sha256(key.encode()).hexdigest()[:10])
        return self._fingerprint[1]


def _still_loading() -> Overloaded:
    return Overloaded("The model is still being loaded; try again in a moment.", code="starting", retry_after_s=2)
