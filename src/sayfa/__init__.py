"""Sayfa: an LLM inference and serving engine. The public face: `LLM`, `SamplingParams`, outputs and errors."""

__version__ = "0.1.0"
