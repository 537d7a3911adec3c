"""The number of files and function calls in one call of a layer (docs/architecture.md)."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import attnzoo
from attnzoo.evaluation.models import embedded_model_path

# Of the package, not any file below a folder of that name: a clone may be called attnzoo too.
OWN_FILES = str(Path(attnzoo.__file__).parent / "_")[:-1]


@pytest.mark.parametrize(
    ("options", "most_files", "most_calls"),
    [({}, 12, 68), ({"window": 32, "feature_map": "hedgehog"}, 16, 138)],
)
def test_files_and_calls_of_a_layer(options, most_files, most_calls):
    """A forward pass in C++ without a cache, not counting transformers and torch."""
    model = attnzoo.swap(
        AutoModelForCausalLM.from_pretrained(embedded_model_path()), "linear", **options
    )
    layer, files = model.model.layers[1].self_attn, []
    forward = layer.forward

    def count(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(OWN_FILES):
            files.append(name)

    def counted(*args, **kwargs):
        sys.setprofile(count)
        try:
            return forward(*args, **kwargs)
        finally:
            sys.setprofile(None)

    layer.forward = counted
    with torch.no_grad():
        for _ in range(2):  # the first call compiles
            files.clear()
            model(torch.arange(64)[None], use_cache=False)
    assert {x.impl for x in attnzoo.describe(model)} == {"cpp"}
    assert 0 < len(set(files)) <= most_files, sorted(set(files))
    assert len(files) <= most_calls
