"""Fuzz one parser guided by coverage; the targets are those of `test_parsers`. Needs atheris: `make fuzz` installs it.

    python tests/hostile/fuzz.py TARGET [libFuzzer's flags …]

What is found is written to build/fuzz/crash-*; `-runs=1 FILE` plays it again. An input over 250 ms counts as found.
"""

import sys
import time
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

with atheris.instrument_imports(include=["sayfa", "json", "yaml", "jinja2", "msgspec"]):
    from targets import TARGETS

INPUT_LIMIT_S = 0.25


def main() -> None:
    """Run until libFuzzer's own limits (`-max_total_time=60`) or the first finding."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit("\n".join(TARGETS) if name == "--list" else f"name a target: {', '.join(TARGETS)}")
    target, corpus = TARGETS[name], Path("build/fuzz") / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = corpus.with_suffix(".dict")
    words.write_text("".join(f'"{_spelled(word)}"\n' for word in target.words if word))

    def one(data: bytes) -> None:
        start_s = time.thread_time()
        try:
            target.run(data)
        except target.refusals:
            pass
        if time.thread_time() - start_s > INPUT_LIMIT_S:
            raise RuntimeError(f"an input took {time.thread_time() - start_s:.3f} s")

    atheris.Setup(
        [
            *sys.argv,
            f"-dict={words}",
            "-artifact_prefix=build/fuzz/",
            "-max_len=65536",
            "-rss_limit_mb=2048",
            str(corpus),
        ],
        one,
    )
    atheris.Fuzz()


def _spelled(word: bytes) -> str:
    return "".join(chr(byte) if 32 < byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
