"""The attention layer: one fused q/k/v product, optional head norms, rotary turn, paged attention, output product.

Called by the model files; one object serves all layers of a model, because they share the two activation buffers.
"""

from dataclasses import dataclass

from sayfa.base.model_config import ModelConfig
from sayfa.nn.program.program import (
    Attention,
    Buffer,
    HeadNorm,
    KvWrite,
    Linear,
    ProgramBuilder,
    Rope,
    RopeTable,
    Vector,
    View,
    Weight,
)


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """One layer's weights. qkv [(num_heads + 2 * num_kv_heads) * D, H], out [H, num_heads * D]; norms [D]."""

    qkv: Weight
    out: Weight
    qkv_bias: Vector | None = None
    out_bias: Vector | None = None
    q_norm: Vector | None = None
    k_norm: Vector | None = None


class AttentionLayer:
    """Lays down attention for any layer of one model."""

    def __init__(self, builder: ProgramBuilder, config: ModelConfig) -> None:
        query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = builder.buffer("qkv", query_width + 2 * kv_width)
        self._builder = builder
        self._config = config
        self._qkv = qkv
        self._query = View(qkv, 0, query_width)
        self._key = View(qkv, query_width, kv_width)
        self._value = View(qkv, query_width + kv_width, kv_width)
        self._heads = builder.buffer("heads", query_width)

    def lay(self, layer: int, x: Buffer, weights: AttentionWeights, rope: RopeTable, out: Buffer, *, add: bool) -> None:
        """out = attention(x), or out += the same if `add` (the residual stream)."""
        config, builder = self._config, self._builder
        builder.add(Linear(x, weights.qkv, self._qkv, weights.qkv_bias))
        if weights.q_norm is not None and weights.k_norm is not None:
            builder.add(HeadNorm(self._query, config.num_heads, weights.q_norm, config.norm_eps))
            builder.add(HeadNorm(self._key, config.num_kv_heads, weights.k_norm, config.norm_eps))
        builder.add(Rope(self._query, config.num_heads, rope))
        builder.add(Rope(self._key, config.num_kv_heads, rope))
        builder.add(KvWrite(self._key, self._value, layer))
        builder.add(
            Attention(self._query, self._heads, layer, config.num_heads, config.attention_scale, config.windows[layer])
        )
        builder.add(Linear(self._heads, weights.out, out, weights.out_bias, add=add))
