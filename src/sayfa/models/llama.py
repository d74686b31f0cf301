"""Llama 2 and 3, Mistral and SmolLM: pre-norm blocks, grouped-query attention, rotary positions, SiLU-gated MLP.

Sources: Touvron et al., LLaMA (2023); Dubey et al., The Llama 3 Herd of Models (2024); Jiang et al., Mistral 7B (2023),
which adds a sliding window to each layer.
"""

from sayfa.base.model_config import ModelConfig
from sayfa.models.weights import Weights
from sayfa.nn.layers.attention import AttentionLayer
from sayfa.nn.layers.ends import lay_embedding, lay_head
from sayfa.nn.layers.mlp import GatedMlp
from sayfa.nn.layers.rotary import rope_table
from sayfa.nn.program.program import KvSpec, Program, ProgramBuilder, RmsNorm


def build(config: ModelConfig, weights: Weights, num_positions: int) -> Program:
    """Describe the model. Positions up to `num_positions` can be served. Also the skeleton of Qwen 2 and 3."""
    builder = ProgramBuilder(KvSpec(config.num_layers, config.num_kv_heads, config.head_dim))
    ropes = [rope_table(rope, num_positions) for rope in config.ropes]
    stream = lay_embedding(builder, config, weights.matrix("embedding"))
    normed = builder.buffer("normed", config.hidden_size)
    attention = AttentionLayer(builder, config)
    mlp = GatedMlp(builder, config)
    for layer in range(config.num_layers):
        rope = ropes[config.rope_of_layer[layer]]
        builder.add(RmsNorm(stream, weights.norm("attention_norm", layer), config.norm_eps, normed))
        attention.lay(layer, normed, weights.attention(layer), rope, stream, add=True)
        builder.add(RmsNorm(stream, weights.norm("mlp_norm", layer), config.norm_eps, normed))
        mlp.lay(normed, weights.stack("gate", "up", layer=layer), weights.matrix("down", layer), stream, add=True)
    return lay_head(builder, config, stream, weights.norm("last_norm"), weights.head())
