"""Rows with padding on the left, or of several documents: equal to the row or document alone."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close

import attnzoo
from attnzoo.backends.feature_maps.base import FEATURE_MAPS
from attnzoo.backends.gates.decays import GATES
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.models.rows import RowHook, documents_of
from attnzoo.registry import available_backends
from tests.helpers import MODEL_SIZES, redrawn, tiny_llama, tiny_llama_config
from tools.family_sweep.build import make_model

PADDING = 5
OPTIONS: dict[str, dict[str, Any]] = {
    "block_sparse": {"block_size": 2, "top_k": 1, "window": 3, "num_sinks": 1},
    "flash": {"window": 4, "num_sinks": 1},
    "linformer": {"block": 4, "num_rows": 2},
    "longformer": {"window": 4, "num_global": 1},
    "reformer": {"num_hashes": 2, "chunk_size": 4},
}
SIGNED = ("identity", "learned_linear")  # sums of their features may be 0
SWAPS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, OPTIONS.get(name, {})) for name in available_backends()},
    **{
        f"map {name}": ("linear", {"feature_map": name, "normalize": name not in SIGNED})
        for name in sorted(FEATURE_MAPS)
    },
    **{f"gate {name}": ("gated_linear", {"gate": name}) for name in sorted(GATES)},
    "window": ("linear", {"window": 3}),
    "convolution": ("delta", {"short_convolution": 3, "window": 3}),
    "maximum of keys": ("block_sparse", {**OPTIONS["block_sparse"], "score": "bounds"}),
}


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor]:
    """Tokens and their mask; the second row has padding."""
    ids = torch.randint(3, 59, (2, 14), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


def randomised(model: Any) -> Any:
    """Change the initial values of what backends added."""
    generator = torch.Generator().manual_seed(7)
    for name, x in model.named_parameters():
        if ".attnzoo." in name:
            x.data += 0.3 * torch.randn(x.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    "name",
    [  # maps and gates count no positions
        pytest.param(x, marks=[pytest.mark.exhaustive] if x[:4] in ("map ", "gate") else [])
        for x in SWAPS
    ],
)
def test_a_padded_row_equals_the_row_alone(name, rows):
    backend, options = SWAPS[name]
    model = randomised(attnzoo.swap(tiny_llama(rope_theta=500.0), backend, **options))
    classifier = redrawn(hf.LlamaForSequenceClassification(tiny_llama_config(num_labels=3)))
    randomised(attnzoo.swap(classifier, backend, **options))
    ids, mask = rows
    with torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=False).logits[1, PADDING:]
        alone = model(ids[1:, PADDING:], use_cache=False).logits[0]
        assert_close(found, alone, atol=2e-4, rtol=2e-4)
        labels = classifier(ids, attention_mask=mask, use_cache=False).logits[1]
        assert_close(labels, classifier(ids[1:, PADDING:]).logits[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("cut", [3, 9])
@pytest.mark.parametrize("backend", ["linear", "block_sparse", "flash"])
@pytest.mark.parametrize("static", [False, True])
def test_positions_continue_after_a_cache(backend, cut, static, rows):
    """Prompts in two calls and one decoded token, the first cut within the padding."""
    ids, mask = rows
    model = attnzoo.swap(tiny_llama(), {"backend": backend, "else": "flash"})
    config = model.config
    cache = hf.StaticCache(config, 20) if static else hf.DynamicCache(config=config)
    found = []
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        for begin, end in ((0, cut), (cut, 13), (13, 14)):
            given = {"attention_mask": mask[:, :end], **seam.cache_argument(cache)}
            found.append(model(ids[:, begin:end], **given).logits)
    real = mask.bool()
    assert_close(torch.cat(found, 1)[real], whole[real], atol=2e-4, rtol=2e-4)


def test_holes_keep_their_distances(rows):
    """Only padding on the left moves positions: softmax counts holes, and keeps its numbers."""
    ids, mask = rows
    mask = mask.clone()
    mask[:, 8:10] = 0
    model, seen = tiny_llama(), []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    attnzoo.swap(model, "linear", layers={"0": "softmax"})
    model(ids, attention_mask=mask)
    assert seen[0].tolist() == [list(range(14)), [0] * PADDING + list(range(9))]


def gpt2() -> Any:
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))


def opt() -> Any:
    sizes = {"word_embed_proj_dim": 32, "ffn_dim": 48, "max_position_embeddings": 64}
    return hf.OPTForCausalLM(hf.OPTConfig(**MODEL_SIZES, **sizes))


def qwen2_vl() -> Any:
    text = {**MODEL_SIZES, "num_key_value_heads": 2, "rope_theta": 500.0}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 500.0}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, image_token_id=98
    )
    return hf.Qwen2VLForConditionalGeneration(config)


def paligemma() -> Any:
    text = {**MODEL_SIZES, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision |= {"vision_use_head": False, "projection_dim": 32, "model_type": "siglip_vision_model"}
    config = hf.PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=98)
    return hf.PaliGemmaForConditionalGeneration(config)


@pytest.mark.filterwarnings("ignore:.*images will be refused")
@pytest.mark.parametrize(("build", "moves"), [(gpt2, False), (opt, False), (paligemma, True)])
def test_softmax_keeps_the_numbers_of_the_family(build, moves, rows):
    """Learned positions are counted as the family counts them; rotary ones move together."""
    ids, mask = rows
    model = redrawn(build())
    with torch.no_grad():
        stock = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        target = model.model.language_model if moves else model
        attnzoo.swap(target, "softmax", layers={"1": "linear"})
        attnzoo.swap(model, {"text_config": "softmax"} if moves else "softmax")
        found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert_close(found[mask.bool()], stock[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*images will be refused")
@pytest.mark.parametrize("build", [qwen2_vl, paligemma])
def test_texts_of_models_with_images(build, rows, tmp_path):
    """Their outer model counts positions, or passes none; both after loading."""
    ids, mask = rows
    model = redrawn(build())
    attnzoo.swap(model, {"text_config": "linear"})
    model.save_pretrained(tmp_path)
    for swapped in (model, type(model).from_pretrained(tmp_path)):
        with torch.no_grad():
            found = swapped(input_ids=ids, attention_mask=mask, use_cache=False).logits
            alone = swapped(input_ids=ids[1:, PADDING:], use_cache=False).logits
        assert_close(found[1, PADDING:], alone[0], atol=2e-4, rtol=2e-4)


@pytest.mark.filterwarnings("ignore:.*images will be refused")
@pytest.mark.parametrize("model_type", ["paligemma", "gemma4", "exaone4_5", "gemma3", "qwen3_vl"])
def test_the_inner_model_of_one_with_images(model_type, rows):
    """Outer models make the masks, and some make positions, which count padding."""
    model = make_model(model_type, 1.0)
    attnzoo.swap(model.model.language_model, {"backend": "linear", "else": "softmax"})
    ids, mask = rows[0] + 40, rows[1]
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    places = (mask.cumsum(1) - 1).clamp(min=0) + (model_type == "paligemma")
    with torch.no_grad():
        alone = model(input_ids=ids[1:, PADDING:], use_cache=False).logits[0]
        calls = [given | {"position_ids": places}]
        if model_type in ("gemma3", "qwen3_vl"):
            calls.append(given)
        else:
            with pytest.raises(UnsupportedError, match=r"row 1 .* same position_ids .* for all"):
                model(**given)
        for call in calls:
            found = model(**call).logits[1, PADDING:]
            assert_close(found, alone, atol=2e-4, rtol=2e-4)


def test_given_positions_stay(rows):
    """Those of M-RoPE have three or four rows."""
    ids, mask = rows
    model = attnzoo.swap(redrawn(qwen2_vl()).model.language_model, "linear")
    hook = next(x for x in model._forward_pre_hooks.values() if isinstance(x, RowHook))
    positions = torch.arange(14).expand(3, 2, -1)
    given = {"input_ids": ids, "attention_mask": mask}
    assert hook(model, (), {**given, "position_ids": positions}) is None
    assert hook(model, (), {**given, "attention_mask": None}) is None
    _, new = hook(model, (), given)
    assert new["position_ids"][1].tolist() == [0] * PADDING + list(range(9))
    model.set_attn_implementation("sdpa")
    assert hook(model, (), given) is None


def test_restored_models_count_as_before(rows):
    model = attnzoo.swap(tiny_llama(), "linear")
    attnzoo.restore(model)
    assert not model.model._forward_pre_hooks
    attnzoo.swap(model, "flash")
    (hook,) = model.model._forward_pre_hooks.values()
    given = {"input_ids": rows[0], "attention_mask": rows[1]}
    assert hook(model.model, (), given) is None, "softmax needs no other positions"


LENGTHS = (1, 6, 1, 4)
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]
ONES = torch.ones(2, 12, dtype=torch.long)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    ("build", "backend"), [(tiny_llama, "flash"), (tiny_llama, "linear"), (gpt2, "flash")]
)
def test_documents_beside_a_mask_of_ones_or_a_cache(build, backend, use_cache, masked):
    """Who comes from stock flash attention passes both, and mixed documents otherwise."""
    model = attnzoo.swap(redrawn(build()), backend)
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = {"attention_mask": ONES} if masked else {}
    with torch.no_grad():
        parts = [model(x, use_cache=False).logits for x in ids.split(LENGTHS, 1)]
        for places in (PLACES, PLACES.expand(2, -1)):
            found = model(ids, position_ids=places, use_cache=use_cache, **mask).logits
            assert_close(found, torch.cat(parts, 1), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("positions", "mask"),
    [
        ([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]], None),  # left padding, as generation counts it
        ([[1, 1, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5]], None),  # as earlier releases do
        ([[0, 1, 2, 2, 3, 3], [0, 1, 1, 1, 2, 2]], None),  # trees
        ([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]], [[0, 1, 1, 1, 1, 1], [1] * 6]),  # padding
        ([[[0, 1, 0, 1, 0, 1]]] * 3, None),  # M-RoPE
    ],
)
def test_other_positions_separate_nothing(positions, mask):
    given = torch.ones(2, 6) if mask is None else torch.tensor(mask)
    assert documents_of(torch.tensor(positions), given, has_cache=True) is None


def test_positions_of_another_shape_are_refused(rows):
    model = attnzoo.swap(tiny_llama(), "flash")
    with pytest.raises(UnsupportedError, match=r"shape \(1, 1, 14\); pass \[batch, tokens\]"):
        model(rows[0], position_ids=torch.arange(14)[None, None])


def test_a_compiled_graph_refuses_documents_when_it_runs(rows):
    model = attnzoo.swap(tiny_llama(num_hidden_layers=1), "flash")
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    given = {"attention_mask": ONES, "use_cache": False}
    with torch.no_grad():
        ids = rows[0][:, :12]
        expected = model(ids, position_ids=torch.arange(12)[None], **given).logits
        assert_close(whole(ids, position_ids=torch.arange(12)[None], **given).logits, expected)
        with pytest.raises(RuntimeError, match="position_ids begin again"):
            whole(ids, position_ids=PLACES, **given)


def test_padding_on_the_left_of_a_model_without_positions_is_refused(rows):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 99}
    config = hf.DiaConfig(encoder_config=sizes, decoder_config=sizes)
    model = attnzoo.swap(redrawn(hf.DiaModel(config).encoder), "linear")
    ids, mask = rows
    with torch.no_grad():
        found = model(ids, attention_mask=mask.flip(1))[0][1, :-PADDING]
        assert_close(found, model(ids[1:, :-PADDING])[0][0], atol=2e-4, rtol=2e-4)
        with pytest.raises(UnsupportedError, match=r"row 1 .* DiaEncoder takes no position_ids"):
            model(ids, attention_mask=mask)
