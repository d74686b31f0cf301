"""The command `sayfa`: the outer composition root. It may import every room, and does so only when a command runs.

Imported by nobody. `main` turns each error that was raised on purpose into one clear last line and an exit code: 0
done, 1 the engine or a request failed, 2 the command line, a setting or the model is wrong.
"""

import sys
from collections.abc import Sequence

from sayfa.base.errors import ConfigError, ModelError, SayfaError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    from sayfa.cli.app import make_app

    try:
        result = make_app()(sys.argv[1:] if arguments is None else list(arguments))
        return result if isinstance(result, int) else 0
    except (ConfigError, ModelError) as error:
        return _fail(error, 2)
    except SayfaError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, e.g. `sayfa plugins | head -1`
        sys.stderr.close()
        return 0


def _fail(error: SayfaError, code: int) -> int:
    print(f"sayfa: error: {error}", file=sys.stderr)
    return code
