"""Try the breaks of `breaks`: the tests that are named there must notice them. Tests of the tests.

    python tests/hostile/mutants.py [WORD ...]      all of them, or those with the words in their name

The package is copied as links with one file broken, and the named test runs over the copy in another process; so do the
servers that it starts. A test that then passes is worthless; one that fails for another reason than the break proves
nothing either. What bounds a run is the time of the processor: a busy machine, or one that stops it, breaks nothing.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from breaks import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sayfa"
CPU_LIMIT_S = 120
WALL_LIMIT_S = 1800
"""Of one test in the copy; only where everything stands still without computing it is reached."""
# An editable install finds the package before the search path does; this takes it out of the way, in every process.
_SITE = 'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "sayfa" not in type(f).__module__]\n'


class Verdict(NamedTuple):
    """noticed: the test failed, and said what it should. why: the lines that failed, and what is wrong with them."""

    noticed: bool
    passed: bool
    why: str
    said: str


def broken_text(mutant: Mutant) -> str:
    """The file's text with its break. Raises ValueError if the place is gone, or is there twice."""
    text = (PACKAGE / mutant.file).read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds {text.count(mutant.old)} times {mutant.old!r}, not once")
    return text.replace(mutant.old, mutant.new)


def break_package(mutant: Mutant, folder: Path) -> Path:
    """Make a copy of the package in `folder` whose files are links, except for the broken one."""
    source = folder / "src"
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".so", ".html"):
            link = source / "sayfa" / path.relative_to(PACKAGE)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    broken = source / "sayfa" / mutant.file
    broken.unlink()
    broken.write_text(broken_text(mutant), "utf-8")
    (source / "sitecustomize.py").write_text(_SITE)
    return source


def notice(mutant: Mutant, folder: Path) -> Verdict:
    """Run the mutant's test over a broken package."""
    source = break_package(mutant, folder)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout",
               "-o", f"timeout={WALL_LIMIT_S}", "--basetemp", str(folder / "temp"), f"tests/{mutant.test}"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Importing the other plugins takes two thirds of a run's time.
    environment |= {"PYTHONPATH": str(source), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WALL_LIMIT_S, check=False,
        preexec_fn=_bound,
    )  # fmt: skip
    why = "\n".join(line[1:].strip() for line in done.stdout.splitlines() if line[:2] in ("E ", "> "))
    noticed = done.returncode == 1 and re.search(mutant.told, why) is not None
    passed = done.returncode == 0 and re.search(r"\b1 passed", done.stdout) is not None
    return Verdict(noticed, passed, why, done.stdout[-3000:] + done.stderr[-1000:])


def _bound() -> None:
    """In the new process, and so in all that it starts."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 5))


def main(words: list[str]) -> int:
    """Try them one after another, and print a line for each."""
    unnoticed = 0
    for mutant in MUTANTS:
        if words and not any(word in mutant.name for word in words):
            continue
        before_s = _children_s()
        with tempfile.TemporaryDirectory() as folder:
            verdict = notice(mutant, Path(folder))
        unnoticed += not verdict.noticed
        told = next((line for line in verdict.why.splitlines() if re.search(mutant.told, line)), verdict.said)
        print(
            f"| {'noticed' if verdict.noticed else 'NOT NOTICED'} | {mutant.name} | {mutant.test} | "
            f"{_children_s() - before_s:.1f} s | {told[:160] if verdict.noticed else told} |", flush=True,
        )  # fmt: skip
    return 1 if unnoticed else 0


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    began_s = time.monotonic()
    code = main(sys.argv[1:])
    print(f"{time.monotonic() - began_s:.0f} s in all")
    sys.exit(code)
