"""Sayfa: an LLM inference and serving engine. The public face: `LLM`, `SamplingParams`, outputs and errors.

Importing it loads nothing heavy; `LLM` is looked up when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sayfa.base.errors import ConfigError, EngineError, InvalidRequest, ModelError, Overloaded, SayfaError
from sayfa.base.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sayfa.llm import LLM, Answer, RequestOutput, TokenChoice, Usage

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Answer",
    "ConfigError",
    "EngineError",
    "InvalidRequest",
    "ModelError",
    "Overloaded",
    "RequestOutput",
    "SamplingParams",
    "SayfaError",
    "TokenChoice",
    "Usage",
    "__version__",
]

_LAZY = {"LLM", "Answer", "RequestOutput", "TokenChoice", "Usage"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module("sayfa.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
