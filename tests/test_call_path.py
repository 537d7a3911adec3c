"""The files and the functions of attnzoo that one layer of a model runs (docs/architecture.md)."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

import attnzoo
from attnzoo.hf import seam

# Of the package, not any file below a folder of that name: a clone may be called attnzoo too.
OWN_FILES = str(Path(attnzoo.__file__).parent / "_")[:-1]
PATHS = {  # backend and options; most files and calls of a prompt, and of a token after it
    "hybrid": ("linear", {"window": 32, "feature_map": "hedgehog"}, (14, 99), (11, 55)),
    "linear": ("linear", {}, (10, 61), (11, 49)),
    "delta": ("delta", {}, (14, 76), (12, 57)),
    "block_sparse": ("block_sparse", {}, (13, 100), (11, 67)),
    "flash": ("flash", {"window": 32}, (13, 64), (12, 55)),
    "gated window": ("gated_linear", {"window": 32}, (18, 120), (15, 64)),
    "performer": ("performer", {}, (13, 75), (14, 65)),
    "reformer": ("reformer", {}, (14, 139), (10, 41)),
}


def calls_of(run):
    """Return the result of a function, and the file of each call of a function of attnzoo."""
    files = []

    def count(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(OWN_FILES):
            files.append(name.removeprefix(OWN_FILES))

    sys.setprofile(count)
    try:
        return run(), files
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", PATHS)
def test_files_and_calls_of_a_layer(name):
    """A prompt of 600 tokens with a cache in C++, and one token, after one warm call of each."""
    backend, options, *most = PATHS[name]
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = attnzoo.swap(LlamaModel(config).eval(), backend, **options)
    prompt = torch.arange(600)[None] % 64

    def run(ids, cache=None):
        arguments = seam.cache_argument(cache)
        return calls_of(lambda: model(ids, use_cache=True, **arguments))

    with torch.no_grad():
        for _ in range(2):  # the first calls compile
            out, prefill = run(prompt)
            assert {x.impl for x in attnzoo.describe(model)} == {"cpp"}
            _, token = run(prompt[:, :1], seam.output_cache(out))
    for files, (most_files, most_calls) in zip((prefill, token), most, strict=True):
        assert 0 < len(set(files)) <= most_files, sorted(set(files))
        assert len(files) <= most_calls
