"""Run a model plain, padded, packed, under a 4-D mask and in decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnzoo.hf import seam
from attnzoo.hf.seam import cache_argument, output_cache
from tools.family_sweep.inputs import (
    LENGTH,
    ROW_LENGTHS,
    ROWS,
    ModelCall,
    padding,
    parameters,
    words,
)
from tools.family_sweep.recipes import JOINT_MASKS

CUTS = (7, 8, 9, 12)  # ends of the prompt and of the decoding calls after it
NOT_COMPARED = {
    *seam.CACHE,
    "attentions",
    "hidden_states",
    "cross_attentions",
    "router_logits",
}

Run = Callable[[], list[Tensor]]


def redraw(model: nn.Module, gain: float, seed: int = 5) -> nn.Module:
    """Draw large weights, because the usual small ones make all attention uniform.

    Args:
        model: Changed in place.
        gain: Standard deviation times the square root of the fan-in.
        seed: Seed.
    """
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for module in model.modules():
        conv = isinstance(module, nn.modules.conv._ConvNd)
        for parameter in module.parameters(recurse=False):
            if id(parameter) in done or not parameter.is_floating_point():
                continue
            done.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                if parameter.ndim > 1:
                    inputs = parameter[0].numel() if conv else parameter.shape[-1]
                    parameter.copy_(gain * noise * max(inputs, 1) ** -0.5)
                else:
                    parameter.add_(0.1 * noise)
    return model.eval()


def tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output, without caches and hidden states."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if hasattr(output, "items"):
        return [
            x for name, part in output.items() if name not in NOT_COMPARED for x in tensors(part)
        ]
    if isinstance(output, list | tuple):
        return [x for part in output for x in tensors(part)]
    return []


def dense_mask() -> Tensor:
    """Return a random causal mask, ``[B, 1, T, S]`` bool."""
    generator = torch.Generator().manual_seed(4)
    visible = torch.rand(ROWS, 1, LENGTH, LENGTH, generator=generator) > 0.4
    return (visible | torch.eye(LENGTH, dtype=torch.bool)).tril()


def additive(visible: Tensor) -> Tensor:
    """Return a bool mask as 0 and the minimum of float32."""
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


def by_token(found: list[Tensor]) -> list[Tensor]:
    """Return the outputs that have a vector for each token."""
    return [x for x in found if x.ndim > 2]


class Probe:
    """One call of one model, in several variants.

    Args:
        model: The whole model.
        case: The call of the model or a submodule.
    """

    def __init__(self, model: nn.Module, case: ModelCall) -> None:
        self.case = case
        self.module = model.get_submodule(case.part)
        self.takes = parameters(self.module)

    def call(self, given: dict[str, Any], **more: Any) -> Any:
        """Call the module with a fixed seed and without gradients."""
        torch.manual_seed(0)
        with torch.no_grad():
            return self.module(**given, **more)

    def plain(self) -> list[Tensor]:
        """Return the outputs of the call as it is."""
        return tensors(self.call(self.case.given, **self._no_cache()))

    def padded(self, side: str, seed: int = 1) -> list[Tensor]:
        """Return the outputs with padding; outputs at padding are zero.

        Args:
            side: ``"left"`` or ``"right"``.
            seed: Seed of the token ids at padding.
        """
        padding_mask = padding(side)
        other = words(seed + 100)
        given = dict(self.case.given)
        for name, mask in self.case.masks().items():
            given[name] = torch.where(padding_mask.bool(), given[name], other)
            joint = name.startswith("decoder") and type(self.module).__name__ in JOINT_MASKS
            given[mask] = torch.cat([padding_mask, padding_mask], 1) if joint else padding_mask
        output = tensors(self.call(given, **self._no_cache()))
        return self.of_tokens(output, padding_mask)

    def of_tokens(self, output: list[Tensor], padding_mask: Tensor) -> list[Tensor]:
        """Return the outputs that have a row per token, zeroed at padding."""
        kept = [x for x in output if x.ndim > 2 and x.shape[:2] == padding_mask.shape]
        if not kept:
            raise LookupError("no output has a row per token")
        return [x * padding_mask.view(*padding_mask.shape, *[1] * (x.ndim - 2)) for x in kept]

    def alone(self) -> list[Tensor]:
        """Return the outputs of each row of :meth:`padded` without the others, where they were."""
        (name,) = self.case.words
        rows = []
        for row, length in enumerate(ROW_LENGTHS):
            given = {**self.case.given, name: self.case.given[name][row : row + 1, -length:]}
            output = tensors(self.call(given, **self._no_cache()))
            rows.append([x for x in output if x.ndim > 2 and x.shape[:2] == (1, length)])
        places = [(0, 0) * (x.ndim - 2) for x in rows[0]]
        return [
            torch.cat([pad(x, (*at, LENGTH - x.shape[1], 0)) for x in column])
            for at, column in zip(places, zip(*rows, strict=True), strict=True)
        ]

    def packed(self) -> list[Tensor]:
        """Return the outputs of two sequences packed in one row, separated by their positions."""
        name = self.case.steps
        positions = torch.cat([torch.arange(7), torch.arange(LENGTH - 7)])[None]
        given = {**self.case.given, name: self.case.given[name][:1], "position_ids": positions}
        return tensors(self.call(given, **self._no_cache()))

    def packed_alone(self) -> list[Tensor]:
        """Return the outputs of the two sequences of :meth:`packed`, each alone."""
        name, parts = self.case.steps, []
        for own in (slice(7), slice(7, None)):
            tokens = self.case.given[name][:1, own]
            given = {**self.case.given, name: tokens}
            given["position_ids"] = torch.arange(tokens.shape[1])[None]
            parts.append(by_token(tensors(self.call(given, **self._no_cache()))))
        return [torch.cat(both, 1) for both in zip(*parts, strict=True)]

    def dense(self) -> list[Tensor]:
        """Return the outputs under a random causal 4-D mask."""
        given = {**self.case.given, "attention_mask": additive(dense_mask())}
        return tensors(self.call(given, **self._no_cache()))

    def decoded(self) -> list[Tensor]:
        """Return the outputs of a prompt, then of one, one and three tokens with a cache."""
        return [self.in_steps(lambda begin, end: {})]

    def in_steps(self, more: Callable[[int, int], dict[str, Any]]) -> Tensor:
        """Return the outputs of calls with a cache, joined.

        Args:
            more: Returns the further arguments of the call with tokens ``begin`` to ``end``.
        """
        name, cache, parts, begin = self.case.steps, None, [], 0
        for end in CUTS:
            given = {**self.case.given, name: self.case.given[name][:, begin:end]}
            given |= more(begin, end)
            output = self.call(given, **cache_argument(cache), use_cache=True)
            cache, begin = output_cache(output), end
            parts.append(output.logits if "logits" in output else output.last_hidden_state)
        return torch.cat(parts, 1)

    def variants(self) -> Iterator[tuple[str, Run]]:
        """Yield the variants that the signature allows, by name."""
        yield "plain", self.plain
        if self.case.words and set(self.case.masks().values()) <= self.takes.keys():
            yield "left padding", lambda: self.padded("left")
            yield "right padding", lambda: self.padded("right")
        if self.case.kind == "text":
            if "position_ids" in self.takes and not self.is_recurrent():
                yield "packed", self.packed
            yield "4-D mask", self.dense
        if self.case.steps and seam.CACHE_ARGUMENT in self.takes:
            yield "decoding", self.decoded

    def is_recurrent(self) -> bool:
        """Return whether stock layers mix packed documents, which a swap refuses therefore."""
        return any(map(seam.has_recurrent_layers, seam.pretrained_models(self.module)))

    def _no_cache(self) -> dict[str, Any]:
        return {"use_cache": False} if "use_cache" in self.takes else {}


def layers_run(model: nn.Module, run: Run) -> set[str]:
    """Return the names of the attention layers that a call executes."""
    seen: set[str] = set()
    hooks = [
        layer.register_forward_pre_hook(lambda *_, name=name: seen.add(name))
        for name, layer in model.named_modules()
        if seam.calls_attention_interface(layer)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen
