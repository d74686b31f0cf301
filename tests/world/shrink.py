"""Make a failing history smaller, and keep it: `python -m world.shrink SEED [KIND ...]` prints a ready case.

Delta debugging (Zeller, Hildebrandt 2002) over the events, then over the numbers of each event and of the setting. A
smaller history counts only if it breaks the same law, which is told by the type of the failure and its first words.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from world.history import Call, History, Setting, random_history
from world.play import play

MAX_TRIES = 600
_WORDS = 3

Fails = Callable[[History], str | None]


def failure_of(history: History) -> str | None:
    """Play a history; return what kind of failure it is, None if all laws hold."""
    try:
        play(history)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        words = [word for word in str(error).split() if not any(char.isdigit() for char in word)]
        return f"{type(error).__name__} {' '.join(words[:_WORDS])}"
    return None


def shrink(history: History, fails: Fails = failure_of) -> History:
    """Return a history as small as can be found in MAX_TRIES plays that fails in the same way."""
    wanted = fails(history)
    if wanted is None:
        raise ValueError("this history does not fail")
    tries = 0

    def still(smaller: History) -> bool:
        nonlocal tries
        tries += 1
        return tries <= MAX_TRIES and fails(smaller) == wanted

    history = _fewer_events(history, still)
    changed = True
    while changed and tries < MAX_TRIES:
        changed = False
        for smaller in _simpler(history):
            if still(smaller):
                history, changed = smaller, True
                break
    return history


def _fewer_events(history: History, still: Callable[[History], bool]) -> History:
    size = max(1, len(history.events) // 2)
    while True:
        start, shorter = 0, False
        while start < len(history.events):
            events = history.events[:start] + history.events[start + size :]
            smaller = msgspec.structs.replace(history, events=events)
            if still(smaller):
                history, shorter = smaller, True
            else:
                start += size
        if size == 1 and not shorter:
            return history
        size = max(1, size // 2) if not shorter or size > 1 else 1


def _simpler(history: History) -> Iterator[History]:
    """Each history that has one number nearer to its default."""
    for changes in _simpler_fields(history.setting, Setting()):
        yield msgspec.structs.replace(history, setting=msgspec.structs.replace(history.setting, **changes))
    plain = Call(at_s=0.0, seed=0, prompt=[1], max_tokens=1)
    for index, event in enumerate(history.events):
        if not isinstance(event, Call):
            continue
        for changes in _simpler_fields(event, plain, keep=("at_s", "seed")):
            events = list(history.events)
            events[index] = msgspec.structs.replace(event, **changes)
            yield msgspec.structs.replace(history, events=events)


def _simpler_fields(record: Any, plain: Any, keep: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    for name in record.__struct_fields__:
        value, default = getattr(record, name), getattr(plain, name)
        if name in keep or value == default:
            continue
        yield {name: default}
        if isinstance(value, list) and len(value) > 1:
            yield {name: value[: len(value) // 2]}
        elif isinstance(value, int) and isinstance(default, int) and abs(value - default) > 1:
            yield {name: value - (value - default) // 2}


def main() -> None:
    """Shrink the history of a seed and print it; keep it as tests/world/cases/NAME.json."""
    history = random_history(int(sys.argv[1]), blows=tuple(sys.argv[2:]) or None)
    small = shrink(history)
    print(f"# {failure_of(small)}; from seed {sys.argv[1]}", file=sys.stderr)
    print(small.to_json())


if __name__ == "__main__":
    main()
