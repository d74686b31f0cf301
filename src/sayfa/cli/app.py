"""The commands and their help. Everything behind a command is imported when it runs, so that `--help` is quick.

Called by `main`. Knows the names of the commands, not what they do.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from sayfa import __version__
from sayfa.cli.options import ConfigFile, Given, ServerKey, first_key, settings_from, with_settings

ENGINE_PARTS = ("model", "cache", "scheduler", "parallel")
ALL_PARTS = (*ENGINE_PARTS, "server")
Url = Annotated[str | None, Parameter(help="Address of a running server. Empty: one is started for this command.")]


def make_app() -> App:
    """The application with all its commands."""
    app = App(
        name="sayfa", version=__version__, version_flags=["--version", "-v"], help_format="plaintext",
        help="Sayfa serves language models: paged memory, continuous batching, OpenAI's API.",
        help_epilogue="Each flag is also a key of --config FILE and a variable SAYFA_…; a flag wins over a variable, a "
        "variable over the file.",
        result_action="return_value",
    )  # fmt: skip
    app.command(with_settings(serve, ALL_PARTS), name="serve")
    app.command(with_settings(generate, ENGINE_PARTS, model_first=False), name="generate")
    app.command(with_settings(chat, ENGINE_PARTS), name="chat")
    bench = App(name="bench", help="Measure a server, or what paging brings.", help_format="plaintext")
    bench.command(with_settings(bench_serve, ENGINE_PARTS), name="serve")
    bench.command(bench_paging, name="paging")
    app.command(bench)
    app.command(plugins)
    return app


def serve(
    given: Given,
    *,
    config: ConfigFile = None,
    check_config: Annotated[bool, Parameter(negative="", help="Print every setting with its source, and end.")] = False,
) -> int:
    """Serve a model over OpenAI's API."""
    from sayfa.cli.serve import check, run

    settings = settings_from(given, config)
    return check(settings) if check_config else run(settings)


def generate(
    given: Given,
    file: Annotated[
        Path | None,
        Parameter(
            help="JSONL file: each line a prompt string or an object with `prompt` or `messages` and sampling fields."
        ),
    ] = None,
    *,
    prompt: Annotated[
        list[str] | None, Parameter(name=["--prompt", "-p"], negative="", help="A prompt; may be given several times.")
    ] = None,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            help="Write results there as JSONL, in the "
            "prompts' order. Empty: text for prompts, JSONL for a file, on stdout.",
        ),
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, Parameter(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, Parameter(help="Keep the most likely tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, Parameter(help="Keep the k most likely tokens; 0: all.")] = 0,
    config: ConfigFile = None,
) -> int:
    """Answer prompts without a server, many at a time.

    A line of the file may hold `id` or `custom_id`, which its result has as `id`, and all sampling fields of the
    completions API; `logprobs` is a number, how many alternatives. A result has `index`, `text`, `finish_reason`,
    `usage`, `error` if it failed, and what was asked for: `logprobs` as in chat, `prompt_logprobs` as in the API, and
    with `n` above 1 all answers in `choices`.
    """
    from sayfa.cli.offline import run_generate

    wishes = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    return run_generate(settings_from(given, config), prompt or [], file, output, wishes)


def chat(
    given: Given,
    *,
    url: Annotated[
        str | None, Parameter(help="Address of a running server. Empty: the model runs in this process.")
    ] = None,
    api_key: ServerKey = None,
    system: Annotated[str | None, Parameter(help="What the model is told before the conversation.")] = None,
    max_tokens: Annotated[int, Parameter(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, Parameter(help="0 takes the most likely token.")] = 0.7,
    config: ConfigFile = None,
) -> int:
    """Talk to a model in the terminal."""
    from sayfa.cli.chat import run_chat

    wishes = {"max_tokens": max_tokens, "temperature": temperature}
    return run_chat(settings_from(given, config), url, first_key(api_key), system, wishes)


def bench_serve(
    given: Given,
    *,
    url: Url = None,
    api_key: ServerKey = None,
    workload: Annotated[
        list[str] | None,
        Parameter(
            name=["--workload", "-w"],
            negative="",
            help="single, load8, load32, "
            "long or prefix, each with a number of runs if wished (load32:5); may be given several times. "
            "Empty: all.",
        ),
    ] = None,
    runs: Annotated[int, Parameter(help="Measured runs of each workload; the median counts.")] = 3,
    warm_up: Annotated[int, Parameter(help="Runs before them that do not count.")] = 1,
    random_seed: Annotated[int, Parameter(help="Another number, other prompts.")] = 1,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"], help="Write all figures there as JSON.")] = None,
    config: ConfigFile = None,
) -> int:
    """Send standard workloads to an OpenAI-compatible server and report latency and throughput."""
    from sayfa.cli.benches import run_bench_serve

    plan = {"names": workload or [], "runs": runs, "warm_up": warm_up, "seed": random_seed}
    return run_bench_serve(settings_from(given, config), url, first_key(api_key), plan, output)


def bench_paging(
    *,
    requests: Annotated[int, Parameter(help="Requests of the mix, all there at the start.")] = 1024,
    tokens: Annotated[int, Parameter(help="Size of the memory, in tokens.")] = 65_536,
    max_model_len: Annotated[int, Parameter(help="Longest sequence; what contiguous memory reserves for each.")] = 4096,
    random_seed: Annotated[int, Parameter(help="Another number, another mix.")] = 1,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"], help="Write all figures there as JSON.")] = None,
) -> int:
    """Compare paged memory with contiguous reservation and static batching, on the real scheduler."""
    from sayfa.cli.benches import run_bench_paging

    return run_bench_paging(requests, tokens, max_model_len, random_seed, output)


def plugins() -> int:
    """List what can be named in settings, and where each comes from."""
    from sayfa.cli.plugins import print_plugins

    return print_plugins()
