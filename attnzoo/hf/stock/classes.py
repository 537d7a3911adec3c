"""The table of stock classes: what each can hold, of which families, and which engines run it.

A stock class is a model class of transformers, which other engines implement too. The statements
about engines hold for the versions of ``ENGINES``; docs/serving.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

ENGINES = {"vllm": "vLLM 0.32", "llama.cpp": "llama.cpp b11549"}

_REFUSES_SOME = "refuses windows of some layers; right with `--model-impl transformers`"
_NOT_WINDOWS = "ignores windows without a warning"


class Windows(Enum):
    """Which sliding windows the layers of a class can have."""

    NONE = "no windows"
    ALL = "one window, in every layer"
    SOME = "one window, in any of its layers"
    SAME = "one window, in the layers that have one already"  # other layers have other positions


@dataclass(frozen=True, kw_only=True)
class StockClass:
    """What a model class of transformers can hold.

    Attributes:
        family: The ``model_type`` of its config.
        windows: Which sliding windows its layers can have.
        takes: The other families whose weights it can hold.
        needs_windows: Whether it takes only models with a window; others are faster in a class
            without (``mellum``), and llama.cpp aborts (``granite_swa``).
        recurrent: Name of its recurrent layers, which layers can become; ``""`` if it has none.
        engines: What the engines of ``ENGINES`` do with its windows, by the engine's name.
    """

    family: str
    windows: Windows
    takes: frozenset[str] = frozenset()
    needs_windows: bool = False
    recurrent: str = ""
    engines: Mapping[str, str] = field(default_factory=dict)


# Families with the tensors of Llama, without biases
_LLAMAS = frozenset({"llama", "mistral", "ministral"})

STOCK_CLASSES = {
    entry.family: entry
    for entry in (
        StockClass(family="llama", windows=Windows.NONE, takes=_LLAMAS - {"llama"}),
        StockClass(
            family="mistral",
            windows=Windows.ALL,
            takes=_LLAMAS - {"mistral"},
            engines={"vllm": "right", "llama.cpp": _NOT_WINDOWS},
        ),
        StockClass(
            family="ministral",
            windows=Windows.SOME,
            takes=_LLAMAS - {"ministral"},
            engines={"vllm": "right", "llama.cpp": "refuses the class"},
        ),
        StockClass(
            family="granite_swa",
            windows=Windows.SOME,
            takes=_LLAMAS | {"qwen2"},
            needs_windows=True,
            engines={"vllm": "right", "llama.cpp": "right"},
        ),
        StockClass(
            family="qwen2",
            windows=Windows.SOME,
            takes=_LLAMAS,
            engines={"vllm": _REFUSES_SOME, "llama.cpp": _NOT_WINDOWS},
        ),
        StockClass(
            family="qwen3",
            windows=Windows.SOME,
            engines={"vllm": _REFUSES_SOME, "llama.cpp": _NOT_WINDOWS},
        ),
        StockClass(
            family="mellum",
            windows=Windows.SAME,
            takes=frozenset({"qwen3"}),
            needs_windows=True,
            engines={"vllm": "right", "llama.cpp": "right"},
        ),
        StockClass(
            family="qwen3_5_text",
            windows=Windows.NONE,
            takes=frozenset({"qwen3"}),
            recurrent="Gated DeltaNet",
        ),
        StockClass(
            family="granitemoehybrid",
            windows=Windows.NONE,
            takes=_LLAMAS,
            recurrent="Mamba-2",
        ),
        StockClass(family="gemma2", windows=Windows.SOME),
        StockClass(family="gemma3_text", windows=Windows.SAME),
        StockClass(family="gemma4_text", windows=Windows.SAME),
        StockClass(family="gpt_oss", windows=Windows.SOME),
        StockClass(family="olmo3", windows=Windows.SAME),
        StockClass(family="cohere2", windows=Windows.SAME),
        StockClass(family="smollm3", windows=Windows.SOME),
        StockClass(family="mixtral", windows=Windows.ALL),
        StockClass(family="phi3", windows=Windows.ALL),
        StockClass(family="starcoder2", windows=Windows.ALL),
    )
}


def stock_class(family: str) -> StockClass:
    """Return the entry of a family; one without an entry has no windows, and takes no other."""
    return STOCK_CLASSES.get(family) or StockClass(family=family, windows=Windows.NONE)


def classes_for(family: str) -> list[StockClass]:
    """Return the classes that can hold the weights of a family, its own one first."""
    others = (x for x in STOCK_CLASSES.values() if family in x.takes)
    return [stock_class(family), *others]


def windowed_class(family: str) -> str:
    """Return a class with windows that holds the models which a recurrent class takes.

    Args:
        family: The family of the recurrent class.
    """
    takes = stock_class(family).takes
    return next(x.family for x in STOCK_CLASSES.values() if x.needs_windows and x.takes & takes)
