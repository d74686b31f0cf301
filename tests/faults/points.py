"""Which point is fired in which stage, and what a fault may cost. `test_f03_list` proves that none is left out."""

OF_ONE = (
    "server.edge", "server.auth", "server.body.read", "server.body.parse", "server.body.validate", "server.books.open",
    "server.admit", "server.books.begin", "server.request", "client.before_send", "client.encode",
    "engine.add.before_check", "engine.add.before_queue", "core.open", "runner.before_forward", "runner.before_sample",
    "server.output", "text.detokenize", "text.stop_strings", "server.books.note", "server.usage", "server.event",
    "server.stream.begin", "server.stream.send", "server.answer",
)  # fmt: skip
"""An exception there ends one request with one error; all others are served as if nothing had been."""

BESIDE = (
    "client.send_abort", "client.figures", "client.ping", "server.sweep", "server.admissions", "server.metrics.keep",
    "server.books.close",
)  # fmt: skip
"""An exception there is nobody's: it is logged, and the work beside the requests goes on."""

COSTING_THE_ENGINE = (
    "client.decode", "client.hello", "client.progress", "client.refused", "client.before_deliver", "client.pong",
    "streams.deliver", "process.decode", "process.before_handle", "process.encode", "process.before_send",
    "engine.abort", "engine.pong", "engine.blame", "engine.step.before_decide", "engine.step.before_compute",
    "engine.step.before_update", "engine.step.after_update", "engine.step.figures", "core.expire", "core.plan",
    "core.admit", "core.match", "core.grow", "core.take_page", "core.evict", "core.fork", "core.preempt", "core.apply",
    "core.commit", "core.finish", "core.release",
)  # fmt: skip
"""An exception there leaves a state that cannot be trusted: the engine is started anew, who was with it is told so."""

IN_ENGINE = tuple(
    name for name in (*OF_ONE, *COSTING_THE_ENGINE) if name.startswith(("process.", "engine.", "core.", "runner."))
)
"""Where the engine process can be killed."""

WIRE_KINDS = ("drop", "double", "cut", "flip")
DISK_KINDS = ("enospc", "eio", "erofs", "epipe")

DYING = ("client.restart", "client.lost", "client.bury", "client.before_spawn", "client.attach", "client.quarantine")
PAUSING = ("engine.pause",)
"""Passed where readers are behind. Costs the engine: it and the server would think differently of who stands still."""

DRAINING = ("client.drain", "server.drain", "engine.refuse_waiting", "engine.end_all", "process.while_draining")

HARMLESS_IN_A_STEP = (
    "runner.prepare", "runner.before_forward", "runner.logits", "runner.before_sample", "runner.score_prompt",
    "runner.edit", "runner.draw", "runner.logprobs", "runner.note",
)  # fmt: skip
"""An exception there is made good by making the step again."""

LOSING_THE_TABLE = ("runner.table.forget", "runner.table.put", "runner.copy_pages")

AT_START = (
    "load.config", "load.json", "load.open", "load.map", "load.safetensors_header", "load.tensor", "load.program",
    "load.pack", "load.pages", "load.warm_up", "runner.table.put", "runner.prepare", "runner.before_forward",
    "runner.draw",
)  # fmt: skip

IN_CHAT = ("server.template", "text.encode", "server.thread", "server.logprobs", "server.usage", "server.event")
"""What a conversation passes and a world with token ids does not."""

BESIDE_CHAT = (
    "server.metrics.render",
    "server.health",
    "server.stats_line",
    "server.stream.keep_alive",
    "server.load_text",
)
OF_THE_ENGINES_SOCKET = ("wire.engine_reads", "wire.engine_writes")
OF_OTHER_FILES = ("load.header", "load.checksum")

IN_FILES = ("settings.read", "batch.read", "hub.fetch", "output.write", "progress.write", "log.write")
"""See `test_f22_writes`."""

IN_PROCESSES = ("process.before_build", "process.before_hello")
"""See `tests/e2e/test_engine_faults`, which needs real processes."""
