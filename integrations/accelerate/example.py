"""Train a swapped model in a loop of your own with Accelerate, on one process or several.

    python integrations/accelerate/example.py                        # the embedded model, 10 steps
    torchrun --nproc-per-node 2 integrations/accelerate/example.py --model DIR --text my.txt  # CPUs
    accelerate launch --config_file fsdp2.yaml integrations/accelerate/example.py ...         # GPUs

``accelerate config`` writes such a file, and the folder ``configs`` has some. After
``import attnzoo``, ``from_pretrained`` loads the saved folder.
"""

from __future__ import annotations

import argparse
from itertools import chain, repeat
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnzoo
from attnzoo.evaluation.models import embedded_model_path

STORY = "Once there was a dog who could not find his ball. He looked near the lake. "


def main(arguments: list[str] | None = None) -> list[float]:
    """Swap, train and save a model; return the loss of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(embedded_model_path()))
    parser.add_argument("--text", type=Path, help="text file; default: one story, repeated")
    parser.add_argument("--attention", default="linear", help="name of a backend")
    parser.add_argument("--length", type=int, default=128, help="tokens per row")
    parser.add_argument("--batch", type=int, default=4, help="rows per batch of all processes")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="accelerate-loop")
    options = parser.parse_args(arguments)

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # without it, torchrun's processes are not joined
        gradient_accumulation_steps=options.accumulate,
        dataloader_config=DataLoaderConfiguration(  # the batches of one process, split over all
            split_batches=True, use_seedable_sampler=True, data_seed=0
        ),
    )
    set_seed(0)  # the weights that a backend adds are equal in all processes
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    attnzoo.swap(model, options.attention)  # before prepare, which wraps and shards the model
    text = options.text.read_text("utf-8") if options.text else STORY * 60
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    rows = ids[: len(ids) // options.length * options.length].split(options.length)
    loader = DataLoader(rows, batch_size=options.batch, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)  # keeps gates
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    losses: list[float] = []
    batches = []  # losses of the batches of a step
    for ids in chain.from_iterable(repeat(loader)):  # epoch after epoch
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        batches.append(accelerator.reduce(loss.detach(), "mean"))
        if accelerator.sync_gradients:  # the last batch of a step
            losses.append(torch.stack(batches).mean().item())
            batches.clear()
            accelerator.print(f"step {len(losses)}: loss {losses[-1]:.6f}")
        if len(losses) == options.steps:
            break

    state = accelerator.get_state_dict(model)  # full weights where they are sharded
    accelerator.unwrap_model(model).save_pretrained(
        options.out, is_main_process=accelerator.is_main_process, state_dict=state
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(options.out)
    accelerator.end_training()  # ends the process group
    return losses


if __name__ == "__main__":
    main()
