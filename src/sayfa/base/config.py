"""Settings in five frozen parts. One definition here serves the flag, the file key and the `SAYFA_…` variable.

A field `max_num_seqs` is the flag `--max-num-seqs`, the file key `max-num-seqs` and the variable `SAYFA_MAX_NUM_SEQS`.
Its annotation says what values are allowed, the text below it what it means, in which unit, and why the default is
what it is; `--help` prints that text. `base.settings` reads the sources; `engine.build` unpacks the engine's parts and
hands on the two or three values that each constructor uses; the server keeps its own part. Knows no command line, no
file format, no model.
"""

from typing import Annotated, Literal

import msgspec

GiB = 1 << 30


class Unit(msgspec.Struct, frozen=True):
    """What a number counts, and the closed range it must lie in.

    word: "tokens", "bytes", "seconds", "requests", … or "". Bytes may be written "4GiB", counts "4k" (4,000) or "4K"
    (4,096).
    """

    word: str
    low: float
    high: float


class Secret(msgspec.Struct, frozen=True):
    """Marks a value that is never printed."""


Tokens = Annotated[int, Unit("tokens", 2, 100_000_000)]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Model: what is served, and in which arithmetic."""

    model: str = "smollm2"
    """The model: a .gguf file, a folder in Hugging Face format, an alias (`smollm2`, the embedded one), or a hub id
    (fetched only because you named it)."""
    served_model_name: list[str] = []
    """Names that clients may use in `model`; the first one is shown. Empty: the name given to the command."""
    revision: str | None = None
    """Branch, tag or commit of a hub id. Empty: the hub's default."""
    offline: bool = False
    """Never ask the hub; a model that is not on this machine is refused. `HF_HUB_OFFLINE=1` does the same."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of weights that are not quantized. auto: as the checkpoint was stored (float16 counts as bfloat16)."""
    max_model_len: Tokens | None = None
    """Most tokens of prompt and answer together. Empty: the model's own maximum, at most 8192, since a model's
    maximum is seldom a sensible default for a machine."""
    seed: Annotated[int, Unit("", 0, 2**63 - 1)] | None = None
    """Start of the random numbers for requests that bring no seed of their own. Empty: drawn anew at each start."""
    chat_template: str | None = None
    """File with a Jinja chat template that takes the place of the model's own."""


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache: pages and their memory."""

    block_size: Literal[16, 32, 64] = 32
    """Tokens in a page. 32 is what the CPU kernels like best; smaller pages share prefixes more finely."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished requests, so that equal beginnings are computed once."""
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "int8"] = "auto"
    """How keys and values are stored. auto: bfloat16. int8 (one scale per token and head) holds almost twice as
    many."""
    kv_cache_memory: Annotated[int, Unit("bytes", 1 << 20, 1 << 50)] | None = None
    """Bytes for pages, e.g. 4GiB. Empty: `--kv-cache-memory-share` of the memory that is free after loading."""
    kv_cache_memory_share: Annotated[float, Unit("of free memory", 0.01, 0.95)] = 0.5
    """Part of the free memory taken for pages if `--kv-cache-memory` is not given. Half leaves room for neighbours;
    never more is taken than `--max-num-seqs` answers of `--max-model-len` tokens could use."""


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler: how much runs in a step, and who waits."""

    max_num_seqs: Annotated[int, Unit("sequences", 1, 4096)] = 64
    """Most sequences in one step. Each needs a row of buffers; beyond some 64 a small CPU gains nothing."""
    max_num_batched_tokens: Annotated[int, Unit("tokens", 16, 1_000_000)] = 512
    """Token budget of one step, prompts and answers together: larger makes long prompts faster, smaller keeps the gap
    between two tokens of the others short."""
    max_num_queued_reqs: Annotated[int, Unit("requests", 1, 1_000_000)] = 1024
    """Requests that may wait; one more is answered 503 with a Retry-After, before any work is done for it. A key may
    have no more in the queue than there are free places (429), so that one cannot fill it for all."""
    max_num_queued_tokens: Annotated[int, Unit("tokens", 1, 1_000_000_000)] = 1_000_000
    """Prompt tokens that may wait, over all requests."""
    scheduling_policy: Literal["fair", "priority", "fcfs", "static"] = "fair"
    """Who is next. fair: keys take turns by the tokens they use, so that one cannot crowd out the others; for one key,
    and between them, lower `priority` first, then first come, with aging so that nobody waits for ever. priority: the
    same without turns. fcfs: first come. static: a batch is filled, run to its end, then the next (to compare with)."""


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Execution: threads and kernels."""

    threads: Annotated[int, Unit("threads", 1, 1024)] | None = None
    """Threads that compute. Empty: the cores this process may use."""
    executor: Literal["auto", "native", "reference"] = "auto"
    """What runs the model. native: the C++ library. reference: plain torch, slow, for comparison. auto: native where
    it can, and a line at start that says why if it cannot."""
    isa: Literal["auto", "avx512bf16", "avx512", "avx2", "plain"] = "auto"
    """Instruction set of the native library. auto: the best this CPU has; naming one is for tests and measurements."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Server: address, access and limits."""

    host: str = "127.0.0.1"
    """Address to listen on. Another one than loopback needs `--api-key`, or `--insecure-no-auth`."""
    port: Annotated[int, Unit("", 0, 65535)] = 8000
    """TCP port; 0 takes a free one and prints it."""
    uds: str | None = None
    """Path of a Unix socket to listen on in place of host and port. Only the user who runs the server can open it."""
    api_key: Annotated[list[str], Secret()] = []
    """Keys that clients must send as `Authorization: Bearer …`; may be given several times, so that keys can be changed
    without a pause. At most 512 characters each, without commas. Empty: no key is asked for."""
    insecure_no_auth: bool = False
    """Serve without a key on an address that others can reach. You say that something else guards it."""
    protect_metrics: bool | None = None
    """Ask for the key on /metrics too; a scraper sends it as its bearer token. Empty: where other machines can reach
    the address."""
    cors_origins: list[str] = []
    """Web origins whose pages may call this server from a browser. Empty: none."""
    allowed_hosts: list[str] = []
    """Host names accepted in the Host header. Empty: with a loopback address localhost and 127.0.0.1 (which stops DNS
    rebinding), else any."""
    root_path: str = ""
    """Path prefix that a proxy in front strips, e.g. /llm."""
    ssl_certfile: str | None = None
    """Certificate chain for TLS (PEM)."""
    ssl_keyfile: str | None = None
    """Private key for TLS (PEM, without a password)."""
    max_body_bytes: Annotated[int, Unit("bytes", 1024, GiB)] = 10 << 20
    """Largest request body; a longer one is answered 413 while it is still arriving."""
    max_n: Annotated[int, Unit("answers", 1, 128)] = 16
    """Most answers (`n`, `best_of`) a request may ask for."""
    max_prompts: Annotated[int, Unit("prompts", 1, 4096)] = 256
    """Most prompts in the list of one completions request."""
    max_connections: Annotated[int, Unit("connections", 1, 1_000_000)] = 4096
    """Open connections; further ones are answered 503 and closed. Each costs a descriptor and some 50 kB."""
    max_connections_per_address: Annotated[int, Unit("connections", 1, 1_000_000)] = 512
    """Open connections from one address (of IPv6: its first 64 bits); further ones are answered 429 and closed, so that
    one machine cannot take them all. Loopback, Unix sockets and `--trusted-proxies` count in all only."""
    trusted_proxies: list[str] = []
    """Addresses or networks (10.0.0.0/8) of proxies in front, which bring the connections of many. What they forward
    about others is not read."""
    default_deadline: Annotated[float, Unit("seconds", 0.0, 1e7)] = 0.0
    """Seconds after which an unfinished answer is worthless, for requests that name no `deadline_s`. 0: none."""
    sse_keep_alive_interval: Annotated[float, Unit("seconds", 0.0, 3600.0)] = 0.0
    """Seconds of silence after which a stream gets a comment line, for proxies that cut quiet connections. 0: never."""
    shutdown_timeout: Annotated[float, Unit("seconds", 0.0, 86_400.0)] = 30.0
    """Seconds that running requests get to finish after SIGTERM. A second SIGTERM ends at once."""
    vllm_metric_names: bool = True
    """Show the metrics under vLLM's names too, so that dashboards, autoscalers and gateways made for it work
    unchanged."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important lines that are logged."""
    log_format: Literal["text", "json"] = "text"
    """text for people, json for collectors. Neither holds prompts, answers or keys."""
    log_requests: bool = True
    """One line for each finished request: id, counts, finish, and times that add up; and for what is refused at the
    door (no key, no such route, no HTTP) up to five a second: path, code, id and address."""
    log_stats_interval: Annotated[float, Unit("seconds", 0.0, 86_400.0)] = 10.0
    """Seconds between two lines of throughput and load; nothing is written while the server is idle. 0: never."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process needs; crosses to it as JSON. `model.model` is a path by then, resolved by the parent.

    It holds no server part: keys and addresses never reach the engine.
    """

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    parallel: ParallelOptions = ParallelOptions()
    log_level: str = "info"
    log_format: str = "text"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All five parts, and for each field where its value came from ("flag", "SAYFA_PORT", a file's name, "default")."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    parallel: ParallelOptions = ParallelOptions()
    server: ServerOptions = ServerOptions()
    origins: dict[str, str] = {}

    @property
    def engine(self) -> EngineConfig:
        """The parts that cross to the engine process."""
        return EngineConfig(
            model=self.model,
            cache=self.cache,
            scheduler=self.scheduler,
            parallel=self.parallel,
            log_level=self.server.log_level,
            log_format=self.server.log_format,
        )


PARTS: dict[str, type[msgspec.Struct]] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "parallel": ParallelOptions,
    "server": ServerOptions,
}
