"""A real server and a real engine process around a made-up model whose steps take a set time.

    python scripted_serve.py STEP_S MAX_NUM_SEQS MAX_QUEUED KEY,KEY,…        the server; its first line is the port
    python scripted_serve.py engine STEP_S MAX_NUM_SEQS MAX_QUEUED FD        its engine process, started by it

A step sleeps, so that what the engine can do in a second is known and does not depend on the machine; scheduler, pages,
wire, supervision and HTTP are the real ones. SIGTERM ends it as a user's.
"""

import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "http"), str(TESTS / "hostile")]

import msgspec  # noqa: E402

from fakes.fake_engine import make_engine  # noqa: E402
from fakes.runner import FakeRunner, mix_rule  # noqa: E402
from sayfa.base.config import EngineConfig, ServerOptions  # noqa: E402
from sayfa.core.policy import FairPolicy  # noqa: E402
from sayfa.engine.process import Progress, run  # noqa: E402

CONTEXT = 64
VOCAB = 95


class SleepingRunner:
    """A FakeRunner whose steps take a set time."""

    def __init__(self, runner: FakeRunner, step_s: float) -> None:
        self._runner = runner
        self._step_s = step_s

    def execute(self, plan: Any) -> Any:
        """Compute, and sleep for what is left of the step."""
        begun_s = time.monotonic()
        result = self._runner.execute(plan)
        if plan.rows:
            time.sleep(max(0.0, self._step_s - (time.monotonic() - begun_s)))
        return result


def engine(arguments: list[str]) -> int:
    """Be the engine process."""
    step_s, rows, queued = float(arguments[0]), int(arguments[1]), int(arguments[2])

    def build(config: EngineConfig, progress: Progress) -> Any:
        made = make_engine(
            rule=mix_rule(VOCAB), num_pages=1 + rows * CONTEXT // 4, policy=FairPolicy(), max_num_seqs=rows,
            max_num_batched_tokens=rows + 64, max_model_len=CONTEXT, max_queued_requests=queued, share_queue=True,
            wrap=lambda runner: SleepingRunner(runner, step_s),
        )  # fmt: skip
        made.info = msgspec.structs.replace(made.info, vocab_size=1 << 20, max_queued_requests=queued)
        return made

    return run(arguments, build)


def server(step_s: str, rows: str, queued: str, keys: str) -> int:
    """Be the server."""
    from http_support import MODEL, text_tools

    from sayfa.base import log
    from sayfa.base.clock import SystemClock
    from sayfa.server import serve
    from sayfa.wire.process_client import ProcessClient

    options = ServerOptions(port=0, api_key=keys.split(",") if keys else [], log_requests=False, log_stats_interval=0.0)
    log.setup("warning", "text")
    sock = serve.bind(options)
    command = [sys.executable, __file__, "engine", step_s, rows, queued]
    client = ProcessClient(command, msgspec.json.encode(EngineConfig()), SystemClock())
    tools = text_tools()
    return serve.run(
        sock, client, lambda: tools, options, [MODEL], "0", lambda info: print(sock.getsockname()[1], flush=True)
    )


if __name__ == "__main__":
    sys.exit(engine(sys.argv[2:]) if sys.argv[1] == "engine" else server(*sys.argv[1:5]))
