"""A whole server in one process for attacks from outside: real HTTP, real scheduler and page pool, a made-up runner.

    python scripted_server.py KEY [FIELD=JSON …]        fields are ServerOptions

The first line on stdout is the port. Log lines go to stderr as a user's would. SIGTERM ends it as a user's.
"""

import faulthandler
import json
import signal
import sys

import msgspec
from http_support import MODEL, text_tools, tokenizer

from fakes.fake_engine import make_engine
from fakes.runner import mix_rule
from sayfa.base import log
from sayfa.base.config import ServerOptions
from sayfa.base.messages import EngineInfo
from sayfa.engine.inproc import InprocClient
from sayfa.server import serve

CONTEXT = 256
NUM_PAGES = 513
"""Of 4 tokens, page 0 is nobody's: room for eight sequences of full length."""


class ScriptedClient(InprocClient):
    """The in-process client with what a server wants of one that it starts itself."""

    failure = None

    async def wait_ready(self) -> EngineInfo:
        info = self.info
        assert info is not None
        return info

    def on_state(self, callback: object) -> None:
        """Its state never changes by itself."""


def make_client(**limits: int) -> ScriptedClient:
    """An engine whose tokens are all bytes of text, so that every answer can be read."""
    sizes = {"num_pages": NUM_PAGES, "max_model_len": CONTEXT, "max_queued_requests": 64, **limits}
    engine = make_engine(rule=mix_rule(95), **sizes)  # type: ignore[arg-type]
    engine.info = msgspec.structs.replace(engine.info, vocab_size=tokenizer().vocab_size)
    return ScriptedClient(engine)


def main(key: str, fields: list[str]) -> int:
    given = {name: json.loads(value) for name, _, value in (field.partition("=") for field in fields)}
    options = ServerOptions(port=0, api_key=[key] if key else [], **given)
    faulthandler.register(signal.SIGUSR1)
    log.setup(options.log_level, options.log_format)
    sock = serve.bind(options)
    tools = text_tools()

    def ready(info: EngineInfo) -> None:
        print(sock.getsockname()[1], flush=True)

    return serve.run(sock, make_client(), lambda: tools, options, [MODEL], "0", ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
