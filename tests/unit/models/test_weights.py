"""Laws of the weights: what does not fit the facts is refused by the tensor's name, and nothing is left unread."""

import json

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fakes.models import FAMILIES, make_successor, make_tiny
from sayfa.base.errors import ModelError
from sayfa.base.sizing import num_parameters
from sayfa.models import content_digest, load_program
from sayfa.models.config import read_config
from sayfa.models.formats.source import open_weights
from sayfa.nn.program.program import Embed, Linear


def load(folder, config=None):
    return load_program(folder, config or read_config(folder), open_weights(folder))


def change(folder, edit):
    """Apply `edit` to the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    return make_successor(tmp_path / "model", {1: 2})


def test_a_missing_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' is missing"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name][:-1].copy()}))
    with pytest.raises(ModelError, match=r"k_proj\.weight' has shape \[31, 288\].* \[32, 288\]"):
        load(folder)


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.input_layernorm.weight"])
def test_a_tensor_that_nobody_reads_is_refused(folder, extra):
    """A bias or a layer that the configuration does not mention would be a silently wrong model."""
    change(folder, lambda tensors: tensors.update({extra: np.zeros(32, np.float32)}))
    with pytest.raises(ModelError, match="have no place in a llama model"):
        load(folder)


def test_old_rotary_caches_are_ignored(folder):
    cache = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    change(folder, lambda tensors: tensors.update(cache))
    assert load(folder).logits.width == 288


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_names_below_any_prefix_are_found(folder, prefix):
    """Text models that were a part of a larger one."""

    def rename(tensors):
        for name in list(tensors):
            if name.startswith("model."):
                tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    change(folder, rename)
    assert len(load(folder).ops) > 10


def test_no_embedding_is_refused(folder):
    change(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ModelError, match=r"exactly one tensor named \*\.embed_tokens\.weight"):
        load(folder)


def test_a_tied_head_is_the_embedding_itself(tmp_path):
    program = load(make_tiny("llama3", tmp_path))
    table = next(op.table for op in program.ops if isinstance(op, Embed))
    head = [op.weight for op in program.ops if isinstance(op, Linear)][-1]
    assert table.pieces[0] is head.pieces[0]


def test_a_stored_copy_of_a_tied_embedding_is_not_kept_twice_and_another_head_is_kept(tmp_path, monkeypatch):
    """Compared in parts: a difference in the last number of the last part is seen."""
    monkeypatch.setattr("sayfa.models.weights._COMPARED_BYTES", 1000)
    folder = make_tiny("llama3", tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    assert heads_name(load(folder)) == "model.embed_tokens.weight"
    embedding[-1, -1] += 1
    change(folder, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    assert heads_name(load(folder)) == "lm_head.weight"
    change(folder, lambda tensors: tensors.update({"lm_head.weight": embedding[:-1].copy()}))
    with pytest.raises(ModelError, match=r"'lm_head\.weight' has shape \[319, 64\]"):
        load(folder)


def test_a_head_that_is_neither_stored_nor_tied_is_refused_with_the_way_out(folder):
    """transformers gives the model a random head, and a warning."""
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    words = r"head 'lm_head\.weight' is missing .* `tie_word_embeddings: true`; say so if .* add the file"
    with pytest.raises(ModelError, match=words):
        load(folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "tie_word_embeddings": True}))
    assert heads_name(load(folder)) == "model.embed_tokens.weight"


def heads_name(program):
    return [op.weight for op in program.ops if isinstance(op, Linear)][-1].pieces[0].name


def test_a_second_head_is_refused(tmp_path):
    folder = make_tiny("llama3", tmp_path)
    second = {f"{place}lm_head.weight": np.zeros((320, 64), np.float32) for place in ("", "draft.")}
    change(folder, lambda tensors: tensors.update(second))
    with pytest.raises(ModelError, match=r"'draft\.lm_head\.weight'"):
        load(folder)


def test_an_unknown_architecture_is_refused_with_the_known_ones(folder):
    config = msgspec.structs.replace(read_config(folder), architecture="lama")
    with pytest.raises(ModelError, match=r"'lama'; known: .*llama.*Did you mean 'llama'"):
        load(folder, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_for_parameters_counts_the_files_tensors(tmp_path, family):
    folder = make_tiny(family, tmp_path)
    in_file = sum(tensor.size for tensor in load_file(folder / "model.safetensors").values())
    assert num_parameters(read_config(folder)) == in_file


def test_the_digest_follows_the_content_and_nothing_else(folder, tmp_path):
    """Another name or place does not change it; one number at either end, a fact or a tensor's name does."""
    config = read_config(folder)
    first = content_digest(open_weights(folder), config)
    assert content_digest(open_weights(folder), msgspec.structs.replace(config, name="other", digest="x")) == first
    seen = {first}
    for name, place in (("model.norm.weight", 0), ("lm_head.weight", -1), ("model.layers.0.mlp.up_proj.weight", 0)):
        change(folder, lambda tensors, name=name, place=place: tensors[name].reshape(-1).__setitem__(place, 3.5))
        seen.add(content_digest(open_weights(folder), config))
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "rope_theta": 20000.0}))
    seen.add(content_digest(open_weights(folder), read_config(folder)))
    assert len(seen) == 5
