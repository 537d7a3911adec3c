# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Swap, look, recover
#
# Swap the attention of a pretrained model, look at what runs and at what it costs, and train the
# cost away. The model is the one that ships with attnzoo, a byte-level Llama with 4 layers,
# trained on Python source; any causal model of transformers takes the same steps. The notebook
# takes about two minutes on a CPU.

# %%
import math
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnzoo
from attnzoo.evaluation.corpus import read_documents
from attnzoo.evaluation.models import embedded_model_path

folder = embedded_model_path()  # of your model: its folder, or its id on the Hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
text = read_documents(None)[0]  # source files that the model was not trained on
tokens = tokenizer(
    [text[start : start + 128] for start in range(0, 8 * 128, 128)],
    max_length=128,
    truncation=True,
    add_special_tokens=False,
    return_tensors="pt",
).input_ids
rows = torch.cat([tokens, tokens], dim=1)  # every text stands a second time, 128 bytes later
second = torch.cat([torch.full_like(tokens, -100), tokens], dim=1)  # only these have a loss


def bits_per_byte(model):
    """Return the loss on second copies of text, which a model with recall repeats."""
    with torch.no_grad():
        return round(model(input_ids=rows, labels=second).loss.item() / math.log(2), 2)


print("softmax:", bits_per_byte(model), "bits per byte")

# %% [markdown]
# ## Swap
#
# `gated_linear` with `window=32` computes softmax over the latest 32 keys and a gated linear
# state over all earlier ones. The last layer keeps exact attention. The model is changed in
# memory, and `attnzoo.restore(model)` undoes it.

# %%
options = {"feature_map": "hedgehog_exp", "window": 32}
attnzoo.swap(model, "gated_linear", layers={"3": "flash"}, **options)
print("swapped:", bits_per_byte(model), "bits per byte")

# %% [markdown]
# The window alone is the baseline: what the linear state adds to it is what the swap is worth.
# Untrained, it adds noise.

# %%
attnzoo.swap(model, "flash", window=32, layers={"3": "flash"})
print("window alone:", bits_per_byte(model), "bits per byte")
attnzoo.swap(model, "gated_linear", layers={"3": "flash"}, **options)

# %% [markdown]
# ## Look
#
# `attnzoo.describe` says which implementation the last call of each layer ran, and why. Here, it
# was a decoded token.

# %%
prompt = tokenizer("import os\nimport ", return_tensors="pt", add_special_tokens=False)
new = model.generate(**prompt, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(new[0], skip_special_tokens=True))

# %%
for layer in attnzoo.describe(model):
    print(f"{layer.name}: {layer.backend} {layer.options}, {layer.extras:,} extras, {layer.impl}")

# %% [markdown]
# The state of a layer does not grow with the number of tokens; softmax keeps every key and value.

# %%
for length in (1024, 16384):
    cache = {
        name: attnzoo.estimate_memory(folder, spec, length=length).cache
        for name, spec in (
            ("softmax", "softmax"),
            ("gated_linear", attnzoo.AttentionSpec("gated_linear", **options)),
        )
    }
    print(f"{length} tokens:", *(f"{name} {size // 1024:,} KiB" for name, size in cache.items()))

# %% [markdown]
# ## Recover
#
# `attnzoo recover` trains the swapped layers to give softmax's output (transfer), and then the
# model to give its predictions (distillation), here on modules of Python's library. It prints the
# quality beside softmax, the raw swap and the window alone. A few steps show the direction;
# [recover.md](../recover.md) has settings that recover most of the gap.

# %%
library = Path(sysconfig.get_path("stdlib"))
command = [sys.executable, *shlex.split("-m attnzoo recover embedded --output-dir recovered")]
command += shlex.split("--attention gated_linear:feature_map=hedgehog_exp,window=32")
command += shlex.split("--layers 3=flash --max-length 256 --repeat-share 0.5")
command += shlex.split(
    "--per-device-train-batch-size 4 --transfer-steps 12 --max-steps 10 --train full"
)
command += shlex.split("--learning-rate 5e-4 --disable-tqdm True")
for name in ("json", "logging"):
    command += ["--data", str(library / name)]
print(subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout)

# %% [markdown]
# The folder has an ordinary checkpoint, whose config.json holds the swap. Where attnzoo is
# imported, `from_pretrained` loads it swapped, and `generate`, `Trainer` and PEFT work as before.
# Trained, the swap repeats text better than its window alone.

# %%
recovered = AutoModelForCausalLM.from_pretrained("recovered")
print("recovered:", bits_per_byte(recovered), "bits per byte")
new = recovered.generate(**prompt, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(new[0], skip_special_tokens=True))
