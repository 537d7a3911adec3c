"""Write folders of swapped models with their logits, or check that they load bit-equal.

python -m tools.write_reference_folders OUT          # with the attnzoo that is imported
python -m tools.write_reference_folders OUT --check  # with another one
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import attnzoo

RESULTS = "results.safetensors"
LOADER = "loader.json"
IDS = torch.tensor(
    [[5, 9, 33, 2, 71, 18, 6, 44, 90, 27, 3, 12], [8, 1, 1, 60, 4, 7, 7, 52, 31, 2, 9, 5]]
)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
CAUSAL = "AutoModelForCausalLM"


def _llama() -> Any:
    torch.manual_seed(3)
    config = hf.LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    return hf.LlamaForCausalLM(config).eval()


def _gpt2() -> Any:
    torch.manual_seed(4)
    config = hf.GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=40)
    return hf.GPT2LMHeadModel(config).eval()


def _bert() -> Any:
    torch.manual_seed(5)
    config = hf.BertConfig(**SIZES, max_position_embeddings=40)
    return hf.BertForMaskedLM(config).eval()


def _pruned_gpt2() -> Any:
    return attnzoo.prune_heads(_gpt2(), {0: [1], 2: [0, 3]})


def _gemma3() -> Any:
    torch.manual_seed(6)
    text = {**SIZES, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5}
    text["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
    vision = {
        **{name: x for name, x in SIZES.items() if name != "vocab_size"},
        **{"image_size": 28, "patch_size": 14},
    }
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    return hf.Gemma3ForConditionalGeneration(config).eval()


def _t5() -> Any:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"d_model": 48, "d_ff": 56, "num_layers": 2, "num_heads": 4, "d_kv": 12}
    config = hf.T5Config(vocab_size=97, **sizes)
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config).eval()


@torch.no_grad()
def _train(model: Any) -> Any:
    """Change the parameters that backends and adapters have added, as training would."""
    generator = torch.Generator().manual_seed(11)
    for name, x in model.named_parameters():
        if ".attnzoo." in name or "lora_" in name:
            x += 0.1 * torch.randn(x.shape, generator=generator).to(x.dtype)
    return model


def _swapped(make: Callable[[], Any], *args: Any, dtype: str = "float32", **options: Any) -> Any:
    model = make().to(getattr(torch, dtype))
    attnzoo.swap(model, *args, **options)
    return _train(model)


def _adapter(merged: bool) -> Any:
    model = _swapped(_llama, "gated_linear", gate="gla", feature_map="hedgehog", window=4)
    lora = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = _train(get_peft_model(model, lora)).eval()
    return adapted.merge_and_unload() if merged else adapted


def _models() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield the name, the auto class and the maker of each model."""
    hedgehog = {"feature_map": "hedgehog"}
    yield "whole", CAUSAL, lambda: _swapped(_llama, "linear", **hedgehog)
    yield (
        "per_layer",
        CAUSAL,
        lambda: _swapped(
            _llama,
            "gated_linear",
            gate="mamba2",
            layers={"0": "flash", "2": "longformer:window=3"},
            dtype="bfloat16",
        ),
    )
    yield (
        "hybrid",
        CAUSAL,
        lambda: _swapped(_llama, "gated_linear", gate="gla", window=4, num_sinks=1, **hedgehog),
    )
    yield "delta", CAUSAL, lambda: _swapped(_llama, "delta", short_convolution=3, window=5)
    yield "block_sparse", CAUSAL, lambda: _swapped(_llama, "block_sparse", dtype="bfloat16")
    yield (
        "pruned_gpt2",
        CAUSAL,
        lambda: _swapped(_pruned_gpt2, "linear", **hedgehog),
    )
    yield "pruned_stock", CAUSAL, lambda: attnzoo.prune_heads(_gpt2(), {1: [0, 2]})
    yield (
        "bert",
        "AutoModelForMaskedLM",
        lambda: _swapped(_bert, "linformer", num_rows=7, max_length=40),
    )
    yield (
        "composite",
        "AutoModelForImageTextToText",
        lambda: _swapped(
            _gemma3,
            {
                "text_config": {
                    "backend": "linear",
                    "options": hedgehog,
                    "else": {"backend": "flash"},
                }
            },
        ),
    )
    yield "t5", "AutoModelForSeq2SeqLM", lambda: _swapped(_t5, "flash")
    yield "adapter", "adapter", lambda: _adapter(merged=False)
    yield "merged", CAUSAL, lambda: _adapter(merged=True)
    plan = attnzoo.AttentionSpec("flash", layers={"1": "flash:window=4"})
    yield "stock_class", CAUSAL, lambda: attnzoo.convert(_llama(), "qwen2", plan)


@torch.no_grad()
def _results(model: Any) -> dict[str, Tensor]:
    """Return logits of two rows, and the tokens that follow where the model generates."""
    for x in model.parameters():  # aligned as new memory is: bfloat16 products depend on it
        x.data = x.data.clone()
    is_pair = model.config.is_encoder_decoder
    inputs = {"input_ids": IDS, **({"decoder_input_ids": IDS[:, :7]} if is_pair else {})}
    found = {"logits": model(**inputs).logits}
    if hasattr(model, "generate") and model.can_generate():
        found["tokens"] = model.generate(
            input_ids=IDS, max_new_tokens=9, do_sample=False, pad_token_id=0
        )
    state = model.state_dict()
    added = sorted(name for name in state if ".attnzoo." in name and "original" not in name)
    sums = [state[name].double().sum() for name in added]
    return {**found, **({"sums": torch.stack(sums)} if sums else {})}


def _load(folder: Path, loader: str) -> Any:
    if loader == "adapter":
        base = hf.AutoModelForCausalLM.from_pretrained(folder / "base")
        from peft import PeftModel

        return PeftModel.from_pretrained(base, folder / "adapter").eval()
    return getattr(hf, loader).from_pretrained(folder).eval()


def write(out: Path) -> None:
    """Write every folder."""
    for name, loader, make in _models():
        model = make().eval()
        folder = out / name
        if loader == "adapter":
            model.save_pretrained(folder / "adapter")
            _swapped(
                _llama, "gated_linear", gate="gla", feature_map="hedgehog", window=4
            ).save_pretrained(folder / "base")
        else:
            model.save_pretrained(folder)
        # of the loaded model: positions of one that was cast to bfloat16 in memory are rounded
        save_file(_results(_load(folder, loader)), folder / RESULTS)
        (folder / LOADER).write_text(json.dumps(loader), "utf-8")
        print("written", name)


def check(out: Path) -> int:
    """Return the number of folders that load with other numbers."""
    wrong = 0
    for path in sorted(out.glob(f"*/{LOADER}")):
        folder = path.parent
        expected = load_file(folder / RESULTS)
        try:
            found = _results(_load(folder, json.loads(path.read_text("utf-8"))))
            other = [x for x in expected if not torch.equal(expected[x], found[x])]
        except Exception as error:
            other = [f"{type(error).__name__}: {error}"]
        print("DIFFERENT" if other else "equal", folder.name, *other)
        wrong += bool(other)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.check:
        raise SystemExit(check(arguments.out))
    write(arguments.out)
