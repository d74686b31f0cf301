"""Gemma 3 (text): norms before and after each part, normed heads, GELU-gated feed-forward, local and global layers.

Five of six layers see a sliding window and turn by a rope of base 10,000; each sixth sees everything by a rope of base
1,000,000. The embedding is scaled by sqrt(hidden size). Source: Gemma Team, Gemma 3 Technical Report (2025).
"""

from sayfa.base.model_config import ModelConfig
from sayfa.models.weights import Weights
from sayfa.nn.layers.attention import AttentionLayer
from sayfa.nn.layers.ends import lay_embedding, lay_head
from sayfa.nn.layers.mlp import GatedMlp
from sayfa.nn.layers.rotary import rope_table
from sayfa.nn.program.program import Add, KvSpec, Program, ProgramBuilder, RmsNorm


def build(config: ModelConfig, weights: Weights, num_positions: int) -> Program:
    """Describe the model. Each part's answer is normed once more before it joins the residual stream."""
    builder = ProgramBuilder(KvSpec(config.num_layers, config.num_kv_heads, config.head_dim))
    ropes = [rope_table(rope, num_positions) for rope in config.ropes]
    eps = config.norm_eps
    stream = lay_embedding(builder, config, weights.matrix("embedding"))
    normed = builder.buffer("normed", config.hidden_size)
    answer = builder.buffer("answer", config.hidden_size)
    attention = AttentionLayer(builder, config)
    mlp = GatedMlp(builder, config)
    for layer in range(config.num_layers):
        rope = ropes[config.rope_of_layer[layer]]
        builder.add(RmsNorm(stream, weights.norm("attention_norm", layer), eps, normed))
        attention.lay(layer, normed, weights.attention(layer), rope, answer, add=False)
        builder.add(RmsNorm(answer, weights.norm("attention_post_norm", layer), eps, answer))
        builder.add(Add(stream, answer))
        builder.add(RmsNorm(stream, weights.norm("mlp_norm", layer), eps, normed))
        mlp.lay(normed, weights.stack("gate", "up", layer=layer), weights.matrix("down", layer), answer, add=False)
        builder.add(RmsNorm(answer, weights.norm("mlp_post_norm", layer), eps, answer))
        builder.add(Add(stream, answer))
    return lay_head(builder, config, stream, weights.norm("last_norm"), weights.head())
