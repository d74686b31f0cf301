"""The gated feed-forward layer: down(act(gate(x)) * up(x)), gate and up in one product. Called by the model files.

Idea: Shazeer, GLU Variants Improve Transformer (2020).
"""

from sayfa.base.model_config import ModelConfig
from sayfa.nn.program.program import ActMul, Buffer, Linear, ProgramBuilder, Weight


class GatedMlp:
    """Lays down the feed-forward part of any layer of one model; the layers share its two buffers."""

    def __init__(self, builder: ProgramBuilder, config: ModelConfig) -> None:
        self._builder = builder
        self._act = config.activation
        self._gate_up = builder.buffer("gate_up", 2 * config.intermediate_size)
        self._inner = builder.buffer("inner", config.intermediate_size)

    def lay(self, x: Buffer, gate_up: Weight, down: Weight, out: Buffer, *, add: bool) -> None:
        """out = mlp(x), or out += the same if `add`. gate_up [2F, H] (gate first), down [H, F]."""
        self._builder.add(Linear(x, gate_up, self._gate_up))
        self._builder.add(ActMul(self._gate_up, self._inner, self._act))
        self._builder.add(Linear(self._inner, down, out, add=add))
