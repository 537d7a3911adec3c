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
# # Write a backend with a state
#
# A backend computes one mechanism in one attention layer. This one is linear attention
# ([arXiv:2006.16236](https://arxiv.org/abs/2006.16236)) with features elu(x) + 1: each query
# reads two sums over the keys so far, so that decoding needs these sums and no keys.
# [extending.md](../extending.md) has the rules, and what else a backend may declare.
#
# ## Config and state
#
# The config class has the options, which `attnzoo.swap` and the command line accept by name. The
# state is a named tuple of tensors whose first dimension is the batch: beam search, static caches
# and saving then need no code.

# %%
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from attnzoo.contract import (
    AttentionBackend,
    AttentionInputs,
    AttentionOutput,
    BackendConfig,
    Capabilities,
    register,
)
from attnzoo.testing import ConformanceError, check_backend


@dataclass(frozen=True, kw_only=True)
class SumsConfig(BackendConfig):
    """Settings of the backend."""

    eps: float = 1e-6  # added to the denominator


class Sums(NamedTuple):
    """The state after the last token, in float32 or wider."""

    kv: torch.Tensor  # [B, Hkv, D, E]: the sum of the products of keys and values
    k: torch.Tensor  # [B, Hkv, D]: the sum of the keys


# %% [markdown]
# ## Attend
#
# `attend` receives queries `[B, H, T, D]`, keys and values `[B, Hkv, T, D]`, the mask, and the
# state after the earlier tokens, or `None` at the beginning. It returns the output and the state
# after the last token. This first version has a fault.


# %%
class SumsBackend(AttentionBackend):
    """Linear attention with features elu(x) + 1, by running sums."""

    config_class = SumsConfig
    config: SumsConfig
    capabilities = Capabilities(bidirectional=False, recurrent=True, zero_state=True)

    def keys(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return the features of the keys."""
        return F.elu(inputs.k) + 1

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Add up the tokens and read the sums."""
        dtype = torch.promote_types(inputs.v.dtype, torch.float32)
        q, k = (F.elu(inputs.q) + 1).to(dtype), self.keys(inputs).to(dtype)
        kv = (k.unsqueeze(-1) * inputs.v.to(dtype).unsqueeze(-2)).cumsum(2)  # [B, Hkv, T, D, E]
        k = k.cumsum(2)
        if inputs.state is not None:
            kv, k = kv + inputs.state.kv.unsqueeze(2), k + inputs.state.k.unsqueeze(2)
        groups = q.shape[1] // k.shape[1]  # query heads per key head
        total = torch.einsum("bhtd,bhtde->bhte", q, kv.repeat_interleave(groups, 1))
        weight = torch.einsum("bhtd,bhtd->bht", q, k.repeat_interleave(groups, 1))
        out = total / (weight + self.config.eps).unsqueeze(-1)
        state = Sums(kv[:, :, -1], k[:, :, -1]) if inputs.return_state else None
        return AttentionOutput(out.to(inputs.v.dtype), state)


# %% [markdown]
# ## Test
#
# `check_backend` runs the conformance suite. It finds that padding changes the result: values are
# zero at padding, but the features of the keys there are not, and they are in the denominator.

# %%
try:
    check_backend(SumsBackend, rules=("causality", "padding"))
except ConformanceError as error:
    print(error)

# %% [markdown]
# The mask says which tokens are padding. With it, the suite passes.


# %%
@register("sums")
class PaddedSumsBackend(SumsBackend):
    """Linear attention with features elu(x) + 1, by running sums; padding adds nothing."""

    def keys(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return the features of the keys, zero at padding."""
        features, padding = super().keys(inputs), inputs.mask.padding
        return features if padding is None else features * padding[:, None, :, None]


report = check_backend(PaddedSumsBackend)
print(len(report.passed), "rules passed:", *report.passed)

# %% [markdown]
# ## Use
#
# The registered name works wherever a backend is named. Decoding continues from the state, so the
# cache has the same size after any number of tokens.

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnzoo
from attnzoo.evaluation.models import embedded_model_path

folder = embedded_model_path()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
attnzoo.swap(model, "sums", layers={"2-3": "flash"}, eps=1e-5)
prompt = tokenizer("import os", return_tensors="pt", add_special_tokens=False)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]))
for length in (1024, 16384):
    print(length, "tokens:", attnzoo.estimate_memory(folder, "sums", length=length).cache, "bytes")

# %% [markdown]
# Untrained, the text is worse than softmax's; [swap_look_recover](swap_look_recover.py) trains a
# swap. A saved model stores the name of the backend and never its code: import the module that
# registers it before `from_pretrained`, or declare it as an entry point, as
# [cosine_attention](../../examples/cosine_attention/README.md) does.
