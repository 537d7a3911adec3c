"""Every description of packed rows: logits of the sequences alone, or a refusal."""

from functools import cache
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.seam import cache_argument
from tests.helpers import MODEL_SIZES, redrawn, tiny_llama
from tests.hf.models.test_row_positions import gpt2, opt

LENGTHS = (7, 3, 9, 1)
TOKENS = sum(LENGTHS)
IDS = torch.randint(3, 99, (1, TOKENS), generator=torch.Generator().manual_seed(5))
SEQ_IDX = torch.repeat_interleave(torch.tensor(LENGTHS))[None]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]
DIFFER = "packed sequences of .* and of .* differ"
EQUAL: dict[str, dict[str, Any]] = {
    "seq_idx": {"seq_idx": SEQ_IDX},
    "lengths": {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS},
    "lengths of keys": {"cu_seq_lens_k": BOUNDS},
    "positions": {"position_ids": PLACES},
    "all": {"seq_idx": SEQ_IDX, "cu_seq_lens_q": BOUNDS, "position_ids": PLACES},
    "positions of the row": {"seq_idx": SEQ_IDX, "position_ids": torch.arange(TOKENS)[None]},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one seq_idx": ({"position_ids": PLACES, "seq_idx": torch.zeros(1, TOKENS).int()}, DIFFER),
    "fewer lengths": ({"position_ids": PLACES, "cu_seq_lens_q": BOUNDS[[0, 2, 4]]}, DIFFER),
    "other seq_idx": ({"cu_seq_lens_q": BOUNDS, "seq_idx": torch.arange(TOKENS)[None]}, DIFFER),
    "a list": ({"cu_seq_lens_q": BOUNDS.tolist()}, "cu_seq_lens_q is a list; pass a tensor"),
    "lists": ({"seq_idx": SEQ_IDX.tolist()}, r"seq_idx is a list; pass a tensor \[batch, tokens"),
}
CACHES: dict[str, dict[str, Any]] = {
    "default": {},
    "None": {"use_cache": None},
    "True": {"use_cache": True},
    "False": {"use_cache": False},
}


def roberta() -> Any:
    """Positions begin at 2: the rows before are padding."""
    sizes = {"max_position_embeddings": 30, "type_vocab_size": 1}
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**MODEL_SIZES, **sizes))


def biogpt() -> Any:
    return hf.BioGptForCausalLM(hf.BioGptConfig(**MODEL_SIZES, max_position_embeddings=30))


def bart() -> Any:
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "vocab_size": 99}
    return hf.BartForCausalLM(hf.BartConfig(**sizes, decoder_ffn_dim=48))


def llama() -> Any:
    return tiny_llama(rope_theta=500.0)


MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama flash": (llama, "flash", {}),
    "llama linear": (llama, "linear", {"feature_map": "hedgehog", "window": 4}),
    "llama gated_linear": (llama, "gated_linear", {}),
    "llama performer": (llama, "performer", {}),
    "gpt2 flash": (gpt2, "flash", {}),
    "gpt2 linear": (gpt2, "linear", {"window": 4}),
    "opt linear": (opt, "linear", {}),
    "biogpt flash": (biogpt, "flash", {}),
    "roberta linear": (roberta, "linear", {}),
}


@cache
def swapped(name: str) -> tuple[Any, Tensor]:
    """A swapped model, and the logits of the sequences alone."""
    build, backend, options = MODELS[name]
    model = attnzoo.swap(redrawn(build()), backend, **options).eval()
    with torch.no_grad():
        parts = [model(x).logits for x in IDS.split(LENGTHS, 1)]
    return model, torch.cat(parts, 1)


