"""Swapped models and requests, and the tokens that ``generate()`` gives for them."""

import argparse
import inspect
import json
import random
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.models import exaone4, granite, opt

import attnzoo

EMBEDDED = Path(attnzoo.__file__).parent / "assets" / "tiny-llama"
LAYERS = (  # one of each kind of state, and vLLM's attention
    ("linear", {"feature_map": "hedgehog"}),
    ("linear", {"feature_map": "cosine", "max_length": 512}),
    ("linear", {"window": 16, "num_sinks": 2}),
    ("gated_linear", {"gate": "gla"}),
    ("gated_linear", {"gate": "mlstm", "feature_map": "identity"}),
    ("gated_linear", {"gate": "rwkv6"}),
    ("gated_linear", {"gate": "gla", "window": 16, "num_sinks": 2}),
    ("performer", {"num_features": 32}),
    ("performer", {"num_features": 32, "window": 16}),
    ("delta", {"short_convolution": 4, "output_gate": True}),
    ("delta", {"window": 16, "num_sinks": 2, "short_convolution": 4}),
    ("block_sparse", {"window": 16, "num_sinks": 2, "top_k": 2, "block_size": 8}),
    ("flash", {"window": 16, "num_sinks": 2}),
    ("flash", {"window": 32}),
    ("softmax", {}),
)


def swap(model, layers):
    """Swap a model, layer by layer, and move what the backends add from where it begins."""
    plain = {str(i): {"backend": name, "options": dict(options)} for i, (name, options) in
             enumerate(layers)}  # fmt: skip
    attnzoo.swap(model, {"backend": "flash", "layers": plain})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attnzoo." in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


SCALES = {"embed_tokens": 0.6, "o_proj": 1.9, "lm_head": 0.5}


@torch.no_grad()
def draw_weights(model):
    """Return a model with random weights, of which attention's weigh the most."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = next((x for part, x in SCALES.items() if part in name), 0.08)
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def random_qwen(layers):
    """Return a Qwen 3 of random weights, in which attention weighs more than the last token."""
    config = Qwen3Config(
        vocab_size=384, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return draw_weights(Qwen3ForCausalLM(config).float())


def embedded():
    """Return the embedded model."""
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)


SIZES = {
    "vocab_size": 384, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SIZES | {"intermediate_size": 256, "num_key_value_heads": 2}


def random_granite():
    """Return a Granite, four of whose numbers multiply something that other families do not."""
    config = granite.GraniteConfig(
        **GROUPED, embedding_multiplier=3.0, logits_scaling=0.37, residual_multiplier=0.6,
        attention_multiplier=0.11, tie_word_embeddings=False,
    )  # fmt: skip
    return draw_weights(granite.GraniteForCausalLM(config).float())


def random_exaone():
    """Return an EXAONE 4, whose windows and rotary positions are in some layers only."""
    types = ["sliding_attention", "full_attention"] * 2
    config = exaone4.Exaone4Config(
        **GROUPED, sliding_window=24, layer_types=types, tie_word_embeddings=False
    )
    return draw_weights(exaone4.Exaone4ForCausalLM(config).float())


def random_opt():
    """Return an OPT, which scales its own queries."""
    config = opt.OPTConfig(**SIZES, ffn_dim=256, word_embed_proj_dim=128)
    return draw_weights(opt.OPTForCausalLM(config).float())


MODELS = {  # a function that builds it, and its layers
    "qwen": (lambda: random_qwen(len(LAYERS)), LAYERS),
    "embedded": (embedded, [LAYERS[i] for i in (6, 11, 13, 10)]),
    "granite": (random_granite, [LAYERS[i] for i in (2, 11, 12, 13)]),
    "exaone": (random_exaone, [LAYERS[i] for i in (13, 14, 14, 14)]),
    "opt": (random_opt, [LAYERS[i] for i in (2, 11, 12, 13)]),
}


def finish(folder, *, is_old=False):
    """Complete a saved model: its tokenizer, and the class name of its version of attnzoo."""
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    name = config["architectures"][0].removeprefix("Attnzoo")
    config["architectures"] = [name if is_old else f"Attnzoo{name}"]
    if is_old:
        config["model_type"] = config["model_type"].removeprefix("attnzoo_")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def requests(count=24, seed=0):
    """Return the token ids of prompts of 1 to 300 tokens, and the number of tokens to generate."""
    rng, text = random.Random(seed), inspect.getsource(argparse)
    shared, prompts = text[5000:5160], []
    for i in range(count):
        size, begin = rng.choice([1, 3, 17, 64, 130, 200, 300]), rng.randrange(len(text) - 400)
        prompt = text[begin : begin + size]
        prompts.append(shared + prompt[:120] if i % 3 == 0 else prompt)
    return [[x + 3 for x in prompt.encode()] for prompt in prompts], [
        rng.choice([12, 24]) for _ in prompts
    ]


class Reference(NamedTuple):
    """The answer of ``generate()`` to a request alone, greedy."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor  # [tokens, vocabulary]
    errors: torch.Tensor  # [tokens], the largest error of the logits, against float32

    @property
    def count(self):
        """The number of tokens that are asked for."""
        return len(self.tokens)


@torch.no_grad()
def generate(folder, dtype):
    """Return the references of all requests."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    found = []
    for prompt, count in zip(*requests(), strict=True):
        answer = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count, do_sample=False, eos_token_id=None,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = answer.sequences[0, len(prompt) :].tolist()
        found.append(Reference(prompt, tokens, torch.cat(answer.logits).float(), torch.empty(0)))
    exact = model.float()
    return [
        x._replace(errors=(x.logits - next_logits(exact, x.prompt, x.tokens)).abs().amax(1))
        for x in found
    ]


@torch.no_grad()
def next_logits(model, prompt, tokens):
    """Return the logits of a model for each of some tokens after a prompt, in one pass."""
    row = torch.tensor([prompt + tokens[:-1]])
    return model(row, use_cache=False).logits[0, len(prompt) - 1 :].float()
