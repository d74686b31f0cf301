"""`python -m sayfa` is the command `sayfa`."""

import sys

from sayfa.cli import main

if __name__ == "__main__":
    sys.exit(main())
