"""The standard workloads: how many requests, how many at a time, how long; and prompts for them from a seed.

Called by `bench.load`. Knows no server. Prompts are common English words, nearly all of them one token in usual
vocabularies; what a server counted is reported beside them. Every run draws other words, so that no prompt of an
earlier run can be in a cache; only `prefix` shares a beginning, on purpose.
"""

import random

import msgspec

from sayfa.base.errors import ConfigError
from sayfa.base.settings import nearest

_WORDS = """
about above after again air all almost along always animal answer apple area arm around ask away baby back ball bank
base bear beautiful bed before began begin behind best better between big bird black blue boat body book both box boy
bread bring brother brown build burn business buy call came car care carry cat catch cause center change city class
clear close cold color come common complete cook cool copy corn correct cost count country course cover cross cut dark
day deep door down draw dream dress drink drive dry during each early earth east eat edge egg end energy enough even
ever every eye face fact fall family far farm fast father feel feet field fight final find fine fire first fish five
floor fly follow food foot form free friend front full game garden gave girl give glass gold good great green ground
group grow half hand happy hard hat head hear heart heat heavy help high hill hold home horse hot hour house hundred
idea inside island job join just keep kind king knew lake land language large last late laugh law lead leave left leg
letter life light line list little live long look lost love low machine main make many map mark market matter mean
measure meat metal mile milk mind minute money month moon morning mother mountain mouth move music name near need
never new next night north nose note nothing number ocean offer often oil old once only open order other page paint
paper part past pattern people person piece place plan plane plant play
"""
WORDS = _WORDS.split()


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """requests sent, at_once at a time; a prompt has `shared` words that all have and `own` ones; `out` tokens come."""

    name: str
    requests: int
    at_once: int
    shared: int
    own: int
    out: int
    about: str

    def prompts(self, seed: int, run: int) -> list[str]:
        """The prompts of one run: the same for the same seed and run, on every machine."""
        rng = random.Random(f"sayfa bench {self.name} {seed} {run}")
        start = rng.choices(WORDS, k=self.shared)
        return [" ".join(start + rng.choices(WORDS, k=self.own)) for _ in range(self.requests)]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(name="single", requests=2, at_once=1, shared=0, own=128, out=128, about="one reader at a time"),
        Workload(name="load8", requests=64, at_once=8, shared=0, own=128, out=128, about="eight at a time"),
        Workload(name="load32", requests=64, at_once=32, shared=0, own=128, out=128, about="thirty-two at a time"),
        Workload(name="long", requests=1, at_once=1, shared=0, own=1500, out=16, about="a long prompt"),
        Workload(name="prefix", requests=32, at_once=8, shared=1024, own=32, out=32, about="a common beginning"),
    )
}


def choose(names: list[str], runs: int) -> list[tuple[Workload, int]]:
    """(workload, runs) for names such as "load32" or "load32:5"; all for none. Raises ConfigError."""
    chosen = []
    for text in names or list(WORKLOADS):
        name, _, count = text.partition(":")
        if name not in WORKLOADS:
            raise ConfigError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}{nearest(name, WORKLOADS)}")
        if count and not (count.isascii() and count.isdigit() and 1 <= int(count) <= 1000):
            raise ConfigError(f"--workload {text}: the number of runs must lie in [1, 1000]")
        chosen.append((WORKLOADS[name], int(count) if count else runs))
    return chosen
