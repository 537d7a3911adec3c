"""Check that attnzoo works with the installed transformers and torch, once for each version.

Versions that the tests run with (:data:`attnzoo.hf.seam.TESTED`) need no check. With any
other, the first swap runs tiny models in every cache mode and compares them with one pass without a
cache. The verdict is kept in attnzoo's cache folder.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from attnzoo.autoload import FAILED_PATCHES
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.names import NAME
from attnzoo.runtime.verdicts import FAILED, PASSED, Verdict, decide

TOKENS, PROMPT = 9, 6  # of the models' input
SPECS = (  # options of a layer's spec: a recurrent state, a rolling window, all keys
    {"backend": "linear", "options": {"impl": "torch"}},
    {"backend": "flash", "options": {"window": 4, "impl": "sdpa"}},
    {"backend": "softmax"},
)
SIZES: dict[str, Any] = {  # of the tiny models, whose large weights make attention far from uniform
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_running = threading.local()


def require_working_release() -> None:
    """Raise if attnzoo does not work with the installed transformers or torch."""
    if getattr(_running, "value", False):  # the check itself builds models
        return
    # patches are applied when their modules are imported, which may be after an earlier swap
    reason = "; ".join(FAILED_PATCHES.values()) or _refusal()
    if reason:
        versions = ", ".join(f"{name} {number}" for name, number in installed_versions().items())
        raise UnsupportedError(
            f"attnzoo {_own_version()} does not work with {versions}: {reason}. {seam.HOW_TO_GO_ON}"
        )


@cache
def _refusal() -> str:
    """Return why the check of the installed versions failed, or ``""``."""
    found = installed_versions()
    if not untested(found):
        return ""
    identity = {"attnzoo": _own_version(), "source": _source_hash(), **found}
    return decide("release-swap", identity, check_release).reason


def _own_version() -> str:
    return str(getattr(sys.modules["attnzoo"], "__version__", ""))


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages in ``TESTED``, without local parts such as ``+cpu``."""
    return {name: version(name).partition("+")[0] for name in seam.TESTED}


def untested(found: dict[str, str]) -> list[str]:
    """Return the packages whose version the tests of this release do not run with."""
    return [name for name, number in found.items() if number not in seam.TESTED[name]]


def _source_hash() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def check_release() -> Verdict:
    """Run all checks; the verdict's reason lists all that failed."""
    _running.value = True
    dtype = torch.get_default_dtype()
    try:
        # while a model is built, its data type is the default, and the meta device may be
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            reasons = {name: _why(check) for name, check in CHECKS.items()}
    finally:
        torch.set_default_dtype(dtype)
        _running.value = False
    failed = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    return Verdict(FAILED, "; ".join(failed)) if failed else Verdict(PASSED)


def _why(check: Callable[[], Iterator[str]]) -> str:
    """Return what a check found to be wrong, or ``""``."""
    try:
        return ", ".join(check())
    except Exception as error:  # whatever transformers raises is a reason
        first_line = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first_line[:300].rstrip('.')}"


def _tiny_llama(specs: Sequence[Mapping[str, Any]] = SPECS) -> Any:
    """Return a model with one layer per spec, swapped by its config; stock without specs."""
    from transformers import LlamaConfig, LlamaForCausalLM  # only where the check runs

    config = LlamaConfig(**SIZES | {"num_hidden_layers": len(SPECS)})
    if specs:
        config.attnzoo = {**specs[0], "layers": {str(i): spec for i, spec in enumerate(specs)}}
    torch.manual_seed(0)
    implementation = NAME if specs else "eager"
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def _prompts() -> tuple[Tensor, Tensor]:
    """Return token ids ``[2, TOKENS]``, and a mask with left padding."""
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % 31 + 1
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return ids, mask


def _caches() -> Iterator[str]:
    """Compare a prompt and single tokens, in each kind of cache, with one pass without a cache."""
    model, (ids, mask) = _tiny_llama(), _prompts()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    caches = {
        "a dynamic cache": DynamicCache(config=model.config),
        "a static cache": StaticCache(config=model.config, max_cache_len=TOKENS),
    }
    for name, cache_ in caches.items():
        parts = []
        for begin, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, TOKENS))):
            output = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                use_cache=True,
                **seam.cache_argument(cache_),
            )
            parts.append(output.logits)
            kinds = [type(layer).__name__ for layer in cache_.layers]
            if not all("State" in kind for kind in kinds[:2]):
                yield f"{name} holds no states, but {', '.join(kinds)}"
                return
        if not _close(torch.cat(parts, 1), expected, mask):
            yield f"decoding with {name} differs from one pass"


def _generate() -> Iterator[str]:
    """Compare ``generate`` with a padded prompt with the same without a cache."""
    model, (ids, mask) = _tiny_llama(), _prompts()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    cached = model.generate(ids, **options)
    if not torch.equal(cached, model.generate(ids, **options, use_cache=False)):
        yield "generate with a cache differs from generate without"


def _stock_attention() -> Iterator[str]:
    """Compare the backend ``softmax`` with the model's own attention."""
    ids, mask = _prompts()
    stock, swapped = (
        _tiny_llama(specs)(ids, attention_mask=mask, use_cache=False).logits
        for specs in ((), (SPECS[-1],) * len(SPECS))
    )
    if not _close(swapped, stock, mask):
        yield "softmax differs from the model's own attention"


def _close(ours: Tensor, expected: Tensor, mask: Tensor) -> bool:
    real = mask.bool()
    tolerance = 1e-4 * expected[real].abs().max()
    return bool((ours[real] - expected[real]).abs().max() <= tolerance)


CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "stock attention": _stock_attention,
    "caches": _caches,
    "generation": _generate,
}
