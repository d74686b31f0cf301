"""F03: no point is left out. Each is fired in one stage at least, and each stage's test fails if one is not reached."""

from faults import points
from sayfa.base.faults import POINTS


def test_every_point_is_fired_somewhere():
    listed = {name for value in vars(points).values() if isinstance(value, tuple) for name in value if "." in name}
    listed |= {"wire.client_reads", "wire.client_writes"}
    assert listed == set(POINTS)


def test_there_are_enough_of_them():
    assert len(POINTS) >= 60