def shifted(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments with positions as the family counts them."""
    moved = {"position_ids": given["position_ids"] + 2} if "position_ids" in given else {}
    return given | moved if name.startswith("roberta") else given


def caches(name: str) -> list[dict[str, Any]]:
    return [{}] if name.startswith("roberta") else list(CACHES.values())


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_equal_those_alone(name):
    model, expected = swapped(name)
    ways = {k: x for k, x in EQUAL.items() if k != "positions" or not name.startswith("roberta")}
    for given in ways.values():
        for cached in caches(name):
            with torch.no_grad():
                found = model(IDS, **shifted(name, given), **cached).logits
            assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_descriptions_that_disagree_are_refused(name):
    model, _ = swapped(name)
    for given, message in REFUSED.values():
        for cached in caches(name):
            with pytest.raises(UnsupportedError, match=message):
                model(IDS, **shifted(name, given), **cached)


def test_training_with_labels_and_peft():
    """A call with labels, as a trainer makes it, and the same under PEFT."""
    model, expected = swapped("llama linear")
    model.train()
    lora = peft.get_peft_model(llama_copy(model), peft.LoraConfig(target_modules=["q_proj"]))
    for trained in (model, lora.train()):
        found = trained(IDS, seq_idx=SEQ_IDX, labels=IDS).logits
        assert_close(found, expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(UnsupportedError, match=DIFFER):
            trained(IDS, labels=IDS, **REFUSED["one seq_idx"][0])
    model.eval()


def llama_copy(model: Any) -> Any:
    copy = attnzoo.swap(llama(), "linear", feature_map="hedgehog", window=4)
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.parametrize("name", ["llama linear", "gpt2 flash", "opt linear"])
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
def test_beside_padding_sequences_begin_at_their_first_real_token(name, marked):
    """Padding before, between and after sequences, with an index of its own or of a neighbour."""
    model, expected = swapped(name)
    pad = torch.full((1, 3), -1) if marked else torch.zeros(1, 3).long()
    between = pad if marked else pad + 1
    parts, indices = IDS.split([7, 13], 1), SEQ_IDX.split([7, 13], 1)
    gap = torch.full((1, 3), 4)
    ids = torch.cat([gap, parts[0], gap, parts[1], gap], 1)
    last = pad if marked else pad + 3
    seq_idx = torch.cat([pad, indices[0], between, indices[1], last], 1)
    mask = torch.ones_like(ids)
    mask[:, :3] = mask[:, 10:13] = mask[:, -3:] = 0
    for cached in CACHES.values():
        with torch.no_grad():
            found = model(ids, attention_mask=mask, seq_idx=seq_idx, **cached).logits
        assert_close(found[mask.bool()][None], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("static", [False, True])
def test_empty_caches(static):
    model, expected = swapped("llama linear")
    config = model.config
    empty = hf.StaticCache(config, 30) if static else hf.DynamicCache(config=config)
    with torch.no_grad():
        found = model(IDS, seq_idx=SEQ_IDX, **cache_argument(empty)).logits
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_models_without_an_argument_of_positions():
    """Those that embed positions refuse such rows; relative positions need no others."""
    model = attnzoo.swap(redrawn(bart()), "flash")
    model(IDS, seq_idx=SEQ_IDX * 0)
    for given in ({"seq_idx": SEQ_IDX}, {"cu_seq_lens_k": BOUNDS}, {"position_ids": PLACES}):
        with pytest.raises(UnsupportedError, match=r"BartDecoder .* takes no position_ids"):
            model(IDS, **given)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    encoder = attnzoo.swap(redrawn(hf.T5EncoderModel(hf.T5Config(**sizes, num_heads=4))), "flash")
    with torch.no_grad():
        parts = [encoder(input_ids=x)[0] for x in IDS.split(LENGTHS, 1)]
        found = encoder(input_ids=IDS, seq_idx=SEQ_IDX)[0]
    assert_close(found, torch.cat(parts, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
def test_compiled_calls():
    torch._dynamo.reset()
    model = attnzoo.swap(tiny_llama(num_hidden_layers=1, rope_theta=500.0), "linear")
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = torch.cat([model(x).logits for x in IDS.split(LENGTHS, 1)], 1)
        for given in (EQUAL["seq_idx"], {"seq_idx": SEQ_IDX * 0}):
            found = whole(IDS, **given, use_cache=False).logits
            one = model(IDS).logits
            assert_close(found, expected if given["seq_idx"].any() else one, atol=1e-4, rtol=1e-4)
        found = whole(IDS, **EQUAL["all"], use_cache=False).logits
        assert_close(found, expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(RuntimeError, match=r"packed sequences of .*, position_ids differ"):
            whole(IDS, **EQUAL["all"] | {"position_ids": PLACES.flip(1)}, use_cache=False)
