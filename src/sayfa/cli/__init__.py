"""The command `sayfa`: the outer composition root. It may import every room, and does so only when a command runs.

Imported by nobody. `main` turns each error that was raised on purpose into one clear last line and an exit code: 0
done, 1 the engine or a request failed, 2 the command line, a setting or the model is wrong.
"""

import os
import sys
from collections.abc import Sequence

from sayfa.base.errors import ConfigError, ModelError, SayfaError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:  # around the imports, too: they are most of a start's first seconds, in which Ctrl-C may come
        from sayfa.base.log import keep_standard_descriptors
        from sayfa.cli.app import make_app
        from sayfa.cli.output import take_any_text

        keep_standard_descriptors()
        take_any_text()
        result = make_app()(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()  # a disk that is full tells only now, and the interpreter's own end would tell it badly
        return result if isinstance(result, int) else 0
    except (ConfigError, ModelError) as error:
        return _fail(error, 2)
    except SayfaError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, e.g. `sayfa plugins | head -1`
        _leave_stdout()
        return 0
    except OSError as error:
        _leave_stdout()
        return _fail(SayfaError(f"the operating system refused: {error}"), 1)


def _leave_stdout() -> None:
    """Let what is still unwritten go nowhere, or the interpreter would try it again at its end."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def _fail(error: SayfaError, code: int) -> int:
    from sayfa.cli.output import tell

    tell(f"sayfa: error: {error}\n")
    return code
