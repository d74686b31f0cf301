"""Small breaks of the package, each of which the worlds must notice: tests of the tests.

A mutant is a text in a file of the package and what takes its place. `notice` copies the package as links, breaks that
one file in the copy and plays worlds over it in another process; a check that then passes is worthless.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sayfa"
MOST_SEEDS = 300
TIME_LIMIT_S = 500.0
_PROGRAM = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "sayfa" not in type(finder).__module__]
sys.path[:0] = sys.argv[1:3]
import sayfa
assert sayfa.__file__.startswith(sys.argv[1]), sayfa.__file__
from world.check import main
sys.argv[1:] = sys.argv[3:]
sys.exit(main())
"""


class Mutant(NamedTuple):
    """check: the kind of world that must notice (`world.check`)."""

    name: str
    file: str
    old: str
    new: str
    check: str = "any"


MUTANTS = (
    # pages and the deciding wing
    Mutant("a release is skipped", "core/roster.py", "self._cache.release(sequence, keep=keep)", "sequence.pages = []"),
    Mutant("a page is freed twice", "core/kv_cache.py", "self.pool.drop(page)",
           "self.pool.drop(page)\n            self.pool.drop(page)"),
    Mutant("the bound of the queue is off by one", "core/limits.py", "waiting.num_new >= limits.max_queued_requests",
           "waiting.num_new > limits.max_queued_requests"),
    Mutant("the tenant is left out of the salt", "server/context.py", "encode([tenant, caller_salt])",
           "encode([None, caller_salt])"),
    Mutant("a spoiled request's pages are kept", "core/roster.py", "keep=error is None", "keep=True", "numbers"),
    Mutant("a row's error is not told", "core/results.py",
           "outputs += self._roster.end(state, \"error\", now_s, error=result.error, code=result.error_code)",
           "pass"),
    Mutant("deadlines are never looked at", "core/scheduler.py", "self._expire(now_s)", "pass"),
    Mutant("a deadline is a tenth too early", "core/sequence.py", "arrival_s + request.deadline_s",
           "arrival_s + 0.9 * request.deadline_s", "clock"),
    Mutant("an ended request is not told", "core/scheduler.py",
           "self._roster.outputs += self._roster.end(state, \"deadline\", now_s)",
           "self._roster.end(state, \"deadline\", now_s)"),
    # the engine
    Mutant("an abort is forgotten", "engine/engine.py", "self._scheduler.abort(request_id, now_s, branches)", "pass"),
    Mutant("a failed step costs all its rows", "engine/blame.py", "if len(rows) == 1:\n", "if rows:\n"),
    Mutant("a failed step ends everybody", "engine/blame.py",
           "if len(rows) == 1:\n            sentence",
           "if len(rows) > 1:\n            return [each for row in rows for each in self._halve(step, [row], error)]\n"
           "        if len(rows) == 1:\n            sentence"),
    Mutant("time is the calendar's", "engine/engine.py", "begun_s = self._clock.monotonic()\n        plan",
           "begun_s = self._clock.wall()\n        plan", "clock"),
    Mutant("a drain ends nobody", "engine/process.py", "return not self._engine.has_requests", "return False"),
    # the wire
    Mutant("a wake-up is lost", "wire/streams.py", "behind[output.id] = box\n            box.wake()",
           "behind[output.id] = box"),
    Mutant("nobody who is paused goes on", "wire/streams.py", "                        self._resume(box)\n",
           "                        pass\n"),
    Mutant("a death is not told", "wire/process_client.py",
           "self._streams.fail_all(EngineDead)\n        self._quarantine", "self._quarantine"),
    Mutant("a reader that leaves aborts nothing", "wire/streams.py",
           "self._remove(request.id)\n                self._abort(request.id)", "self._remove(request.id)"),
    Mutant("a part of an answer is lost in silence", "wire/process_client.py",
           "self._streams.lose_all()\n            return", "return", "garble"),
    Mutant("a dead engine is not replaced", "wire/process_client.py", "self._run(self._restart)", "pass"),
    Mutant("a second engine is started", "wire/process_client.py", "code = await self._bury()", "code = 0"),
    Mutant("a stall is the others' silence", "base/clock.py",
           "min(self._clock.monotonic() - self._ticked_s, self._most_s)", "self._clock.monotonic() - self._ticked_s",
           "clock"),
    Mutant("a load that hangs is waited for", "wire/watch.py", "if silent_s > LOAD_STUCK_S or ", "if ", "loads"),
    Mutant("only news keep a load alive", "wire/watch.py", "silent_s = min(since_told_s, since_sign_s)",
           "silent_s = since_told_s", "loads"),
    Mutant("only the disk keeps a load alive", "wire/watch.py", "silent_s = min(since_told_s, since_sign_s)",
           "silent_s = since_sign_s", "loads"),
    Mutant("frames are cut wrongly", "wire/sockets.py", "and end > len(self._buffer):",
           "and end > len(self._buffer) + 1:"),
    # the server
    Mutant("a refusal is not booked", "server/books.py", "self._metrics.rejected(code)", "pass"),
    Mutant("an ending is booked twice", "server/books.py", "        self._open = False\n", ""),
    Mutant("a broken stream has no end mark", "server/sse.py", "b\"data: \" + body + b\"\\n\\n\" + DONE",
           "b\"data: \" + body + b\"\\n\\n\""),
    Mutant("nobody watches readers", "server/sse.py", "stream.give_up()\n", "pass\n"),
    Mutant("a stream is not left properly", "server/generate.py", "await _close(stream)", "pass"),
    Mutant("an admission is watched for ever", "server/generate.py",
           "self._context.admissions.forget(request.id)", "pass"),
    Mutant("the other prompts run on", "server/generate.py", "task.cancel()\n            await asyncio.gather",
           "pass\n            await asyncio.gather"),
    Mutant("later is said without saying when", "server/errors.py", "retry = RETRY_AFTER_S\n", "retry = None\n"),
    Mutant("a stop string is not looked for", "server/answer.py", "            params.stop,\n", "            (),\n"),
    Mutant("the deadline counts from the queue", "server/generate.py",
           "self._context.clock.monotonic() - self._record.arrived_s", "0.0", "clock"),
    # overload
    Mutant("retry-after is a constant", "engine/estimate.py",
           "return max(1, min(MAX_RETRY_S, math.ceil(wait_s / 2 * factor)))", "return 1", "overload"),
    Mutant("the hopeless are queued", "engine/engine.py", "if needed_s > deadline_s:", "if False:", "overload"),
    Mutant("keys take no turns", "core/policy.py", "        return start + state.request.priority * self.class_lead",
           "        return super().order(state)", "fairness"),
)  # fmt: skip


def break_package(mutant: Mutant, folder: Path) -> Path:
    """Make a copy of the package in `folder` whose files are links, except for the broken one."""
    target = folder / "src" / "sayfa"
    for path in PACKAGE.rglob("*.py"):
        link = target / path.relative_to(PACKAGE)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    text = (PACKAGE / mutant.file).read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds {text.count(mutant.old)} times {mutant.old!r}, not once")
    broken = target / mutant.file
    broken.unlink()
    broken.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    return folder / "src"


def notice(mutant: Mutant, folder: Path, most_seeds: int = MOST_SEEDS) -> str:
    """Play worlds over a broken package; return what was said about the first broken law, "" if all seemed well."""
    source = break_package(mutant, folder)
    command = [sys.executable, "-c", _PROGRAM, str(source), str(ROOT / "tests"), mutant.check, "0", str(most_seeds)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    return "" if done.returncode == 0 else (done.stdout or done.stderr)[-2000:]
