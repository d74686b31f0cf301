"""What the commands show a person: settings, the report of a start, a progress line.

Called by the other files of this room. Builds text from plain records; knows neither server nor engine.
"""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from sayfa.base.config import Settings
from sayfa.base.messages import EngineInfo
from sayfa.base.settings import describe
from sayfa.cli.output import tell

MIB = 1 << 20


class StartTimes(NamedTuple):
    """Seconds from the command to ready, and the phases of this process; those of the engine are in its EngineInfo."""

    total_s: float
    own: list[tuple[str, float]]


def print_settings(settings: Settings) -> int:
    """Print every setting with its source on stdout, secrets hidden."""
    rows = describe(settings)
    for key, value, origin in rows:
        print(f"{key:<{max(len(row[0]) for row in rows)}}  {value or '-':<28}  {origin}")
    return 0


def start_report(
    info: EngineInfo,
    names: Sequence[str],
    url: str,
    start: StartTimes,
    *,
    num_keys: int,
    version: str,
) -> list[str]:
    """The lines that tell what was loaded, where the memory goes, how long the start took, and how to ask."""
    memory = info.memory
    tokens = (memory.num_pages - 1) * memory.page_size
    return [
        f"Sayfa {version} serves {', '.join(names)}",
        f"  model      {info.model}: {info.architecture}, weights mostly {info.dtype}",
        f"  memory     weights {_mib(memory.weights_bytes)} + pages {_mib(memory.pages_bytes)} + buffers "
        f"{_mib(memory.buffers_bytes)}; margin left free {_mib(memory.margin_bytes)}",
        f"  pages      {memory.num_pages:,} of {memory.page_size} tokens in {info.kv_dtype}: {tokens:,} tokens; "
        f"prefix caching {'on' if info.prefix_caching else 'off'}",
        f"  load       Maximum concurrency for {info.max_model_len:,} tokens per request: "
        f"{tokens / info.max_model_len:.2f}x; at most {info.max_num_seqs} sequences in a step",
        *_execution(info),
        f"  start      {start.total_s:.2f} s: {_parts(start.own)}; beside it the engine: {_parts(info.phases)}",
        f"  address    {url}  (documents at /docs, metrics at /metrics)",
        "",
        "  " + curl_line(url, names[0], num_keys=num_keys),
        "",
    ]


def start_facts(
    info: EngineInfo,
    names: Sequence[str],
    url: str,
    start: StartTimes,
    *,
    num_keys: int,
    version: str,
) -> dict[str, object]:
    """The same as fields of one line in the log, for collectors; values as they are, in bytes, tokens and seconds."""
    memory = info.memory
    tokens = (memory.num_pages - 1) * memory.page_size
    return {
        "version": version,
        "models": list(names),
        "model": info.model,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "weights_bytes": memory.weights_bytes,
        "pages_bytes": memory.pages_bytes,
        "buffers_bytes": memory.buffers_bytes,
        "margin_bytes": memory.margin_bytes,
        "num_pages": memory.num_pages,
        "page_size": memory.page_size,
        "kv_dtype": info.kv_dtype,
        "num_tokens": tokens,
        "prefix_caching": info.prefix_caching,
        "max_model_len": info.max_model_len,
        "max_concurrency": round(tokens / info.max_model_len, 2),
        "max_num_seqs": info.max_num_seqs,
        "threads": info.threads,
        "isa": info.isa,
        "num_ops": len(info.ops),
        "ops_not_native": {op: why for op, why in info.ops.items() if why != "native"},
        "start_s": round(start.total_s, 2),
        "phases_s": {name: round(seconds, 2) for name, seconds in start.own},
        "engine_phases_s": {name: round(seconds, 2) for name, seconds in info.phases},
        "address": url,
        "curl": curl_line(url, names[0], num_keys=num_keys),
    }


def _execution(info: EngineInfo) -> list[str]:
    other = {op: why for op, why in info.ops.items() if why != "native"}
    head = f"  execution  {info.threads} threads, instruction set {info.isa}: "
    if not other:
        return [head + f"all {len(info.ops)} kinds of operation native"]
    lines = [head + f"{len(info.ops) - len(other)} of {len(info.ops)} kinds of operation native"]
    for why in dict.fromkeys(other.values()):
        lines.append(f"             not native: {', '.join(op for op in other if other[op] == why)}: {why}")
    return lines


def curl_line(url: str, model: str, *, num_keys: int) -> str:
    """A command that asks the server something, fit to be pasted into a shell. The answer is short.

    The key is left to the shell: it is the variable's, of several in it the first.
    """
    messages = [{"role": "user", "content": "Name three colours of the rainbow."}]
    wishes = {"max_tokens": 64, "temperature": 0.2}  # without a bound a small model may go on for thousands of tokens
    body = json.dumps({"model": model, "messages": messages, **wishes}, ensure_ascii=False)
    words = ["curl"]
    if url.startswith("http+unix://"):
        words += ["--unix-socket", url.removeprefix("http+unix://")]
        url = "http://localhost"
    words += [f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join(words)
    if num_keys:
        variable = "$SAYFA_API_KEY" if num_keys == 1 else "${SAYFA_API_KEY%%,*}"
        line += f' -H "Authorization: Bearer {variable}"'
    return f"{line} -d {shlex.quote(body)}"


def _parts(phases: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases)


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"


class ProgressLine:
    """A line on stderr that tells how far something is; only at a terminal, silent elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._on = sys.stderr.isatty()
        self._shown_s = 0.0
        self._stage = ""

    def show(self, text: str, done: float, stage: str = "") -> None:
        """Tell how far it is, done in [0, 1]; at most ten times a second, and always the end and each new stage."""
        now_s = time.monotonic()
        if not self._on or (done < 1 and now_s - self._shown_s < 0.1 and stage == self._stage):
            return
        self._shown_s, self._stage = now_s, stage
        filled = round(24 * min(1.0, max(0.0, done)))
        tell(f"\r\x1b[K{self._title} [{'#' * filled}{'.' * (24 - filled)}] {text}")

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the line away, as the end of a block does: also one that Ctrl-C ended."""
        if self._on:
            tell("\r\x1b[K")
