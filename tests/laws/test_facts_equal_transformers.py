"""Law: whatever a model folder states, its logits are those of transformers, or it is refused by the field.

Each case edits the facts or the files of a tiny random model, so that two readings of them are far apart.
"""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from fakes import gguf_files
from fakes.models import make_tiny
from fakes.steps import Driver, open_model, reference
from sayfa.base.errors import ModelError
from sayfa.models.config import read_config

TOLERANCE = 5e-5
TOKENS = np.random.default_rng(0).integers(0, 320, 60).tolist()
GEMMA_TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 24,
    "query_pre_attn_scalar": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def edit(folder, drop=(), inside=None, **facts):
    """Change config.json, or the part `inside` it."""
    config = json.loads((folder / "config.json").read_text())
    target = config[inside] if inside else config
    for field in drop:
        target.pop(field, None)
    target.update(facts)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def our_logits(folder):
    config, program = open_model(folder)
    driver = Driver(reference(program), config)
    driver.add(0, TOKENS)
    driver.step({0: 512}, all_logits=True)
    return np.stack([driver.logits[0][position] for position in range(len(TOKENS))])


def assert_equal(folder, maker=transformers.AutoModelForCausalLM, file=None):
    """`file`: what we read in place of the folder."""
    oracle = maker.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = oracle(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    difference = np.abs(our_logits(file or folder) - theirs)
    assert difference.max() < TOLERANCE, f"largest {difference.max()}, mean {difference.mean()}"


def make_large_gemma(folder, **outer):
    """A random Gemma 3 with a vision part; its text is what we serve."""
    config = transformers.Gemma3Config(text_config=GEMMA_TEXT, vision_config=VISION, mm_tokens_per_image=4, **outer)
    model = transformers.Gemma3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.15 if parameter.dim() > 1 else 0.3))
    model.save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------------------------------- the head


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_a_head_that_differs_from_the_embedding_is_used_though_the_flag_ties_them(tmp_path, family):
    make_tiny(family, tmp_path, seed=3, tie_word_embeddings=False)
    assert_equal(edit(tmp_path, tie_word_embeddings=True))


@pytest.mark.parametrize("stated", [True, False, None])
def test_of_a_larger_gemma_the_outer_flag_ties_the_head(tmp_path, stated):
    """None: it is not stated, and says true by default, whatever the text part says."""
    make_large_gemma(tmp_path, **({} if stated is None else {"tie_word_embeddings": stated}))
    edit(tmp_path, inside="text_config", tie_word_embeddings=not stated)
    if stated is None:
        edit(tmp_path, drop=["tie_word_embeddings"])
        edit(tmp_path, inside="text_config", tie_word_embeddings=False)
    assert_equal(tmp_path, transformers.AutoModelForImageTextToText)


# --------------------------------------------------------------------------------------------------- windows


def their_windows(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    window = config.sliding_window or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


@pytest.mark.parametrize(
    ("family", "drop", "facts"),
    [
        ("mistral", ["sliding_window"], {}),
        ("mistral", [], {"sliding_window": None}),
        ("qwen2-window", ["sliding_window", "layer_types"], {}),
        ("qwen2-window", ["layer_types"], {"sliding_window": None}),
        ("qwen3", ["sliding_window", "layer_types"], {"use_sliding_window": True, "max_window_layers": 2}),
        ("qwen3", ["sliding_window", "layer_types"], {}),
        ("gemma3", ["sliding_window"], {}),
    ],
)
def test_the_windows_of_facts_left_out_are_transformers_own(tmp_path, family, drop, facts):
    """4096 where the key is absent; only null means none."""
    folder = edit(make_tiny(family, tmp_path), drop, **facts)
    assert read_config(folder).windows == their_windows(folder)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_without_max_window_layers_the_first_28_layers_see_everything(tmp_path, family):
    shape = {"use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 30, "hidden_size": 32}
    folder = make_tiny(family, tmp_path, seed=3, **shape)
    edit(folder, drop=["max_window_layers", "layer_types"])
    assert read_config(folder).windows == their_windows(folder) == [0] * 28 + [20] * 2
    assert_equal(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_window_in_a_gguf_file_is_not_used_where_its_readers_know_none_and_that_is_said(
    tmp_path, family, monkeypatch, caplog
):
    """transformers and llama.cpp read the key for Gemma only; each row of the text is longer than the window."""
    write_facts = gguf_files._write_facts

    def with_window(writer, config, kind):
        write_facts(writer, config, kind)
        writer.add_sliding_window(20)

    monkeypatch.setattr(gguf_files, "_write_facts", with_window)
    folder = make_tiny(family, tmp_path / "folder", seed=3)
    file = gguf_files.convert(folder, tmp_path / "model.gguf")
    facts = load_gguf_checkpoint(str(file), return_tensors=False)["config"]
    assert facts.get("sliding_window") is None
    assert_equal(folder, file=file)
    assert f"{family}.attention.sliding_window is 20, but" in caplog.text


@pytest.mark.parametrize("family", ["mistral", "qwen2-window", "qwen3", "gemma3"])
def test_a_window_of_nothing_is_refused(tmp_path, family):
    """With 0 a token would not even see itself; transformers computes with that, and gives no numbers."""
    folder = edit(make_tiny(family, tmp_path), sliding_window=0, use_sliding_window=True)
    with pytest.raises(ModelError, match=r"sliding_window is 0; it must be a whole number in \[1, "):
        read_config(folder)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_layers_without_a_window_are_refused(tmp_path, family):
    """transformers fails at them."""
    facts = {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False, "sliding_window": 20}
    folder = edit(make_tiny(family, tmp_path), **facts)
    with pytest.raises(ModelError, match=r"layer_types holds 'sliding_attention', but .*use_sliding_window"):
        read_config(folder)


# --------------------------------------------------------------------------------------------------- ropes and others

LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "facts"),
    [
        ("llama", {"rope_parameters": DEFAULT, "rope_scaling": LINEAR}),
        ("qwen3", {"rope_parameters": DEFAULT, "rope_scaling": LINEAR, "rope_theta": 300.0}),
        ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 5000.0}, "rope_scaling": {}}),
        ("llama", {"rope_parameters": DEFAULT, "partial_rotary_factor": 1.0}),
        ("llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}),
        ("gemma3", {"rope_parameters": {"full_attention": DEFAULT}, "rope_scaling": LINEAR}),
        ("gemma3", {"rope_parameters": None, "rope_scaling": LINEAR, "rope_theta": 300.0}),
        ("gemma3", {"rope_parameters": {"full_attention": LINEAR}, "rope_local_base_freq": 77.0}),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 2, "_sliding_window_pattern": 3}),
        ("gemma3", {"hidden_activation": "silu", "hidden_act": "gelu"}),
        ("llama", {"is_causal": True}),
    ],
)
def test_of_two_places_for_one_fact_the_one_that_transformers_reads_counts(tmp_path, family, facts):
    assert_equal(edit(make_tiny(family, tmp_path, seed=3), **facts))


