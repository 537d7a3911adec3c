"""Model inputs derived from a signature: token ids, images, videos, audio and combinations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tools.family_sweep.configs import FIRST_WORD, VOCABULARY

ROWS, LENGTH = 3, 12
ROW_LENGTHS = (12, 7, 2)  # tokens of each row in a padded batch


@dataclass(frozen=True)
class ModelCall:
    """One way to call a model or a submodule."""

    kind: str
    part: str  # name of the submodule; empty for the whole model
    given: dict[str, Any]
    words: tuple[str, ...] = ()  # inputs with token ids; outputs are aligned with the last one
    steps: str = ""  # the input that is split in decoding

    def masks(self) -> dict[str, str]:
        """Return the name of the padding mask of each input with token ids."""
        return {
            name: "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
            for name in self.words
        }


def draw(*shape: int, seed: int = 2) -> Tensor:
    """Return normal random numbers with a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def words(seed: int = 1) -> Tensor:
    """Return random token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, VOCABULARY, (ROWS, LENGTH), generator=generator)


def padding(side: str) -> Tensor:
    """Return a padding mask ``[B, T]`` with zeros on one side of the shorter rows."""
    positions, lengths = torch.arange(LENGTH), torch.tensor(ROW_LENGTHS)[:, None]
    return (positions >= LENGTH - lengths if side == "left" else positions < lengths).long()


def parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of a module's forward."""
    return dict(inspect.signature(inspect.unwrap(type(module).forward)).parameters)


def find(config: Any, *names: str, default: int) -> int:
    """Return the first field of a config or its nested configs that is an integer."""
    for owner in (
        config,
        *(getattr(config, key, None) for key in getattr(config, "sub_configs", {})),
    ):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, list | tuple) and value:
                value = value[-1]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def candidate_calls(module: nn.Module, part: str = "") -> Iterator[ModelCall]:
    """Yield possible calls of a module; some of them may raise errors."""
    takes = parameters(module)
    config: Any = getattr(module, "config", None)
    visual = dict(images(takes, config))
    acoustic = dict(audio(takes, config))
    coupled = {"decoder_input_ids": words(3)} if "decoder_input_ids" in takes else {}
    steps = "decoder_input_ids" if coupled else ""
    if "input_ids" in takes:
        text = {"input_ids": words()}
        names = ("input_ids", *coupled)
        yield ModelCall(
            "coupled" if coupled else "text", part, text | coupled, names, steps or "input_ids"
        )
        for kind, given in (visual | acoustic).items():
            yield ModelCall(f"text and {kind}", part, text | coupled | given, names, "")
    for kind, given in (visual | acoustic).items():
        yield ModelCall(
            f"{kind} to text" if coupled else kind, part, given | coupled, tuple(coupled), steps
        )
    for kind, given in series(takes, config):
        yield ModelCall(kind, part, given)
    if "inputs_embeds" in takes and "input_ids" not in takes:
        width = find(config, "hidden_size", "d_model", default=32)
        yield ModelCall("embeddings", part, {"inputs_embeds": draw(ROWS, LENGTH, width)})
    if "hidden_states" in takes and not visual:
        width = find(config, "hidden_size", "d_model", default=32)
        yield ModelCall("embeddings", part, {"hidden_states": draw(ROWS, LENGTH, width)})


def series(takes: dict[str, Any], config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield time series in the layouts that a signature accepts."""
    if "past_values" not in takes:
        return
    past = find(config, "context_length", default=32)
    if "past_time_features" in takes:
        past += max(getattr(config, "lags_sequence", None) or (0,))
        future = find(config, "prediction_length", default=4)
        features = find(config, "num_time_features", default=0)
        yield (
            "time series",
            {
                "past_values": draw(ROWS, past),
                "past_time_features": draw(ROWS, past, features),
                "past_observed_mask": torch.ones(ROWS, past),
                "future_values": draw(ROWS, future, seed=3),
                "future_time_features": draw(ROWS, future, features, seed=3),
            },
        )
    channels = find(config, "num_input_channels", default=1)
    yield "time series", {"past_values": draw(ROWS, past, channels)}
    if "freq" in takes:
        none = torch.zeros(ROWS, past, dtype=torch.long)
        extra = {"past_values_padding": none, "freq": torch.zeros(ROWS, 1, dtype=torch.long)}
        yield "time series", {"past_values": draw(ROWS, past), **extra}
    yield "time series", {"past_values": draw(ROWS, past)}


def images(takes: dict[str, Any], config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield images and videos in the layouts that a signature accepts."""
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    size = find(config, "image_size", "img_size", default=16)
    patch = find(config, "patch_size", default=4)
    frames = find(config, "num_frames", "tubelet_size", default=2)
    time = find(config, "temporal_patch_size", "patch_temporal", default=1)
    flat = channels * time * patch * patch
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    for grids in ("grid_thw", "image_grid_thw"):
        if grids in takes:
            name = next(
                (n for n in ("pixel_values", "hidden_states") if n in takes), "pixel_values"
            )
            yield "patches", {name: draw(32, flat), grids: grid}
    if "pixel_values" in takes:
        if "spatial_shapes" in takes:
            yield (
                "patches",
                {
                    "pixel_values": draw(2, 16, channels * patch * patch),
                    "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
                    "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
                },
            )
        yield "image", {"pixel_values": draw(ROWS, channels, size, size)}
        yield "film", {"pixel_values": draw(ROWS, frames, channels, size, size)}
    if "pixel_values_videos" in takes:
        yield "film", {"pixel_values_videos": draw(ROWS, frames, channels, size, size)}


def audio(takes: dict[str, Any], config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield audio in the layouts that a signature accepts."""
    mel = find(config, "num_mel_bins", "input_feat_size", "feature_size", default=8)
    time = 2 * find(config, "max_source_positions", default=20)
    for name in ("input_features", "audio_features", "audio_values"):
        if name in takes:
            yield "spectrogram", {name: draw(ROWS, mel, time)}
            yield "spectrogram, time first", {name: draw(ROWS, 40, mel)}
    for name in ("input_values", "audio_values"):
        if name in takes:
            yield "waveform", {name: draw(ROWS, 400)}
            yield "long waveform", {name: draw(ROWS, 4000)}
            yield "waveform with a channel", {name: draw(ROWS, 1, 400)}
            yield "spectrogram", {name: draw(ROWS, 40, mel)}
