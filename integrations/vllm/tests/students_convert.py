"""Write random teachers and their students to a folder: ``python students_convert.py FOLDER``.

It runs with the versions of attnzoo's own tests.
"""

import sys
from pathlib import Path

import torch
from models import draw_weights
from transformers import AutoConfig, AutoModelForCausalLM

import attnzoo
from attnzoo.hf.stock.gated_delta_net import recurrent_layers

SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOWS = attnzoo.AttentionSpec("flash", layers={"0,2": "flash:window=8"})
STUDENTS = {  # family of the teacher, its heads and their size, what `convert` gets
    "qwen3_5_text": ("qwen3", 2, 64, {"recurrent": "1-2"}),
    "qwen2": ("llama", 4, 32, {"plan": WINDOWS}),
}


def random_teacher(family, heads, dim):
    """Return a model of random weights whose tokens depend on far ones."""
    sizes = SIZES | {"num_attention_heads": heads, "head_dim": dim}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    return draw_weights(model)


@torch.no_grad()
def move_from_start(student):
    """Add noise to recurrent layers, many of whose starting values are 0."""
    generator = torch.Generator().manual_seed(2)
    for layer in recurrent_layers(student).values():
        for parameter in layer.parameters():
            scale = 0.5 if parameter.ndim == 1 else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def main():
    """Write all pairs."""
    out = Path(sys.argv[1])
    for to, (family, heads, dim, options) in STUDENTS.items():
        teacher = random_teacher(family, heads, dim)
        teacher.save_pretrained(out / f"{to}-teacher")
        student = attnzoo.convert(teacher, to, **options)
        move_from_start(student)
        student.save_pretrained(out / to)


if __name__ == "__main__":
    main()
