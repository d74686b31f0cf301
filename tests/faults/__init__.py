"""F03: each named fault point is fired at its first, second, ... pass until it is passed no more."""
