"""Train a LoRA adapter on a swapped model, save it, and load it onto the same swap.

    python integrations/peft/example.py                              # the embedded model, 20 steps
    python integrations/peft/example.py --model DIR --attention linear --out adapter

Needs ``pip install "attnzoo[train]"``. ``--model`` takes a folder or the Hub id of a causal model.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnzoo
from attnzoo.evaluation.models import embedded_model_path

STORIES = [
    "Once there was a dog who could not find his ball.",
    "The sun was warm, and the two sisters went to the lake to swim.",
    "A cat sat on the wall and looked at the birds.",
]


def load_swapped(path: str, attention: str) -> Any:
    """Load a model and swap its attention, with a learned feature map."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    attnzoo.swap(model, attention, feature_map="hedgehog")
    return model


def main(arguments: list[str] | None = None) -> float:
    """Train, save and load an adapter; return the last loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(embedded_model_path()))
    parser.add_argument("--attention", default="gated_linear", choices=("linear", "gated_linear"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="peft-lora")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(STORIES, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

    # feature maps and gates are trained and saved with the adapter
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load_swapped(options.model, options.attention), config)
    model.print_trainable_parameters()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)  # decay would change gates
    model.train()
    for step in range(options.steps):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval().save_pretrained(options.out)  # adapter_config.json records the swap

    loaded = PeftModel.from_pretrained(load_swapped(options.model, options.attention), options.out)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, model(**batch).logits)
    prompt = tokenizer("Once", return_tensors="pt")
    tokens = loaded.generate(**prompt, max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))
    return loss.item()


if __name__ == "__main__":
    main()