@pytest.mark.parametrize(
    ("family", "facts", "words"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but .* remove the field"),
        ("qwen3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("qwen3", {"rope_parameters": {"full_attention": LINEAR}}, "full_attention is .*only gemma3"),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 8.0}}, "high_freq_factor is 4.0.*below .* 8.0"),
        ("gemma3", {"rope_parameters": {**LINEAR, "rope_theta": 50.0}}, "rope_type is not read .*full_attention"),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "type is 'linear', .*rope_type"),
        ("gemma3", {"hidden_activation": None, "hidden_act": "silu"}, "hidden_act is 'silu', .*hidden_activation"),
        (
            "gemma3",
            {"layer_types": None, "_sliding_window_pattern": 2},
            "_sliding_window_pattern is 2, .*sliding_window_pattern",
        ),
        ("llama", {"is_causal": False}, "is_causal is False"),
        ("qwen2", {"is_causal": None}, "is_causal is None"),
        ("mistral", {"attention_bias": True}, "attention_bias is True, but mistral has no biases"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "llama has none"),
    ],
)
def test_facts_that_contradict_what_transformers_computes_are_refused(tmp_path, family, facts, words):
    """It fails at some of them, and computes without the others."""
    folder = edit(make_tiny(family, tmp_path), **facts)
    with pytest.raises(ModelError, match=words):
        read_config(folder)


@pytest.mark.parametrize(
    "facts",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"is_causal": False},
        {"use_bidirectional_attention": True},
        {"final_logit_softcapping": 30.0},
        {"quantization_config": {}},
    ],
)
@pytest.mark.parametrize("inside", [None, "text_config"])
def test_what_is_not_served_is_refused_outside_and_inside_the_text_part(tmp_path, facts, inside):
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA_TEXT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).num_layers == 3
    edit(tmp_path, inside=inside, **facts)
    with pytest.raises(ModelError, match=f"{next(iter(facts))} is .*: models of this kind are not served"):
        read_config(tmp_path)


def test_a_larger_gemma_without_its_text_part_is_refused(tmp_path):
    """transformers would make a model of the family's defaults, and read none of the facts outside the part."""
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], **GEMMA_TEXT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"text_config is missing, but .*gemma3_text"):
        read_config(tmp_path)


def add_biases(*names):
    def change(tensors):
        generator = torch.Generator().manual_seed(1)
        for layer in range(3):
            for name in names:
                place = f"model.layers.{layer}.self_attn.{name}_proj"
                tensors[f"{place}.bias"] = torch.randn(len(tensors[f"{place}.weight"]), generator=generator)

    return change


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_biases_that_the_flag_promises_are_used(tmp_path, family):
    folder = edit(make_tiny(family, tmp_path, seed=3), attention_bias=True)
    change_tensors(folder, add_biases("q", "k", "v", "o"))
    assert_equal(folder)


@pytest.mark.parametrize(("family", "names"), [("qwen2", "o"), ("llama", "qkv"), ("mistral", "qkv")])
def test_biases_that_transformers_leaves_unread_are_refused(tmp_path, family, names):
    folder = make_tiny(family, tmp_path, seed=3)
    change_tensors(folder, add_biases(*names))
    with pytest.raises(ModelError, match=r"tensors have no place in a .* 'model\.layers\.0\.self_attn\.._proj\.bias'"):
        our_logits(folder)


# --------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("extra", ["adapter_model.safetensors", "consolidated.safetensors"])
def test_of_several_weight_files_those_are_read_that_transformers_reads(tmp_path, extra):
    """First shards with their index, then a whole file of another model beside them."""
    folder = make_tiny("llama", tmp_path / "one", seed=3)
    other = make_tiny("llama", tmp_path / "other", seed=9)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    shutil.copy(other / "model.safetensors", folder / extra)
    assert_equal(folder)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    assert_equal(folder)
