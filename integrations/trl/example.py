"""Fine-tune a swapped model with TRL's SFTTrainer, on packed sequences.

    python integrations/trl/example.py                           # the embedded model, 20 steps
    python integrations/trl/example.py --model DIR --dataset text.jsonl --lora

Needs ``pip install "attnzoo[train]" trl``. The data set has one ``{"text": ...}`` per line.
"""

from __future__ import annotations

import argparse

from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import attnzoo
from attnzoo.evaluation.models import embedded_model_path

STORIES = [
    "Once there was a dog who could not find his ball.",
    "The sun was warm, and the two sisters went to the lake to swim.",
    "Tim had a red boat. It was fast, and he raced it every day until the lake froze.",
    "A cat sat on the wall and looked at the birds.",
]


def main(arguments: list[str] | None = None) -> SFTTrainer:
    """Swap, train and save a model; return the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(embedded_model_path()))
    parser.add_argument("--dataset", help="JSON Lines file; default: a few stories")
    parser.add_argument("--attention", default="linear", help="name of a backend")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters only")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="trl-sft")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    attnzoo.swap(model, options.attention)
    if options.dataset:
        data = load_dataset("json", data_files=options.dataset, split="train")
    else:
        data = Dataset.from_dict({"text": STORIES * 8})
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=options.out,
            max_length=256,
            packing=True,  # sequences of one row do not attend to each other
            max_steps=options.steps,
            per_device_train_batch_size=2,
            learning_rate=1e-4,
            bf16=False,
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules="all-linear") if options.lora else None,
    )
    trainer.train()
    trainer.save_model()  # config.json holds the swap: from_pretrained loads it
    return trainer


if __name__ == "__main__":
    main()
