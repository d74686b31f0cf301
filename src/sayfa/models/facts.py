"""Typed, range-checked reading of a model's facts, whether they come from config.json or from GGUF metadata.

Called by `models.config_hf` and `models.config_gguf`. Every number is checked before anything is built from it, and
each refusal names the model, the field, the value and the range (threat T07).
"""

from collections.abc import Mapping
from typing import Any

from sayfa.base.errors import ModelError

Range = tuple[float, float]

# Closed ranges by meaning; both readers use them, `ModelConfig.check` repeats those that it knows.
SIZE: Range = (1, 1_048_576)
COUNT: Range = (1, 1_024)
CONTEXT: Range = (1, 100_000_000)
WINDOW: Range = (1, 100_000_000)
EPS: Range = (1e-12, 1.0)
THETA: Range = (1.0, 1e12)
FACTOR: Range = (1e-3, 1e6)

_MISSING: Any = object()


class Facts:
    """A named mapping of facts. `prefix` is put before field names in messages and keys (a GGUF architecture)."""

    def __init__(self, model: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.model = model
        self._values = values
        self._prefix = prefix

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(self._prefix + field) is not None

    def states_null(self, field: str) -> bool:
        """Whether the field is there and null: that is a statement where a missing field has a default."""
        return self._prefix + field in self._values and not self.has(field)

    def stated(self) -> dict[str, Any]:
        """The fields that are there and not null, with their values; of facts without a prefix."""
        return {field: value for field, value in self._values.items() if value is not None}

    def raw(self, field: str) -> Any:
        """The value as it stands, None if it is absent."""
        return self._values.get(self._prefix + field)

    def error(self, field: str, problem: str) -> ModelError:
        """A refusal that names the model and the field."""
        return ModelError(f"{self.model}: {self._prefix}{field} {problem}")

    def _get(self, field: str, default: Any) -> Any:
        value = self.raw(field)
        if value is None:
            if default is _MISSING:
                raise self.error(field, "is missing, but this kind of model needs it")
            return default
        return value

    def integer(self, field: str, bounds: Range, default: Any = _MISSING) -> int:
        """A whole number within the closed range. Raises ModelError for booleans, fractions and everything else."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not bounds[0] <= value <= bounds[1]:
            raise self.error(field, f"is {_shown(value)}; it must be a whole number in [{bounds[0]}, {bounds[1]}]")
        return value

    def number(self, field: str, bounds: Range, default: Any = _MISSING) -> float:
        """A finite number within the closed range."""
        value = self._get(field, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not bounds[0] <= value <= bounds[1]:  # false for NaN and infinities too
            raise self.error(field, f"is {_shown(value)}; it must be a number in [{bounds[0]}, {bounds[1]}]")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"is {_shown(value)}; it must be true or false")
        return value

    def text(self, field: str, default: Any = _MISSING) -> str:
        """A string."""
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self.error(field, f"is {_shown(value)}; it must be a string")
        return value

    def part(self, field: str) -> "Facts":
        """A mapping inside this one; empty if it is absent."""
        value = self.raw(field)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(field, f"is {_shown(value)}; it must be an object")
        return Facts(f"{self.model}: {field}", value)

    def with_defaults(self, model: str, defaults: Mapping[str, Any]) -> "Facts":
        """The same facts under another model's name, with values for fields that are absent; a null stays a null."""
        return Facts(model, {**defaults, **self._values}, self._prefix)

    def refuse_if(self, field: str, why: str) -> None:
        """Raise ModelError if the field is there and says anything but null, false or zero."""
        value = self.raw(field)
        if value is not None and value is not False and value != 0:
            raise self.error(field, f"is {_shown(value)}: {why}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
