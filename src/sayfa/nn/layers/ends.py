"""Both ends of a decoder: token embedding at the start; last norm, row choice and language-model head at the end."""

from sayfa.base.model_config import ModelConfig
from sayfa.nn.program.program import Buffer, Embed, Gather, Linear, Program, ProgramBuilder, RmsNorm, Vector, Weight


def lay_embedding(builder: ProgramBuilder, config: ModelConfig, table: Weight) -> Buffer:
    """Make the residual stream [T, H] and fill it from the table [V, H]."""
    stream = builder.buffer("stream", config.hidden_size)
    builder.add(Embed(table, stream, config.embedding_scale))
    return stream


def lay_head(builder: ProgramBuilder, config: ModelConfig, stream: Buffer, norm: Vector, head: Weight) -> Program:
    """Keep the rows that want logits, norm them, multiply by the head [V, H], and close the program.

    The choice of rows comes first, so that neither norm nor head is paid for rows whose logits nobody reads.
    """
    chosen = builder.buffer("chosen", config.hidden_size, "logits")
    normed = builder.buffer("last_normed", config.hidden_size, "logits")
    logits = builder.buffer("logits", config.vocab_size, "logits")
    builder.add(Gather(stream, chosen))
    builder.add(RmsNorm(chosen, norm, config.norm_eps, normed))
    builder.add(Linear(normed, head, logits))
    return builder.finish(logits)
