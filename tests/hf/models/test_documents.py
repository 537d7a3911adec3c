"""Rows of several documents in models with recurrent layers: as the documents alone, or refused."""

from __future__ import annotations

import copy
from functools import cache
from importlib.metadata import version
from itertools import product

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.models.rows import PACKED_HYBRIDS
from attnzoo.hf.seam import cache_argument, output_cache
from tests.helpers import run_torch_functions
from tools.family_sweep.configs import shrink
from tools.family_sweep.probe import redraw

FAMILIES = sorted(PACKED_HYBRIDS)
UNSUPPORTED = {  # changes of tiny configs
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},  # its head drops the arguments
    "qwen4_exp_text": {  # an indexer of blocks mixes tokens, too
        **{"indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_head_dim": 8},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1},
    },
}
LENGTHS = (5, 1, 7, 3)  # documents of a row; the second is shorter than all convolutions
OTHERS = (4, 9, 2, 1)  # of another row
TAIL = 3  # tokens of padding
REFUSED = "refused"


@pytest.fixture(autouse=True)
def torch_functions(monkeypatch):
    """Let stock layers run torch's functions where flash-linear-attention is installed."""
    run_torch_functions(monkeypatch, *({*FAMILIES, *UNSUPPORTED} & {*CONFIG_MAPPING}))


