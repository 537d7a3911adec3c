"""The options of each backend that commands and tools try, by the use case.

A backend without an entry for a use case is tried with its default options. A package with a
backend of its own can add one: ``PRESETS["cosine"] = {"long": ({"temperature": 0.05},)}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attnzoo.registry import get_backend
from attnzoo.spec import AttentionSpec

Presets = Mapping[str, tuple[Mapping[str, Any], ...]]  # use case -> options to try

# Use cases: "short", a pretrained model on hundreds of tokens (demo); "long", on a thousand or more
# (compare); "bidirectional", an encoder (compare); "from_scratch", rows of at most 256 (tasks);
# "recovery", a plan; "tiny", tools/family_sweep. Without an entry, "bidirectional" is "long", and a
# plan has no candidate.
PRESETS: dict[str, Presets] = {
    "flash": {  # a window of 32 tokens is the control of approximations
        "short": ({}, {"window": 32}, {"window": 32, "num_sinks": 4}),
        "long": ({}, {"window": 32}, {"window": 32, "num_sinks": 4}),
        "bidirectional": ({}, {"window": 32}),
    },
    "linear": {
        "short": ({}, {"feature_map": "hedgehog"}, {"feature_map": "hedgehog", "window": 32}),
        "long": ({}, {"feature_map": "hedgehog", "window": 32}),
        # without pretrained softmax weights to imitate, plain products learn to recall best
        "from_scratch": ({"feature_map": "identity", "normalize": False},),
    },
    "gated_linear": {
        "short": ({"gate": "alibi"}, {"gate": "gla"}, {"gate": "gla", "window": 32}),
        "long": ({"gate": "gla"}, {"gate": "gla", "window": 32}),
        "from_scratch": (
            {"gate": "retnet", "feature_map": "identity", "normalize": False},
            {"gate": "gla", "feature_map": "identity", "normalize": False},
        ),
        "recovery": ({"feature_map": "hedgehog", "window": 32},),
    },
    "delta": {
        "short": ({"window": 32},),
        "long": ({"window": 32},),
        "from_scratch": ({},),
        "recovery": ({"feature_map": "squared_relu", "window": 32},),
    },
    "longformer": {
        "short": ({"window": 128},),
        "long": ({"window": 512},),
        "bidirectional": ({"window": 256},),  # on either side
        "from_scratch": ({"window": 16},),
        "recovery": ({"window": 128},),
        "tiny": ({"window": 3},),
    },
    "linformer": {
        "short": ({"block": 64},),
        # time is quadratic in the number of rows; attention within a block is exact
        "long": ({"block": 256, "num_rows": 8},),
        "bidirectional": ({"num_rows": 256},),
        "from_scratch": ({"block": 16},),
        "tiny": ({"block": 4, "num_rows": 2, "max_length": 512},),
    },
    "performer": {
        "long": ({"num_features": 128},),
        "from_scratch": ({"num_features": 64},),
    },
    "reformer": {
        "short": ({"chunk_size": 16},),  # 8 hash rounds, window 32: at most 164 of 512 keys
        "long": ({"num_hashes": 4},),
        "from_scratch": ({"num_hashes": 4, "chunk_size": 16, "window": 8},),
        "recovery": ({"chunk_size": 16},),
        "tiny": ({"chunk_size": 4},),
    },
    "block_sparse": {
        "short": ({"top_k": 10},),  # at most 123 of 512 keys, 105 on average
        "long": ({"block_size": 32, "window": 64},),  # at most 483 keys
        "from_scratch": ({"window": 8, "top_k": 4, "num_sinks": 0},),
        "recovery": ({"top_k": 10},),
        "tiny": ({"window": 3, "top_k": 1, "block_size": 2, "num_sinks": 1},),
    },
}


def preset_options(name: str, *use_cases: str) -> tuple[Mapping[str, Any], ...]:
    """Return the options of a backend in a use case; the defaults if it has no presets for it.

    Args:
        name: Name of the backend.
        use_cases: Keys of an entry of :data:`PRESETS`; the first that the entry has is used.

    Raises:
        UnknownBackendError: No backend has this name.
    """
    get_backend(name)  # a plugin that it imports may add presets
    presets = PRESETS.get(name, {})
    return next((presets[key] for key in use_cases if key in presets), ({},))


def preset_specs(names: Iterable[str], *use_cases: str) -> list[AttentionSpec]:
    """Return a spec for each preset of the given backends.

    Args:
        names: Names of backends.
        use_cases: As in ``preset_options``.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    return [
        AttentionSpec(name, **options)
        for name in names
        for options in preset_options(name, *use_cases)
    ]
