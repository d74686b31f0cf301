"""`python -m sayfa.engine FD`: the engine process with a real model. See `engine.process`."""

import os
import sys
import time

_begun_s = time.monotonic()
# numpy would start a pool of threads for products that this process never makes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from sayfa.base.config import EngineConfig  # noqa: E402 - the imports are what is timed
from sayfa.engine.build import build_engine  # noqa: E402
from sayfa.engine.engine import Engine  # noqa: E402
from sayfa.engine.process import Progress, run  # noqa: E402


def build(config: EngineConfig, progress: Progress) -> Engine:
    """Build the engine with the imports as its first phase."""
    return build_engine(config, progress, before=[("imports", imports_s)])


imports_s = time.monotonic() - _begun_s

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], build))
