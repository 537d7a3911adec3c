"""A teacher and its student of a stock class with recurrent layers, in folders."""

import torch
import transformers as hf

from attnzoo.hf.stock.convert import convert_files
from attnzoo.hf.stock.gated_delta_net import FAMILY
from tests.byte_tokenizer import save_byte_tokenizer


def write_pair(place, layers, recurrent):
    """Write a random model to ``teacher`` and its student to ``student``.

    Args:
        place: Folder of both.
        layers: Number of layers.
        recurrent: The student's recurrent layers, as of ``attnzoo convert --recurrent``.
    """
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(
        "qwen3",
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    teacher = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3)
    teacher.save_pretrained(place / "teacher")
    save_byte_tokenizer(place / "teacher")
    convert_files(place / "teacher", FAMILY, place / "student", recurrent=recurrent)


def load(folder):
    """Load a model in float32, in evaluation mode."""
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
