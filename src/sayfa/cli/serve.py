"""`sayfa serve`: settings → model path, engine process, address, server; then the report of the start.

The order is made for a quick start: the engine process is spawned before this one imports the server, so that both
load at the same time.
"""

import os
import sys
import time
from pathlib import Path

import msgspec

from sayfa import __version__
from sayfa.base import log
from sayfa.base.clock import SystemClock
from sayfa.base.config import ModelOptions, ServerOptions, Settings
from sayfa.base.errors import ConfigError, ModelError
from sayfa.base.messages import EngineInfo
from sayfa.cli.output import tell
from sayfa.cli.show import ProgressLine, StartTimes, print_settings, start_facts, start_report
from sayfa.hub import resolve_model
from sayfa.wire.process_client import ProcessClient

ENGINE_COMMAND = [sys.executable, "-m", "sayfa.engine"]


def run(settings: Settings) -> int:
    """Serve until told to stop; return the exit code. Raises ConfigError or ModelError, unless the log tells it."""
    log.setup(settings.server.log_level, settings.server.log_format)
    try:
        return _run(settings)
    except (ConfigError, ModelError) as error:
        if settings.server.log_format != "json":
            raise
        log.logger("cli").error("%s", error)
        return 2


def check(settings: Settings) -> int:
    """Refuse what the start would refuse of the settings alone, else print each with its source; return the exit code.

    Raises ConfigError.
    """
    from sayfa.server.checks import check_options

    check_options(settings.server)
    _template_of(settings.model)
    return print_settings(settings)


def _template_of(options: ModelOptions) -> str | None:
    """The operator's chat template, if one is named. Raises ConfigError."""
    if options.chat_template is None:
        return None
    from sayfa.text.chat_template import read_template

    return read_template(options.chat_template)


def _run(settings: Settings) -> int:
    options = settings.model
    template = _template_of(options)
    path = resolve_model(options.model, revision=options.revision, offline=options.offline)
    names = options.served_model_name or [shown_name(options.model)]
    engine = settings.engine
    engine = msgspec.structs.replace(engine, model=msgspec.structs.replace(options, model=str(path)))
    command = [*ENGINE_COMMAND, "--log-level", settings.server.log_level, "--log-format", settings.server.log_format]
    client = ProcessClient(command, msgspec.json.encode(engine), SystemClock())
    phases = [("command", since_start_s())]
    client.spawn()

    # While the engine loads.
    from sayfa.server import serve as server
    from sayfa.server.context import TextTools

    progress = ProgressLine("loading")
    client.on_progress(lambda phase, done: progress.show(phase, done, phase))
    client.on_state(lambda _: progress.clear())  # what is said of a change begins a line of its own
    sock = server.bind(settings.server)
    phases.append(("server imports", since_start_s() - phases[0][1]))

    def on_ready(info: EngineInfo) -> None:
        url = server.url_of(sock, settings.server)
        times = StartTimes(since_start_s(), phases)
        show_start(info, names, url, times, settings.server)

    def load_text() -> TextTools:
        begun_s = since_start_s()
        tools = TextTools.load(str(path), template)
        phases.append(("tokenizer", since_start_s() - begun_s))
        return tools

    return server.run(sock, client, load_text, settings.server, names, __version__, on_ready)


def show_start(info: EngineInfo, names: list[str], url: str, times: StartTimes, options: ServerOptions) -> None:
    """Tell a person, or with `--log-format json` a collector, what is served: there every line is JSON."""
    num_keys = len(options.api_key)
    if options.log_format == "json":
        facts = start_facts(info, names, url, times, num_keys=num_keys, version=__version__)
        log.always("cli", f"Sayfa {__version__} serves {', '.join(names)}", facts)
        return
    tell("\n".join(start_report(info, names, url, times, num_keys=num_keys, version=__version__)) + "\n")


def shown_name(model: str) -> str:
    """What clients call a model that got no other name: the name given, of a path only its last part."""
    path = Path(model).expanduser()
    return (path.stem if path.suffix == ".gguf" else path.absolute().name) if path.exists() else model


def since_start_s() -> float:
    """Seconds since this process was started, its own interpreter's start included where the kernel tells it."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            started = int(file.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError):
        return time.process_time()
