"""Laws of the facts: each kind of model is read right, and whatever is wrong is refused with its field (T07)."""

import json
import random
from contextlib import suppress

import pytest

from fakes.models import FAMILIES, make_tiny
from sayfa.base.errors import ModelError, SayfaError
from sayfa.models.config import read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def read(tmp_path, config):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_config(tmp_path)


def test_facts_of_a_llama(tmp_path):
    config = read(tmp_path, {**LLAMA, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0})
    assert (config.architecture, config.head_dim, config.num_kv_heads, config.norm_eps) == ("llama", 16, 2, 1e-5)
    assert config.attention_scale == 0.25
    rope = config.ropes[0]
    assert (rope.scaling, rope.theta, rope.factor, rope.original_context) == ("llama3", 500000.0, 32.0, 8192)
    assert config.windows == [0] * 4


def test_old_and_new_spelling_of_the_rope_facts_mean_the_same(tmp_path):
    old = {**LLAMA, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new["rope_parameters"] = {**LLAMA3_ROPE, "rope_theta": 500000.0}
    assert read(tmp_path, old) == read(tmp_path, new)


def test_windows_of_each_family(tmp_path):
    """Mistral: all layers; Qwen 2: only if switched on, from a layer on; Gemma 3: five of six."""
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 24}
    assert read(tmp_path, mistral).windows == [24] * 4
    assert read(tmp_path, {**mistral, "sliding_window": None}).windows == [0] * 4
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 24, "max_window_layers": 3}
    assert read(tmp_path, qwen).windows == [0] * 4
    assert read(tmp_path, {**qwen, "use_sliding_window": True}).windows == [0, 0, 0, 24]
    assert read(tmp_path, {**qwen, "use_sliding_window": True, "sliding_window": None}).windows == [0] * 4
    gemma = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 512, "head_dim": 16}
    gemma |= {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6}
    config = read(tmp_path, gemma)
    assert config.windows == ([512] * 5 + [0]) * 2
    assert config.rope_of_layer == ([1] * 5 + [0]) * 2
    assert [rope.theta for rope in config.ropes] == [1e6, 1e4]


def test_gemmas_embedding_scale_is_rounded_where_the_checkpoint_is_bfloat16(tmp_path):
    """sqrt(640) = 25.298; a bfloat16 model was trained with 25.25."""
    gemma = {**LLAMA, "model_type": "gemma3_text", "hidden_size": 640, "sliding_window": 8, "hidden_act": None}
    assert read(tmp_path, {**gemma, "torch_dtype": "bfloat16"}).embedding_scale == 25.25
    assert read(tmp_path, {**gemma, "dtype": "float32"}).embedding_scale == pytest.approx(25.2982, abs=1e-4)


def test_text_part_of_a_larger_gemma_is_read(tmp_path):
    text = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 8, "hidden_act": None}
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    assert read(tmp_path, whole).vocab_size == 320


def test_a_larger_gemma_states_only_what_differs_from_the_familys_defaults(tmp_path):
    """The published 4B checkpoint names six fields of its text part."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = read(tmp_path, {**whole, "torch_dtype": "bfloat16"})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.windows.count(1024) == 29
    assert [(rope.theta, rope.factor) for rope in config.ropes] == [(1e6, 8.0), (1e4, 1.0)]
    assert config.embedding_scale == 50.5
    with pytest.raises(ModelError, match="sliding_window is null"):
        read(tmp_path, {**whole, "text_config": {**text, "sliding_window": None}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; known architectures: .*llama"),
        ({"model_type": None}, "model_type is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only language models"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 2**62}, "hidden_size is 4611686018427387904"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads"),
        ({"head_dim": 1}, "head_dim"),
        ({"vocab_size": 5_000_000}, "vocab_size is 5000000"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"max_position_embeddings": 1}, "max_context is 1; it must lie in \\[2, "),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": [1]}, "rope_theta is"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'; known rope scalings: default.*llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'; known rope scalings"),
        ({"rope_scaling": {"rope_type": "none"}}, "rope_type is 'none'; known rope scalings: default, linear, llama3"),
        ({"rope_parameters": {"type": "none"}}, "type is 'none'; known rope scalings: default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; known activations"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"transformers_weights": "b.safetensors"}, "transformers_weights is 'b.safetensors': .*model.safetensors"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"partial_rotary_factor": 0.05}, "partial_rotary_factor is 0.05"),
        ({"head_dim": 15}, "rotary_dim 15 must be even"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(tmp_path, change, words):
    with pytest.raises(ModelError, match=words):
        read(tmp_path, {**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["full_attention"]}, "one entry for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "'linear_attention'; known"),
        ({"sliding_window": None}, "layer_types holds 'sliding_attention', but sliding_window is null"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn'"),
    ],
)
def test_what_is_wrong_with_a_gemma_is_refused_with_its_field(tmp_path, change, words):
    gemma = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 8, "hidden_act": None}
    gemma["layer_types"] = ["sliding_attention"] * 3 + ["full_attention"]
    with pytest.raises(ModelError, match=words):
        read(tmp_path, {**gemma, **change})


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "nul", '{"model_type": NaN}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=r"config\.json|model_type"):
        read_config(tmp_path)


def test_missing_and_foreign_places_are_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no model"):
        read_config(tmp_path / "nothing")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="neither"):
        read_config(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_damaged_anywhere_is_read_or_refused_and_never_crashes(tmp_path, family):
    """400 mutations of each family's own file: values exchanged for hostile ones, keys removed or moved."""
    make_tiny(family, tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    hostile = [None, True, 0, -1, 1, 2**31, 2**63, 10**30, 1e300, 0.5, "", "x" * 100, [], [1], {}, {"a": 1}]
    rng = random.Random(family)
    for _ in range(400):
        config = json.loads(json.dumps(good))
        for _ in range(rng.randint(1, 3)):
            target = config
            if isinstance(config.get("rope_parameters"), dict) and rng.random() < 0.3:
                target = config["rope_parameters"]
            key = rng.choice(sorted(target) or ["x"])
            if rng.random() < 0.2:
                target.pop(key, None)
            else:
                target[key] = rng.choice(hostile)
        with suppress(SayfaError):
            read(tmp_path, config).check()
