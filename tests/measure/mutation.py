"""Mutation scores of what must not be wrong, by the fast tests that belong to it: `make mutation` (hours on one core).

    python tests/measure/mutation.py [names of mutants, as `sayfa.core.page_pool*`]

mutmut breaks each line in each of its ways and runs the tests that reach it; a break that none of them notices
survives. Points where faults are put in are left alone: `tests/faults` goes to each of them. A break that makes a test
run on and on counts as noticed. So does one whose test was held up from outside: let the machine do nothing else.
Everything happens in build/mutation, and a second call goes on where the first one stopped; delete the folder to begin
anew.
"""

import ast
import difflib
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "mutation"
BAR = 0.85
NOTICED = {1: "failed", 3: "failed", 36: "ran on", -24: "ran on", 24: "ran on", 152: "ran on", 255: "ran on"}
"""mutmut's exit codes that mean that somebody noticed. Others: 0 survived, 33 and 5 nobody looks, None not tried."""
GROUPS = {
    "page pool": ("core/page_pool.py",),
    "prefix cache": ("core/kv_cache.py",),
    "scheduler": ("core/scheduler.py", "core/planner.py", "core/roster.py", "core/results.py", "core/waiting.py"),
    "stop strings": ("text/stop_strings.py",),
    "event streams": ("server/sse.py", "server/openai/chunks.py"),
}
_HISTORY = "tests/property/test_core_scheduler.py::test_random_histories_leak_nothing_and_change_no_answer[{}]"
TESTS = [
    "tests/unit/core", "tests/unit/server", "tests/unit/text/test_detokenizer.py",
    *(_HISTORY.format(seed) for seed in range(6)),
]  # fmt: skip
SETTINGS = {
    "source_paths": ["src/"],
    "only_mutate": [f"src/sayfa/{file}" for files in GROUPS.values() for file in files],
    "do_not_mutate_patterns": [r"\bfault\("],
    # No limits in seconds but mutmut's own: a test that takes long on a busy machine has noticed nothing.
    "pytest_add_cli_args": ["-q", "-p", "no:xdist", "-o", "timeout=0", "-k", "not does_not_grow"],
    "pytest_add_cli_args_test_selection": TESTS,
    "timeout_multiplier": 4.0,
    "timeout_constant": 2.0,
}


class Mutant(NamedTuple):
    """One break. how: how it was noticed, or "" if it was not; None if it was not tried yet."""

    name: str
    file: str
    how: str | None


def prepare() -> None:
    """Make the folder: links to sources and tests, and the project's settings with mutmut's behind them."""
    PLACE.mkdir(parents=True, exist_ok=True)
    for name in ("src", "tests"):
        if not (PLACE / name).is_symlink():
            (PLACE / name).symlink_to(ROOT / name)
    # What mutmut copied once it does not copy again, and old tests would be run.
    shutil.rmtree(PLACE / "mutants" / "tests", ignore_errors=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in SETTINGS.items()]
    text = (ROOT / "pyproject.toml").read_text() + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    (PLACE / "pyproject.toml").write_text(text)


def results() -> list[Mutant]:
    """Read what mutmut noted."""
    found = []
    for files in GROUPS.values():
        for file in files:
            noted = json.loads((PLACE / "mutants/src/sayfa" / f"{file}.meta").read_text())["exit_code_by_key"]
            for name, code in noted.items():
                found.append(Mutant(name, file, None if code is None else NOTICED.get(code, "")))
    return found


def change(mutant: Mutant) -> Iterator[str]:
    """Give the lines that the break took out and put in."""
    text = (PLACE / "mutants/src/sayfa" / mutant.file).read_text()
    name = mutant.name.rpartition(".")[2]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = {
        node.name: text.splitlines()[node.lineno : node.end_lineno]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and node.name in (name, name.rpartition("__mutmut_")[0] + "__mutmut_orig")
    }
    whole = [bodies[key] for key in sorted(bodies, key=lambda key: not key.endswith("_orig"))]
    yield from (line for line in difflib.unified_diff(*whole, n=0, lineterm="") if line[:2] not in ("--", "++", "@@"))


def score(mutants: list[Mutant]) -> float:
    """Return the part of the tried ones that was noticed."""
    tried = [mutant for mutant in mutants if mutant.how is not None]
    return sum(bool(mutant.how) for mutant in tried) / max(1, len(tried))


def main() -> None:
    """Break, test, and tell the scores and the survivors; exit with 1 below the bar."""
    prepare()
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", "1", *sys.argv[1:]]
    if subprocess.run(command, cwd=PLACE, check=False).returncode:
        sys.exit("mutmut could not run; the tests must pass before anything is broken")
    found, low = results(), []
    for group, files in GROUPS.items():
        mine = [mutant for mutant in found if mutant.file in files]
        for mutant in mine:
            if mutant.how == "":
                print(f"{mutant.name}:", *change(mutant), sep="\n    ")
        counts = Counter("not tried" if m.how is None else m.how or "survived" for m in mine)
        print(f"== {group}: {score(mine):.1%} of {len(mine) - counts['not tried']} are noticed ({dict(counts)})")
        low += [group] if score(mine) < BAR else []
    if low:
        sys.exit(f"below {BAR:.0%}: {', '.join(low)}")


if __name__ == "__main__":
    main()
