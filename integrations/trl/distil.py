"""On-policy distillation by TRL's DistillationTrainer: a swapped student learns from the original.

    python integrations/trl/distil.py                            # the embedded model, 20 steps
    python integrations/trl/distil.py --model DIR --dataset prompts.jsonl --attention linear

The student generates continuations of prompts, and the original model says what it would have
generated. Needs ``pip install "attnzoo[train]"``. The data set has one ``{"prompt": ...}`` per
line. Recover a model first (``attnzoo recover``): an untrained swap generates little to learn from.
"""

from __future__ import annotations

import argparse

from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer

import attnzoo
from attnzoo.evaluation.models import embedded_model_path

PROMPTS = ["def read(path):\n", "import os\n\n", "class Queue:\n", "for name in names:\n"]


def main(arguments: list[str] | None = None) -> DistillationTrainer:
    """Swap, distil and save a model; return the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(embedded_model_path()), help="the original model")
    parser.add_argument("--student", help="a swapped model; default: the original, swapped")
    parser.add_argument("--dataset", help="JSON Lines file; default: a few prompts")
    parser.add_argument("--attention", default="gated_linear", help="name of a backend")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32, help="that the student generates")
    parser.add_argument("--out", default="trl-distil")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    teacher = AutoModelForCausalLM.from_pretrained(options.model)
    student = AutoModelForCausalLM.from_pretrained(options.student or options.model)
    if options.student is None:
        attnzoo.swap(student, options.attention, window=16)
    if options.dataset:
        data = load_dataset("json", data_files=options.dataset, split="train")
    else:
        data = Dataset.from_dict({"prompt": PROMPTS * 8})
    trainer = DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=DistillationConfig(
            output_dir=options.out,
            max_completion_length=options.tokens,
            beta=1.0,  # reverse KL; 0 is the KL of `attnzoo recover`
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-4,
            bf16=False,
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()  # config.json holds the swap: from_pretrained loads it
    return trainer


if __name__ == "__main__":
    main()
