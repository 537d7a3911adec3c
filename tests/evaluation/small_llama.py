"""The model whose memory is computed, and measured in two processes."""

from transformers import LlamaConfig

M, FFN, V, LAYERS = 128, 320, 500, 3  # hidden size, MLP, vocabulary


def save_config(path):
    """Save the config to a folder, whose name is returned."""
    LlamaConfig(
        vocab_size=V,
        hidden_size=M,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    return str(path)
