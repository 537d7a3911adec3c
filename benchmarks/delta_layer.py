"""Train one layer of the embedded model to imitate softmax with delta; print its errors.

    python -m benchmarks.delta_layer --layer 2 --attention delta:feature_map=hedgehog_exp,window=32

Inputs and outputs of the layer are recorded once under softmax; a step of 8 rows takes 0.2 s of one
core. The errors are squared errors on held-out rows, relative to softmax's output, over all tokens
and over the second copies of segments, before and after training. They are printed for the window
alone, for the layer itself, and for the layer with softmax's own mixing weights or with softmax's
output beyond the window. The difference shows which part limits the layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from attnzoo.commands.options import spec_of
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.evaluation.corpus import add_repeats
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.rows import Rows
from attnzoo.registry import build_backend
from attnzoo.spec import AttentionSpec
from attnzoo.training.data import RowOptions, load_rows
from attnzoo.training.loading import load_causal
from attnzoo.training.transfer import Transfer, relative_error, swapped_layers
from benchmarks.recover import data

BATCH, TRAIN, HELD_OUT = 8, 20, 3  # rows per batch, and batches
Errors = dict[str, list[float]]


class Batch(NamedTuple):
    """Inputs of the layer, softmax's output for them, and a mask of the second copies."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden_states: Tensor
    mask: AttentionMask
    exact: Tensor  # [B, H, T, E]
    copies: Tensor  # [B, T] bool

    def run(self, backend: Any) -> Tensor:
        """Return the backend's output."""
        given = {"hidden_states": self.hidden_states, "mask": self.mask}
        out: Tensor = backend(self.q, self.k, self.v, **given).out
        return out

    def split(self, rows: int) -> list[Batch]:
        """Return batches of ``rows`` rows."""
        ids = self.mask.segment_ids
        found = []
        for first in range(0, len(self.q), rows):
            own = slice(first, first + rows)
            mask = replace(self.mask, segment_ids=None if ids is None else ids[own])
            parts = [x[own] for x in (self.q, self.k, self.v, self.hidden_states)]
            found.append(Batch(*parts, mask, self.exact[own], self.copies[own]))
        return found


def record(number: int) -> tuple[list[Batch], list[Batch], Any]:
    """Record training and held-out batches of a layer; return them and the layer's geometry."""
    path = embedded_model_path()
    train, held_out = load_rows(path, data(), RowOptions(repeat_share=0.5))
    model = load_causal(path, AttentionSpec("delta", window=32)).eval()
    backend = list(swapped_layers(model).values())[number]
    exact = build_backend("flash", {}, backend.geometry)
    found: list[Batch] = []
    copies = torch.zeros(0)

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        out = exact(*args, mask=kwargs["mask"], scale=kwargs["scale"]).out
        found.append(Batch(*args, kwargs["hidden_states"], kwargs["mask"], out, copies))

    backend.register_forward_pre_hook(hook, with_kwargs=True)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    rows = order[: BATCH * TRAIN]
    tokens, positions = train.tokens[rows], train.positions[rows]
    judged, places = (x[: BATCH * HELD_OUT].clone() for x in (held_out.tokens, held_out.positions))
    copied = Rows(tokens=judged, positions=places, bytes_per_token=1.0)
    repeats = add_repeats(copied, torch.Generator().manual_seed(0))
    second = torch.zeros_like(judged, dtype=torch.bool)
    for row, repeat in zip(second, repeats, strict=True):
        if repeat is not None:
            row[repeat.second + 4 : repeat.second + repeat.length] = True
    tokens, positions = torch.cat([tokens, judged]), torch.cat([positions, places])
    second = torch.cat([torch.zeros(len(rows), judged.shape[1], dtype=torch.bool), second])
    with torch.no_grad(), Transfer(model):
        for first in range(0, len(tokens), BATCH):
            own = slice(first, first + BATCH)
            copies = second[own]
            model(input_ids=tokens[own], position_ids=positions[own], use_cache=False)
    return found[:TRAIN], found[TRAIN:], backend.geometry


@torch.no_grad()
def branches(backend: Any, x: Batch) -> dict[str, Tensor]:
    """Return the layer's output, the window's, and variants with parts of softmax's output."""
    geometry, scale = backend.geometry, backend.geometry.scale
    groups = geometry.num_heads // geometry.num_key_heads
    k, v = (y.repeat_interleave(groups, 1).float() for y in (x.k, x.v))
    length = k.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = x.mask.dense(length, length, k.device)
    weights = (x.q.float() @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    beyond = weights * (distance >= backend.config.window)
    share = beyond.sum(-1, keepdim=True)
    far = beyond @ v / share.clamp(min=1e-9)
    near = (weights - beyond) @ v / (1 - share).clamp(min=1e-9)
    lse = (x.q.float() @ k.mT * scale).masked_fill(
        ~(seen & (distance < backend.config.window)), -torch.inf
    )
    inputs = AttentionInputs(x.q, x.k, x.v, x.mask, scale=scale, hidden_states=x.hidden_states)
    state = backend.attend_state(inputs).out.float()
    mixing = backend.mixing_weight(inputs, lse.logsumexp(-1, keepdim=True))
    return {
        "window alone": near,
        "own": x.run(backend),
        "softmax's mixing": torch.lerp(near, state, share),
        "softmax's far output": torch.lerp(near, far, mixing),
    }


def errors(backend: Any, batches: list[Batch]) -> Errors:
    """Return the relative squared errors over all tokens and over second copies."""
    backend.eval()
    sums: dict[str, Tensor] = {}
    norm = torch.zeros(2)
    for x in batches:
        weights = torch.stack([torch.ones_like(x.copies), x.copies]).float()[:, :, None, :, None]
        norm += (weights * x.exact.float().square()).flatten(1).sum(1)
        for name, out in branches(backend, x).items():
            error = (weights * (out.float() - x.exact.float()).square()).flatten(1).sum(1)
            sums[name] = sums.get(name, torch.zeros(2)) + error
    backend.train()
    return {name: [round(float(y), 4) for y in total / norm] for name, total in sums.items()}


def main(
    layer: Annotated[int, typer.Option(help="index of the layer")] = 2,
    steps: Annotated[int, typer.Option(help="steps of transfer")] = 60,
    attention: str = "delta:feature_map=hedgehog_exp,window=32",
    lr: float = 2e-2,
    rows: Annotated[int, typer.Option(help="rows per step, a divisor of 8")] = BATCH,
) -> None:
    """Train one layer and print its errors: all tokens, second copies."""
    train, held_out, geometry = record(layer)
    torch.manual_seed(0)
    entry = spec_of(attention).default
    backend: Any = build_backend(entry.backend, entry.options, geometry)
    print("before", errors(backend, held_out), flush=True)
    parameters = list(backend.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    parts = [part for x in train for part in x.split(rows)]
    for step in range(steps):
        x = parts[step % len(parts)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = relative_error(x.run(backend), x.exact, x.mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    print("after", steps, "steps", errors(backend, held_out), flush=True)


if __name__ == "__main__":
    typer.run(main)
