"""An engine process over the fake engine with one armed fault point: arguments NAME NTH raise|kill MARK FD.

`raise` raises RuntimeError, `kill` is SIGKILL to itself. MARK is a file that is made when the point is armed; where it
is there already nothing is armed, so that the next process runs undisturbed.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from fakes.fake_engine import make_engine
from sayfa.base.config import EngineConfig
from sayfa.base.faults import armed
from sayfa.engine.engine import Engine
from sayfa.engine.process import Progress, run


def boom() -> None:
    raise RuntimeError("armed")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def build(config: EngineConfig, progress: Progress) -> Engine:
    return make_engine(max_num_seqs=4)


if __name__ == "__main__":
    name, nth, action, mark = sys.argv[1:5]
    with contextlib.ExitStack() as stack:
        if not Path(mark).exists():
            Path(mark).touch()
            stack.enter_context(armed(name, boom if action == "raise" else die, nth=int(nth)))
        sys.exit(run(sys.argv, build))
