"""Tensor names → the matrices and vectors that a model file asks for by role. Matrices stay in the file's map.

Called by the model files through `Weights`. Knows the two naming schemes (Hugging Face, GGUF), checks every shape
against the model's facts, and at the end that no tensor of the file was left unread: an unread bias would be a silently
wrong model.
"""

import numpy as np

from sayfa.base.errors import ModelError
from sayfa.base.model_config import ModelConfig
from sayfa.models.formats.dequant import dequantize
from sayfa.models.formats.source import TensorSource
from sayfa.nn.layers.attention import AttentionWeights
from sayfa.nn.program.program import Vector, Weight, WeightPiece

# role → name in a Hugging Face folder (after the prefix that all its tensors share), name in a GGUF file
_MODEL_NAMES = {
    "embedding": ("embed_tokens.weight", "token_embd.weight"),
    "last_norm": ("norm.weight", "output_norm.weight"),
}
_HEAD_NAMES = ("lm_head.weight", "output.weight")
_LAYER_NAMES = {
    "attention_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "out": ("self_attn.o_proj.weight", "attn_output.weight"),
    "q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "out_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
}
# Gemma 3 puts a norm on both sides of each part, and Hugging Face then uses the same name for another place.
_POST_NORM_NAMES = _LAYER_NAMES | {
    "attention_post_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "mlp_norm": ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    "mlp_post_norm": ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
}
# Read elsewhere (rope facts), derived (old rotary caches), or of the vision part, which text does not use.
_IGNORED_ENDS = ("rope_freqs.weight", "rotary_emb.inv_freq")
_IGNORED_STARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")

_COMPARED_BYTES = 16 << 20


