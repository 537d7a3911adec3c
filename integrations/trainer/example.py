"""Fine-tune a swapped model with the Trainer of transformers.

    python integrations/trainer/example.py                       # the embedded model, 20 steps
    python integrations/trainer/example.py --model DIR --text my.txt --attention gated_linear
    torchrun --nproc-per-node 2 integrations/trainer/example.py ...  # data parallel

After ``import attnzoo``, ``from_pretrained`` loads the saved folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import attnzoo
from attnzoo.evaluation.models import embedded_model_path

STORY = "Once there was a dog who could not find his ball. He looked near the lake. "


def rows_of(text: str, tokenizer, length: int) -> Dataset:
    """Cut a text into rows of equal length."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main(arguments: list[str] | None = None) -> Trainer:
    """Swap, train and save a model; return the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(embedded_model_path()))
    parser.add_argument("--text", type=Path, help="text file; default: one story, repeated")
    parser.add_argument("--attention", default="linear", help="name of a backend")
    parser.add_argument("--length", type=int, default=128, help="tokens per row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="trainer-finetune")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    attnzoo.swap(model, options.attention)
    text = options.text.read_text("utf-8") if options.text else STORY * 60
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows_of(text, tokenizer, options.length),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(options.out)
    return trainer


if __name__ == "__main__":
    main()
