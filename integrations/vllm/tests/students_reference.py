"""Compare tokens of vLLM with transformers' without attnzoo: ``python students_reference.py FILE``.

It runs with the versions of attnzoo's own tests, and reads and completes the file of
``students_serve.py``.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def load(folder, dtype):
    """Load a model in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def generate(model, prompts, counts):
    """Return the greedy tokens of each prompt alone."""
    options = {"do_sample": False, "eos_token_id": None}
    found = []
    for prompt, count in zip(prompts, counts, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        row = model.generate(ids, attention_mask=mask, max_new_tokens=count, **options)
        found.append(row[0, len(prompt) :].tolist())
    return found


@torch.no_grad()
def next_logits(model, prompt, tokens):
    """Return the logits for each of some tokens after a prompt, in one pass."""
    row = torch.tensor([prompt + tokens[:-1]])
    return model(row, use_cache=False).logits[0, len(prompt) - 1 :].double()


def rounding(exact, rounded, prompts, rows):
    """Return what rounding changes at each token of each request, ``(margin, own, error)``.

    Each step has the given tokens before it. Its margin is how far the logit of the given token is
    below the highest one in float64; ``own`` is that of the token which a model in another data
    type chooses; the error is the largest one of that model's logits.
    """
    found = []
    for prompt, tokens in zip(prompts, rows, strict=True):
        logits, others = (next_logits(model, prompt, tokens) for model in (exact, rounded))
        chosen = torch.stack([torch.tensor(tokens), others.argmax(1)], 1)
        margins = logits.amax(1, keepdim=True) - logits.gather(1, chosen)
        error = (others - logits).abs().amax(1, keepdim=True)
        found.append(torch.cat([margins, error], 1).tolist())
    return found


def main():
    """Add the tokens of student and teacher, margins and errors to the file."""
    sys.modules["attnzoo"] = None  # importing it fails
    sys.modules["fla"] = None  # transformers would call it, and it needs a GPU
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    run = json.loads(path.read_text())
    asked = run["prompts"], run["counts"]
    for model in run["models"].values():
        dtype = getattr(torch, model["dtype"])
        student = load(model["folder"], dtype)
        model["expected"] = generate(student, *asked)
        model["teacher"] = generate(load(f"{model['folder']}-teacher", dtype), *asked)
        if dtype != torch.float32:
            exact = load(model["folder"], torch.float64)
            model["rounding"] = rounding(exact, student, run["prompts"], model["tokens"])
    path.write_text(json.dumps(run))


if __name__ == "__main__":
    main()