class Weights:
    """Roles of one checkpoint. Raises ModelError naming the tensor that is missing, unread or of the wrong shape."""

    def __init__(self, source: TensorSource, config: ModelConfig) -> None:
        self._source = source
        self._config = config
        self._names = set(source.names())
        self._layer_names = _POST_NORM_NAMES if config.post_norms else _LAYER_NAMES
        self._is_gguf = _MODEL_NAMES["embedding"][1] in self._names
        self._prefix = "" if self._is_gguf else self._find_prefix()
        self._read: set[str] = set()
        self._pieces: dict[str, WeightPiece] = {}

    def matrix(self, role: str, layer: int | None = None) -> Weight:
        """One matrix as the file holds it."""
        return Weight((self._piece(role, layer),))

    def stack(self, *roles: str, layer: int) -> Weight:
        """Matrices that read the same input, stacked along their output features."""
        return Weight(tuple(self._piece(role, layer) for role in roles))

    def head(self) -> Weight:
        """The language-model head [V, H]; the embedding itself where the two are tied.

        A file may say that they are tied and hold a head all the same: one with other numbers is used, as transformers
        does, and a copy of the embedding is not kept twice. A head that is neither stored nor tied is refused, where
        transformers draws a random one and warns.
        """
        name = self._name("head", None)
        if name not in self._names:
            if self._config.tie_embeddings:
                return self.matrix("embedding")
            raise ModelError(
                f"{self._config.name}: the head {name!r} is missing from the weight files, and config.json does not "
                "say `tie_word_embeddings: true`; say so if the embedding is the head, else add the file that holds it"
            )
        head = self._piece("head", None)
        if self._config.tie_embeddings and _are_same(head, self._piece("embedding", None)):
            return self.matrix("embedding")
        return Weight((head,))

    def norm(self, role: str, layer: int | None = None) -> Vector:
        """A norm's weight, float32, with Gemma's stored minus one undone."""
        stored = self._vector(role, layer)
        return stored + np.float32(1) if self._config.norm_plus_one else stored

    def attention(self, layer: int) -> AttentionWeights:
        """All of one attention layer, with the biases and head norms that the facts promise."""
        qkv_bias = out_bias = q_norm = k_norm = None
        if self._config.attention_bias:
            qkv_bias = np.concatenate([self._vector(role, layer) for role in ("q_bias", "k_bias", "v_bias")])
            # Qwen 2 has none there: one in its file stays unread, which is refused at the end.
            if self._config.architecture != "qwen2" and self._name("out_bias", layer) in self._names:
                out_bias = self._vector("out_bias", layer)
        if self._config.qk_norm:
            q_norm, k_norm = self.norm("q_norm", layer), self.norm("k_norm", layer)
        qkv, out = self.stack("q", "k", "v", layer=layer), self.matrix("out", layer)
        return AttentionWeights(qkv, out, qkv_bias, out_bias, q_norm, k_norm)

    def check_all_read(self) -> None:
        """Raise ModelError if the file has a tensor that no layer asked for."""
        unread = sorted(
            name
            for name in self._names - self._read
            if not name.endswith(_IGNORED_ENDS) and not name.startswith(_IGNORED_STARTS)
        )
        if unread:
            raise ModelError(
                f"{self._config.name}: {len(unread)} tensors have no place in a {self._config.architecture} model, the "
                f"first is {unread[0]!r}; the checkpoint is of another kind than its configuration says"
            )

    # ------------------------------------------------------------------------------------------- names

    def _find_prefix(self) -> str:
        """What stands before `embed_tokens.weight`: "model." mostly, longer where text is a part of a larger model."""
        ending = _MODEL_NAMES["embedding"][0]
        found = [name for name in self._names if name == ending or name.endswith("." + ending)]
        if len(found) != 1:
            raise ModelError(
                f"{self._config.name}: needs exactly one tensor named *.{ending} (or {_MODEL_NAMES['embedding'][1]}), "
                f"but the weight files have {len(found)}"
            )
        return found[0][: -len(ending)]

    def _name(self, role: str, layer: int | None) -> str:
        scheme = 1 if self._is_gguf else 0
        if role == "head":
            ending = _HEAD_NAMES[scheme]
            found = [name for name in self._names if name == ending or name.endswith("." + ending)]
            return found[0] if len(found) == 1 else ending
        if layer is None:
            return self._prefix + _MODEL_NAMES[role][scheme]
        place = f"blk.{layer}." if self._is_gguf else f"{self._prefix}layers.{layer}."
        return place + self._layer_names[role][scheme]

    # ------------------------------------------------------------------------------------------- reading

    def _expected_shape(self, role: str) -> tuple[int, ...]:
        c = self._config
        query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        matrices = {
            "embedding": (c.vocab_size, c.hidden_size), "head": (c.vocab_size, c.hidden_size),
            "q": (query, c.hidden_size), "k": (kv, c.hidden_size), "v": (kv, c.hidden_size),
            "out": (c.hidden_size, query),
            "gate": (c.intermediate_size, c.hidden_size), "up": (c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }  # fmt: skip
        vectors = {"q_bias": query, "k_bias": kv, "v_bias": kv, "q_norm": c.head_dim, "k_norm": c.head_dim}
        return matrices.get(role) or (vectors.get(role, c.hidden_size),)

    def _checked(self, role: str, layer: int | None) -> tuple[str, tuple[int, ...], str]:
        name = self._name(role, layer)
        if name not in self._names:
            raise ModelError(f"{self._config.name}: the tensor {name!r} is missing from the weight files")
        shape, kind = self._source.info(name)
        expected = self._expected_shape(role)
        if shape != expected:
            raise ModelError(
                f"{self._config.name}: the tensor {name!r} has shape {list(shape)}, but the configuration asks for "
                f"{list(expected)}; the two do not belong together"
            )
        self._read.add(name)
        return name, shape, kind

    def _piece(self, role: str, layer: int | None) -> WeightPiece:
        name, shape, kind = self._checked(role, layer)
        if name not in self._pieces:
            self._pieces[name] = WeightPiece(name, shape[0], shape[1], kind, self._source.read(name))
        return self._pieces[name]

    def _vector(self, role: str, layer: int | None) -> Vector:
        name, shape, kind = self._checked(role, layer)
        return np.array(dequantize(self._source.read(name), kind, shape), np.float32)


def _are_same(one: WeightPiece, other: WeightPiece) -> bool:
    """Whether two matrices hold the same bytes; they are compared in parts, so that little memory is taken."""
    if (one.type, one.rows, one.columns) != (other.type, other.rows, other.columns):
        return False
    parts = [slice(at, at + _COMPARED_BYTES) for at in range(0, one.data.nbytes, _COMPARED_BYTES)]
    return all(np.array_equal(one.data[part], other.data[part]) for part in parts)
