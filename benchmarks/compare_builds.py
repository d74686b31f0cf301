"""Times the native step with two builds of the library, turn by turn: what a change to a kernel brought, at each width.

    cp src/sayfa/_native*.so before.so; …the change, `make native`…
    python benchmarks/compare_builds.py before.so src/sayfa/_native*.so MODEL-q4_0.gguf MODEL-bf16.gguf [--turns 4]

Prints medians over the turns of `bench_step.py`'s best times. Nothing else may run on the machine meanwhile.
"""

import argparse
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

BENCH_STEP = Path(__file__).with_name("bench_step.py")
# The library is chosen before anything imports it: an installed package would come before any path of ours.
RUN_WITH_LIBRARY = """
import importlib.util, runpy, sys
import sayfa
library, script = sys.argv[1], sys.argv[2]
spec = importlib.util.spec_from_file_location("sayfa._native", library)
sayfa._native = sys.modules["sayfa._native"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sayfa._native)
sys.argv[:] = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""
LINE = re.compile(r"(?P<what>\S.*?)\s+median\s.*best\s+(?P<best>[\d.]+) ms.*\[(?P<parts>.*)\]")


def run_step(library: Path, model: Path, flags: list[str]) -> dict[str, tuple[float, float]]:
    """One turn: milliseconds of each measured step, whole and in its weight products."""
    command = [sys.executable, "-c", RUN_WITH_LIBRARY, str(library), str(BENCH_STEP), str(model), *flags]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {}
    for line in filter(None, map(LINE.match, text.splitlines())):
        parts = dict(part.rsplit(" ", 1) for part in line["parts"].split("  "))
        found[line["what"]] = (float(line["best"]), float(parts.get("linear", 0)))
    return found


def main() -> None:
    """Take turns, model by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rows", default=["1", "8", "32"], nargs="*")
    parser.add_argument("--context", default=["192"], nargs="*")
    parser.add_argument("--prefill", default=["128", "512"], nargs="*")
    wish = parser.parse_args()
    flags = ["--rows", *wish.rows, "--context", *wish.context, "--prefill", *wish.prefill, "--repeats", "12"]
    libraries = [wish.before.resolve(), wish.after.resolve()]
    print("| | before, ms (weight products) | after | ratio |\n|---|---|---|---|")
    for model in wish.models:
        times: dict[str, list[list[tuple[float, float]]]] = defaultdict(lambda: [[], []])
        for turn in range(wish.turns):
            for number in (0, 1) if turn % 2 == 0 else (1, 0):
                for what, measured in run_step(libraries[number], model, flags).items():
                    times[what][number].append(measured)
        for what, both in times.items():
            before, after = ([statistics.median(column) for column in zip(*turns, strict=True)] for turns in both)
            told = [f"{whole:.2f} ({linear:.2f})" for whole, linear in (before, after)]
            print(f"| {model.stem}, {what} | {told[0]} | {told[1]} | {after[0] / before[0]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