def make(family):
    """Return a small random model with a layer of each kind."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {family}")
    torch.manual_seed(0)
    config = shrink(CONFIG_MAPPING[family], UNSUPPORTED.get(family, {}))
    return redraw(AutoModelForCausalLM.from_config(config), 1.0).eval()


@cache
def models(family):
    """Return a model, and a copy that is sped up."""
    stock = make(family)
    return stock, attnzoo.speed_up(copy.deepcopy(stock))


def words(length, seed):
    return torch.randint(40, 99, (1, length), generator=torch.Generator().manual_seed(seed))


@cache
def alone(family, lengths):
    """Return the documents of a row, and their logits when each runs alone in the stock model."""
    documents = [words(n, 10 + i) for i, n in enumerate(lengths)]
    with torch.no_grad():
        logits = [models(family)[0](x, use_cache=False).logits for x in documents]
    return torch.cat(documents, 1), torch.cat(logits, 1)


def borders(lengths):
    cumulative = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "seq_idx": torch.repeat_interleave(torch.tensor(lengths))[None].int(),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative.clone(),
    }


def some(*names):
    return lambda lengths: {name: borders(lengths)[name] for name in names}


WAYS = {  # arguments, by the lengths of the documents
    "seq_idx": some("seq_idx"),
    "positions": some("position_ids"),
    "lengths": some("cu_seq_lens_q", "cu_seq_lens_k"),
    "lengths of keys": some("cu_seq_lens_k"),
    "lengths and positions": some("cu_seq_lens_q", "position_ids"),
    "all": some("seq_idx", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"),
    "seq_idx, and positions of the row": lambda n: (
        some("seq_idx")(n) | {"position_ids": torch.arange(sum(n))[None]}
    ),
    "lengths that begin later": lambda n: {"cu_seq_lens_q": borders(n)["cu_seq_lens_q"][1:]},
    "lengths that disagree": lambda n: (
        some("position_ids")(n) | {"cu_seq_lens_q": torch.tensor([0, 2, sum(n)])}
    ),
}
CACHES = {
    "none": lambda model: {"use_cache": False},
    "default": lambda model: {},
    "requested": lambda model: {"use_cache": True},
    "given": lambda model: cache_argument(DynamicCache(config=model.config)),
}
MASKS = ("none", "ones", "right", "left", "tail")  # the last is padding that no mask hides


def padded(name, x, side):
    """Return an argument of a row with padding on one side, where nothing says what it is."""
    if name.startswith("cu"):
        return torch.cat([x[:1], x + TAIL]) if side == "left" else x
    value = {"input_ids": 3, "seq_idx": -1, "position_ids": 1}[name]
    fill = torch.full_like(x[:, :1], value).expand(-1, TAIL)
    return torch.cat([fill, x] if side == "left" else [x, fill], 1)


def run(model, ids, given, mask, cached):
    """Return the logits of the real tokens, or ``REFUSED``."""
    length = ids.shape[1]
    given, real = {"input_ids": ids} | given, torch.ones_like(ids)
    if mask in ("left", "right", "tail"):
        given = {name: padded(name, x, mask) for name, x in given.items()}
        zeros = torch.zeros_like(ids[:, :1]).expand(-1, TAIL)
        real = torch.cat([zeros, real] if mask == "left" else [real, zeros], 1)
    if mask not in ("none", "tail"):
        given["attention_mask"] = real
    with torch.no_grad():
        try:
            logits = model(**given, **CACHES[cached](model)).logits
        except UnsupportedError:
            return REFUSED
    return logits[:, -length:] if mask == "left" else logits[:, :length]


def check(family, way, cached, mask, model=None):
    """Assert that a call is right or refused, and return which."""
    ids, expected = alone(family, LENGTHS)
    found = run(model or models(family)[1], ids, WAYS[way](LENGTHS), mask, cached)
    if isinstance(found, str):
        return found
    assert_close(found, expected, atol=3e-4, rtol=1e-3)
    return "right"


CASES = list(product(WAYS, CACHES, MASKS))


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_row_are_those_alone_or_refused(family):
    ids, expected = alone(family, LENGTHS)
    stock, ours = models(family)
    with torch.no_grad():
        for model in (stock, ours):
            mixed = model(ids, use_cache=False).logits
            assert (mixed - expected).abs().amax() > 0.01, "the test would not see a leak"
    found = [check(family, *case) for case in CASES[FAMILIES.index(family) :: len(FAMILIES)]]
    assert {"right", REFUSED} == {*found}
    for mask in MASKS:  # as transformers' collators give them
        assert check(family, "all", "none", mask) == "right"
        assert check(family, "positions", "default", mask) == "right"


@pytest.mark.skipif(version("transformers") != seam.TESTED["transformers"][1], reason="not newest")
def test_families_are_those_of_transformers():
    assert {*CONFIG_MAPPING} >= PACKED_HYBRIDS


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_all_ways_to_give_documents(family):
    for way, cached, mask in CASES:
        wrong = way.startswith("lengths that") or cached in ("requested", "given")
        wrong |= (way, mask) == ("seq_idx, and positions of the row", "tail")  # they disagree there
        assert check(family, way, cached, mask) == (REFUSED if wrong else "right")


@pytest.mark.parametrize("backend", ["flash", "linear"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "falcon_h1"])
def test_swapped_layers_get_the_same_documents(family, backend):
    model = attnzoo.swap(attnzoo.speed_up(make(family)), backend)
    ids, _ = alone(family, LENGTHS)
    with torch.no_grad():
        rows = [model(x, use_cache=False).logits for x in ids.split(LENGTHS, 1)]
        for way, mask in product(("seq_idx", "positions", "lengths", "all"), MASKS):
            found = run(model, ids, WAYS[way](LENGTHS), mask, "default")
            assert_close(found, torch.cat(rows, 1), atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_gradients_of_several_rows_are_those_of_the_documents(family):
    """Two rows with other documents, one of them longer; by indices beside positions."""
    stock, ours = models(family)
    rows = [alone(family, x)[0] for x in (LENGTHS, OTHERS)]
    documents = [x for row, n in zip(rows, (LENGTHS, OTHERS), strict=True) for x in row.split(n, 1)]
    weight = torch.randn(99, generator=torch.Generator().manual_seed(3))
    found = []
    for model, calls in ((stock, [({}, x) for x in documents]), (ours, [(None, rows)])):
        parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        for given, ids in calls:
            if given is None:
                given = [some("seq_idx", "position_ids")(n) for n in (LENGTHS, OTHERS)]
                given = {name: torch.cat([x[name] for x in given]) for name in given[0]}
                ids = torch.cat(ids)
            values = dict(zip(names, parameters, strict=True))
            output = torch.func.functional_call(
                model, values, (ids,), {**given, "use_cache": False}
            )
            (output.logits * weight).sum().backward()
        found.append([p.grad for p in parameters])
    for expected, grad in zip(*found, strict=True):
        if expected is not None:
            assert (grad - expected).norm() <= 1e-3 * expected.norm().clamp(min=1e-3)


def test_arguments_that_not_all_layers_can_get_are_refused():
    _, ours = models("qwen3_5_text")
    ids, _ = alone("qwen3_5_text", LENGTHS)
    given = some("position_ids")(LENGTHS)
    dense = torch.ones(1, 1, 16, 16).tril().bool()
    with pytest.raises(UnsupportedError, match="no call can continue from packed rows"):
        ours(ids, **given, use_cache=True)
    with pytest.raises(UnsupportedError, match=r"cu_seq_lens_q is \[5, 16\] for 16 tokens"):
        ours(ids, cu_seq_lens_q=torch.tensor([5, 16]))
    with pytest.raises(UnsupportedError, match="put all sequences into one"):
        ours(ids.expand(2, -1), cu_seq_lens_q=torch.tensor([0, 9, 16]))
    with pytest.raises(UnsupportedError, match=r"seq_idx has the shape \(1, 15\)"):
        ours(ids, seq_idx=torch.zeros(1, 15, dtype=torch.int))
    with pytest.raises(UnsupportedError, match="the attention_mask is not"):
        ours(ids, **given, attention_mask=dense)
    with pytest.raises(UnsupportedError, match="seq_idx and an attention_mask are given"):
        ours(ids, **some("seq_idx")(LENGTHS), attention_mask=dense)
    hole = torch.ones_like(ids)
    hole[0, 8] = 0
    with pytest.raises(UnsupportedError, match="row 0 goes on after padding, at token 9"):
        ours(ids, **some("seq_idx")(LENGTHS), attention_mask=hole)
    layer = ours.model.layers[0].linear_attn
    with pytest.raises(UnsupportedError, match="call the model, which is sped up"):
        layer(torch.zeros(1, 16, 32), seq_idx=torch.zeros(1, 15))


def test_other_positions_delimit_no_documents():
    """Padding on the left, a continued prompt, positions of trees, one document by indices."""
    stock, ours = models("qwen3_5_text")
    ids, _ = alone("qwen3_5_text", LENGTHS)
    with torch.no_grad():
        for given in (
            {"position_ids": torch.arange(16)[None] + 7, "use_cache": False},
            {"position_ids": torch.tensor([[0, 1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8, 9, 9, 9]])},
            {"attention_mask": (torch.arange(16) > 3).long()[None]}
            | {"position_ids": (torch.arange(16) - 4).clamp(min=0)[None]},
        ):
            output = ours(ids, **given)
            assert (output_cache(output) is None) == ("use_cache" in given)
            assert_close(output.logits, stock(ids, **given).logits, atol=3e-4, rtol=1e-3)
        one = ours(ids, seq_idx=torch.full((1, 16), 4), cu_seq_lens_q=torch.tensor([0, 16]))
        assert output_cache(one) is not None
        assert_close(one.logits, stock(ids).logits, atol=3e-4, rtol=1e-3)
        kinds = torch.arange(16).expand(4, 1, -1) + torch.tensor([0, 9, 9, 9])[:, None, None]
        found = ours(ids, position_ids=kinds[1:], **some("seq_idx")(LENGTHS)).logits  # M-RoPE
        assert_close(found, alone("qwen3_5_text", LENGTHS)[1], atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_decoded_token_of_padding_is_refused(family):
    _, ours = models(family)
    ids, mask = words(6, 3).expand(2, -1), torch.ones(2, 7)
    cache = output_cache(ours(ids))
    mask[1, 6] = 0
    with pytest.raises(UnsupportedError, match="row 1 is a single token of padding"):
        ours(ids[:, :1], **cache_argument(cache), attention_mask=mask)
    mask[1] = torch.tensor([0, 0, 1, 1, 1, 1, 1])
    ours(ids[:, :1], **cache_argument(cache), attention_mask=mask)


@pytest.mark.parametrize("family", ["bamba"])
def test_swaps_beside_stock_recurrent_layers(family):
    """These mix documents, so a swap refuses them until the model is sped up."""
    ids, _ = alone(family, LENGTHS)
    model = attnzoo.swap(make(family), "flash")
    for way in ("seq_idx", "positions", "lengths"):
        with pytest.raises(UnsupportedError, match=r"call attnzoo.speed_up\(model\) first"):
            model(ids, **WAYS[way](LENGTHS), use_cache=False)
    with torch.no_grad():
        mixed = models(family)[0](ids, **WAYS["positions"](LENGTHS), use_cache=False).logits
        model.set_attn_implementation("sdpa")  # the stock model
        found = model(ids, **WAYS["positions"](LENGTHS), use_cache=False).logits
        assert_close(found, mixed)
        model.set_attn_implementation("attnzoo")
        attnzoo.speed_up(model)
        assert check(family, "positions", "none", "none", model) == "right"
        attnzoo.restore(model)
        found = model(ids, **WAYS["positions"](LENGTHS), use_cache=False).logits
        assert_close(found, mixed)
    assert not any(x._forward_pre_hooks for x in model.modules())


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_models_with_layers_that_get_no_borders_are_refused(family):
    model, ids = models(family)[1], words(16, 3)
    for way in ("seq_idx", "positions", "lengths"):
        with pytest.raises(UnsupportedError, match="would get them"):
            model(ids, **WAYS[way](LENGTHS), use_cache=False)
    model(ids, position_ids=torch.arange(16)[None])


@pytest.mark.parametrize(
    ("family", "ways"),
    [("qwen3_5_text", ["lengths and positions"])]
    + [
        pytest.param(family, ["lengths", "seq_idx", "positions"], marks=pytest.mark.exhaustive)
        for family in ("qwen3_next", "granitemoehybrid", "nemotron_h")
    ],
)
def test_compiled_rows_of_other_numbers_of_documents(family, ways):
    _, ours = models(family)
    torch._dynamo.reset()
    compiled = torch.compile(ours.model, backend="eager", fullgraph=True)
    scale = getattr(ours.config, "logits_scaling", 1)
    with torch.no_grad():
        for way, lengths in product(ways, (LENGTHS, (4, 1, 2, 8, 1))):
            ids, expected = alone(family, lengths)
            given = WAYS[way](lengths)
            if "cu_seq_lens_q" in given:
                torch._dynamo.mark_dynamic(given["cu_seq_lens_q"], 0)  # one graph for all
            hidden = compiled(ids, **given, use_cache=False).last_hidden_state
            assert_close(ours.lm_head(hidden) / scale, expected, atol=3e-4, rtol=1e-3)
        if family != "qwen3_5_text":
            return
        ids, _ = alone(family, (7, 9))
        for given, match in (
            (WAYS["lengths that begin later"]((7, 9)), "cumulative lengths begin with 0"),
            (WAYS["lengths that disagree"]((7, 9)), "of cu_seq_lens_q, position_ids differ"),
        ):
            given = {"position_ids": torch.arange(16)[None]} | given
            with pytest.raises(RuntimeError, match=match):
                compiled(ids, **given, use_cache=False)
        with pytest.raises(RuntimeError, match="this compiled model supports one document a row"):
            compiled(ids, **WAYS["positions"]((7, 9)), use_cache=True)
