"""`sayfa bench serve` and `sayfa bench paging`: run, show, write JSON.

Called by `app`. The figures are made in `bench`; here they meet the terminal and a file.
"""

import asyncio
import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sayfa import __version__
from sayfa.base.config import Settings
from sayfa.base.errors import ConfigError
from sayfa.base.settings import PREFIX
from sayfa.bench.client import CompletionClient, why_unreachable
from sayfa.bench.launch import LaunchedServer, end_politely, free_port
from sayfa.bench.load import run_workload
from sayfa.bench.report import WorkloadFigures, table
from sayfa.bench.workloads import choose
from sayfa.cli.output import check_output, write_output
from sayfa.cli.show import MIB, ProgressLine


def run_bench_serve(
    settings: Settings, url: str | None, api_key: str | None, plan: dict[str, Any], output: Path | None
) -> int:
    """Measure the server at `url`, or one started with these settings. plan: names, runs, warm_up, seed."""
    if plan["runs"] < 1 or plan["warm_up"] < 0:
        raise ConfigError("--runs must be at least 1, and --warm-up at least 0")
    check_output(output)
    choose(plan["names"], plan["runs"])  # a wrong name is told before a server is started
    with own_server(settings, url) as (address, server):
        figures = asyncio.run(_measure(address, api_key, plan, server))
    print("\n".join(table(figures["workloads"])))
    if server is not None:
        figures["peak_mib"] = round(server.peak_bytes / MIB, 1)
        print(f"first token {figures['start_s']:.2f} s after the command; peak memory {figures['peak_mib']:,.0f} MiB")
    _write(output, figures)
    return 0


async def _measure(
    url: str, api_key: str | None, plan: dict[str, Any], server: LaunchedServer | None
) -> dict[str, Any]:
    client = CompletionClient(url, api_key)
    start_s = await server.ready(client) if server else None
    client.model = client.model or await _model_of(client)
    results: list[WorkloadFigures] = []
    with ProgressLine("bench") as line:
        for workload, runs in choose(plan["names"], plan["runs"]):
            result = await run_workload(
                client, workload, runs=runs, warm_up=plan["warm_up"], seed=plan["seed"],
                progress=lambda label, done, total: line.show(f"{label}: {done} of {total} requests", done / total),
            )  # fmt: skip
            results.append(result)
    facts = {
        "sayfa": __version__,
        "url": url,
        "model": client.model,
        "machine": platform.processor() or platform.machine(),
    }
    return {**facts, "cores": os.cpu_count(), "start_s": start_s, "seed": plan["seed"], "workloads": results}


async def _model_of(client: CompletionClient) -> str:
    try:
        return await client.first_model()
    except OSError as error:
        raise ConfigError(f"--url {client.url} cannot be reached: {why_unreachable(error)}") from None


@contextlib.contextmanager
def own_server(settings: Settings, url: str | None) -> Iterator[tuple[str, LaunchedServer | None]]:
    """The address of the server to use: `url`, or one that is started for the time of the block."""
    if url is not None:
        yield url, None
        return
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sayfa-") as folder:
        config = Path(folder) / "settings.yaml"
        config.write_bytes(_as_yaml(settings, port))
        end_politely()
        # Settings are complete in the file; variables would win over it and are left out.
        clean = {name: None for name in os.environ if name.startswith(PREFIX)}
        server = LaunchedServer(
            [sys.executable, "-m", "sayfa", "serve", "--config", str(config)], Path(folder) / "log", clean
        )
        try:
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.stop()


def _as_yaml(settings: Settings, port: int) -> bytes:
    """The engine's parts as a settings file; JSON is YAML."""
    values: dict[str, Any] = {}
    for part in (settings.model, settings.cache, settings.scheduler, settings.parallel):
        for name, value in msgspec.structs.asdict(part).items():
            if value not in (None, []):
                values[name.replace("_", "-")] = value
    return msgspec.json.encode({**values, "port": port, "log-requests": False})


def run_bench_paging(requests: int, tokens: int, max_model_len: int, seed: int, output: Path | None) -> int:
    """Compare the three ways of keeping memory and show the table."""
    from sayfa.bench.paging import PAGE_SIZE, compare_paging, paging_table

    if not (1 <= requests <= 100_000 and 64 <= max_model_len <= tokens <= 1 << 30):
        raise ConfigError("--requests must lie in [1, 100000], and 64 <= --max-model-len <= --tokens <= 2^30")
    check_output(output)
    with ProgressLine("paging") as line:
        results = compare_paging(
            requests,
            tokens,
            max_model_len,
            seed,
            lambda name, done, total: line.show(f"{name}: {done} of {total}", done / total),
        )
    print(
        f"{requests} requests, memory for {tokens:,} tokens in pages of {PAGE_SIZE}, sequences up to {max_model_len:,}"
    )
    print("\n".join(paging_table(results)))
    paged, contiguous = results[0], results[1]
    print(f"the same memory holds {paged.held_mean / contiguous.held_mean:.1f} times as many requests with pages")
    _write(output, {"requests": requests, "tokens": tokens, "max_model_len": max_model_len, "results": results})
    return 0


def _write(output: Path | None, figures: dict[str, Any]) -> None:
    if output is None:
        return
    write_output(output, msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
