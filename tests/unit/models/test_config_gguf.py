"""Laws of a GGUF file's facts: read right for each architecture; whatever is wrong is refused with its field (T07)."""

import random
from contextlib import suppress

import gguf
import numpy as np
import pytest

from fakes.gguf_files import convert
from fakes.models import make_tiny
from fakes.tokenizers import gguf_bytes
from sayfa.base.errors import ModelError, SayfaError
from sayfa.base.gguf import read_gguf
from sayfa.models.config import read_config
from sayfa.models.config_gguf import config_from_gguf


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    made = {}
    for family in ("llama", "llama3", "qwen2", "gemma3"):
        folder = tmp_path_factory.mktemp("gguf")
        shape = {"num_hidden_layers": 6, "layer_types": None} if family == "gemma3" else {}
        made[family] = convert(make_tiny(family, folder / "hf", **shape), folder / "tiny.gguf")
    return made


def with_facts(path, changes):
    """Read the file and exchange metadata; None removes a key."""
    file = read_gguf(path)
    for key, value in changes.items():
        file.metadata[key] = value
        if value is None:
            del file.metadata[key]
    return config_from_gguf(file, "tiny")


def test_facts_of_each_architecture(files):
    llama = read_config(files["llama"])
    assert (llama.name, llama.vocab_size, llama.num_kv_heads, llama.tie_embeddings) == ("tiny", 320, 2, False)
    assert llama.ropes[0].style == "adjacent"
    scaled = read_config(files["llama3"])
    assert scaled.tie_embeddings
    assert len(scaled.ropes[0].frequencies) == 8
    qwen = read_config(files["qwen2"])
    assert qwen.attention_bias
    assert qwen.ropes[0].style == "half"
    gemma = read_config(files["gemma3"])
    assert gemma.windows == [24] * 5 + [0]
    assert [rope.theta for rope in gemma.ropes] == [1e6, 1e4]
    assert not gemma.norm_plus_one
    assert gemma.qk_norm


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "phi3"}, "'phi3'; known architectures: gemma3, llama, qwen2, qwen3"),
        ({"general.architecture": None}, r"general\.architecture is missing"),
        ({"general.architecture": 7}, r"general\.architecture is 7"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8: mixtures"),
        ({"llama.block_count": 0}, r"llama\.block_count is 0"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0|head_count"),
        ({"llama.attention.head_count_kv": 3}, "not a multiple of num_kv_heads"),
        ({"llama.attention.value_length": 8}, r"value_length differs from key_length \(16\)"),
        ({"llama.embedding_length": 2**60}, r"llama\.embedding_length is"),
        ({"llama.context_length": -5}, r"llama\.context_length is -5"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'; known rope scalings: none, linear"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, r"factor is 0\.0"),
        ({"llama.rope.freq_base": float("nan")}, r"freq_base is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping is"),
        ({"llama.attention.causal": False}, "attention.causal is False"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(files, changes, words):
    with pytest.raises(ModelError, match=words):
        with_facts(files["llama"], changes).check()


def test_linear_scaling_in_both_spellings(files):
    new = with_facts(files["llama"], {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    old = with_facts(files["llama"], {"llama.rope.scale_linear": 4.0})
    assert new == old
    assert (new.ropes[0].scaling, new.ropes[0].factor) == ("linear", 4.0)


@pytest.mark.parametrize("field", ["scaling.factor", "scale_linear"])
def test_a_factor_divides_where_no_type_is_named_and_not_where_the_type_is_none(files, field):
    """As llama.cpp reads it."""
    unnamed = with_facts(files["llama"], {f"llama.rope.{field}": 4.0})
    assert (unnamed.ropes[0].scaling, unnamed.ropes[0].factor) == ("linear", 4.0)
    none = with_facts(files["llama"], {f"llama.rope.{field}": 4.0, "llama.rope.scaling.type": "none"})
    assert (none.ropes[0].scaling, none.ropes[0].factor) == ("none", 1.0)


def write_arrays(path, num_kv_heads, divisors):
    """A file whose head counts are given per layer, and with rope divisors."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 2), (writer.add_context_length, 64), (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32), (writer.add_head_count, 4), (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_head_count_kv, num_kv_heads),
    ):  # fmt: skip
        add(value)
    writer.add_tensor("token_embd.weight", np.zeros((50, 32), np.float32))
    writer.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_counts_given_per_layer_are_taken_if_all_layers_agree(tmp_path):
    assert read_config(write_arrays(tmp_path / "even.gguf", [2, 2], [1, 1, 2, 4])).num_kv_heads == 2
    with pytest.raises(ModelError, match=r"head_count_kv differs between layers \(\[2, 4\]\)"):
        read_config(write_arrays(tmp_path / "odd.gguf", [2, 4], [1, 1, 2, 4]))


@pytest.mark.parametrize("divisors", [[1, 1, 2], [1, 1, 2, 0], [1, 1, 2, -1], [1, 1, 2, np.inf], [1, 1, 2, np.nan]])
def test_rope_divisors_must_be_positive_numbers_one_for_each_pair(tmp_path, divisors):
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        read_config(write_arrays(tmp_path / "bad.gguf", [2, 2], divisors))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_metadata_damaged_anywhere_is_read_or_refused_and_never_crashes(files, family):
    hostile = [0, -1, 1, 2**31, 2**63, 1e300, float("nan"), 0.5, True, "", "x" * 100]
    keys = [key for key in read_gguf(files[family]).metadata if key.startswith(family)]
    rng = random.Random(family)
    for _ in range(300):
        changes = {rng.choice(keys): rng.choice([None, *hostile]) for _ in range(rng.randint(1, 3))}
        with suppress(SayfaError):
            with_facts(files[family], changes).check()


def test_without_an_embedding_the_vocabulary_s_size_cannot_be_known(files):
    file = read_gguf(files["llama"])
    table = file.tensors.pop("token_embd.weight")
    with pytest.raises(ModelError, match=r"vocab_size cannot be known: .* token_embd\.weight"):
        config_from_gguf(file, "tiny")
    file.tensors["token_embd.weight"] = file.tensors["output_norm.weight"]
    with pytest.raises(ModelError, match="no matrix"):
        config_from_gguf(file, "tiny")
    file.tensors["token_embd.weight"] = table
    assert config_from_gguf(file, "tiny").vocab_size == 320


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [([1, 0, 1, 1, 0, 1], [24, 0, 24, 24, 0, 24]), ([0] * 6, [0] * 6), ([1] * 5, None), ([1] * 7, None)],
)
def test_gemmas_local_layers_may_be_listed_one_by_one(files, tmp_path, pattern, windows):
    path = tmp_path / "listed.gguf"
    path.write_bytes(gguf_bytes({"pattern": [bool(item) for item in pattern]}))
    listed = read_gguf(path).metadata["pattern"]
    changes = {"gemma3.attention.sliding_window_pattern": listed}
    if windows is None:
        with pytest.raises(ModelError, match=rf"has {len(pattern)} entries for 6 layers"):
            with_facts(files["gemma3"], changes)
    else:
        assert with_facts(files["gemma3"], changes).windows == windows


def test_a_gemma_without_a_window_is_refused(files):
    with pytest.raises(ModelError, match=r"sliding_window is missing, but this kind of model needs it"):
        with_facts(files["gemma3"], {"gemma3.attention.sliding_window": None})
