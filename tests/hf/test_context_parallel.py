"""Context parallelism: outputs, losses and gradients equal one process; refusals."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import attnzoo
from attnzoo.contract.config import Geometry
from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import AttnzooError, SpecError, UnsupportedError
from attnzoo.hf import context_parallel as cp
from attnzoo.hf.swap import original_attention
from attnzoo.registry import build_backend

SCRIPT = Path(__file__).with_name("context_parallel_ranks.py")
TOLERANCE = 1e-5  # relative to one process in float64


def load():
    spec = importlib.util.spec_from_file_location("context_parallel_ranks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANKS = load()


@pytest.fixture(scope="module")
def errors(fresh_python, tmp_path_factory):
    """Run every case on 4 processes, and some on 2 pairs; return the largest errors over ranks."""
    out = tmp_path_factory.mktemp("ranks")
    done = fresh_python(SCRIPT, out, processes=4)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for rank in range(4):
        for name, errors in json.loads((out / f"{rank}.json").read_text()).items():
            found.setdefault(name, []).append(errors)
    assert {len(ranks) for ranks in found.values()} == {4}
    return {name: [max(x) for x in zip(*ranks, strict=True)] for name, ranks in found.items()}


def sizes(cases):
    """Return each case with each number of processes."""
    return [(case, size) for case in cases for size in (2, 4) if size == 4 or case in RANKS.OF_TWO]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), sizes(RANKS.CASES))
def test_backends_equal_one_process(errors, case, size):
    kinds = RANKS.CASES[case][-1]
    wrong = {k: e for k in kinds if max(e := errors[f"{case}/{k}/{size}"]) > TOLERANCE}
    assert not wrong, "outputs, gradients of inputs, of parameters: " + str(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), sizes(RANKS.MODELS))
def test_models_equal_one_process(errors, case, size):
    """Logits, the mean of the losses and of the gradients, through Accelerate's device meshes."""
    found = errors[f"{case}/model/{size}"]
    assert max(found) <= TOLERANCE, found


# -- refusals --------------------------------------------------------------------------------------


def shard(**changes):
    return SequenceShard(**{"group": None, "rank": 0, "size": 2, "length": 8, **changes})


def call(name, options=None, *, causal=True, mask=None, shard=None, **given):
    geometry = Geometry(
        num_heads=2,
        num_key_heads=2,
        head_dim=4,
        hidden_size=8,
        causal=causal,
        max_length=64,
        name="a layer",
    )
    backend = build_backend(name, options or {}, geometry)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    mask = mask or AttentionMask(causal=causal)
    return backend(q, k, v, mask=mask, shard=shard, hidden_states=torch.randn(1, 8, 8), **given)


IDS = torch.tensor([[0] * 5 + [1] * 11])


@pytest.mark.parametrize(
    ("name", "options", "given", "message"),
    [
        ("linformer", {"block": 4}, {}, "projects all keys of a sequence"),
        ("linformer", {}, {"causal": False}, "projects all keys of a sequence"),
        ("reformer", {}, {}, "buckets sort the tokens"),
        ("longformer", {"num_global": 1}, {}, "global tokens attend to all tokens"),
        ("linear", {}, {"return_state": True}, "use_cache=False"),
        ("linear", {"window": 3}, {"causal": False}, "a bidirectional window"),
        ("flash", {"window": 3}, {"causal": False}, "a bidirectional window"),
        ("linear", {}, {"shard": shard(length=9)}, "a shard has 9 tokens"),
        ("linear", {}, {"causal": False, "shard": shard(segment_ids=IDS)}, "packed without"),
        ("linear", {}, {"mask": AttentionMask(causal=True, padding=IDS[:, :8] == 0)}, "not of the"),
        ("flash", {}, {"bias": torch.zeros(1, 1, 8, 8)}, "additive bias"),
        ("softmax", {}, {"return_weights": True}, "no rank has all of them"),
    ],
)
def test_unsupported_calls_are_refused(name, options, given, message):
    given = {"shard": shard(), **given}
    with pytest.raises(UnsupportedError, match=message):
        call(name, options, **given)


def llama(**changes):
    config = hf.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        **changes,
    )
    return hf.LlamaForCausalLM(config)


def swapped(attention="linear", **options):
    model = llama()
    attnzoo.swap(model, attention, **options)
    return model


ROWS = {"input_ids": torch.arange(12).view(1, 12)}


@pytest.fixture
def two(monkeypatch):
    """Mock rank 0 of 2."""
    monkeypatch.setattr(cp, "_process_group", lambda group: None)
    monkeypatch.setattr(cp.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(cp.dist, "get_world_size", lambda group: 2)


def refuse(model, batch, message, kind=UnsupportedError):
    with pytest.raises(kind, match=message), attnzoo.context_parallel(model, batch):
        pass


@pytest.mark.usefixtures("two")
def test_unsupported_models_are_refused():
    refuse(llama(), ROWS, "not swapped", SpecError)
    refuse(swapped(layers={"1": "reformer"}), ROWS, "layers.1.self_attn.*reformer.*buckets")
    model = swapped()
    with original_attention(model):
        refuse(model, ROWS, "runs its original attention", SpecError)
    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    attnzoo.swap(t5, "flash", else_="softmax")
    refuse(t5, ROWS, "an encoder-decoder")
    model = swapped()
    model.config.layer_types = ["full_attention", "linear_attention"]
    refuse(model, ROWS, "other than attention mix tokens.*linear_attention")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = llama(rope_parameters=dynamic)
    attnzoo.swap(model, "linear")
    refuse(model, ROWS, "depend on the longest position")
    model = swapped()
    model.model.layers[0].self_attn.attnzoo.geometry = replace(
        model.model.layers[0].self_attn.attnzoo.geometry, position_bias=True
    )
    refuse(model, ROWS, "adds a position bias")
    model = swapped()
    model.conv = torch.nn.Conv1d(1, 1, 2)
    refuse(model, ROWS, "Conv1d")


@pytest.mark.usefixtures("two")
def test_unsupported_batches_are_refused():
    model, ids = swapped(), ROWS["input_ids"]
    refuse(model, {"input_ids": ids[:, :11]}, "11 tokens are not divisible by 2.*pad them to 12")
    refuse(model, {**ROWS, "cache_position": ids[0]}, "'cache_position' is not known")
    refuse(model, {**ROWS, "attention_mask": torch.ones(1, 1, 12, 12)}, "attention_mask is not")
    padded = torch.ones(1, 12)
    padded[0, 0] = 0
    refuse(model, {**ROWS, "attention_mask": padded}, "position_ids are missing")
    refuse(model, {**ROWS, "position_ids": ids[None]}, "position_ids are")
    bert = hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    attnzoo.swap(bert, "linear")
    refuse(bert, {**ROWS, "position_ids": ids, "labels": ids}, "not a causal LM")


@pytest.mark.usefixtures("two")
def test_labels_are_shifted_over_full_rows():
    labels = ROWS["input_ids"].clone()
    labels[0, 2] = -100
    with attnzoo.context_parallel(swapped(), {**ROWS, "labels": labels}) as local_batch:
        assert local_batch["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
        assert local_batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
        assert local_batch["shift_labels"].tolist() == [[1, -100, 3, 4, 5, 6]]
        assert float(local_batch["num_items_in_batch"]) == 10 / 2


def test_an_uninitialised_process_group_is_refused():
    refuse(swapped(), ROWS, "torch.distributed is not initialised")


def test_a_process_outside_of_the_group_is_refused(monkeypatch):
    monkeypatch.setattr(cp.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cp.dist, "get_rank", lambda group=None: 5 if group is None else -1)
    refused = pytest.raises(UnsupportedError, match=r"This process \(5\) is not in the given group")
    with refused, attnzoo.context_parallel(swapped(), ROWS, object()):
        pass


@pytest.mark.usefixtures("two")
def test_cumulative_lengths_are_refused():
    model = swapped()
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    refused = pytest.raises(AttnzooError, match="give position_ids instead")
    with attnzoo.context_parallel(model, ROWS) as local_batch, refused:
        model(**local_batch, use_cache=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_torchs_own_context_parallel_is_refused(monkeypatch):
    """torch splits rows in another order, and only its own attention exchanges keys."""
    import torch.distributed.tensor.experimental._context_parallel._attention as torchs

    def replaced(*args, **options):
        pytest.fail("never called")

    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    original = ("scaled_dot_product_attention", None)
    monkeypatch.setitem(torchs._replaced_functions, replaced, original)
    for attention, options in (("linear", {}), ("softmax", {}), ("flash", {"window": 4})):
        with pytest.raises(UnsupportedError, match="torch's context_parallel"):
            swapped(attention, **options)(**ROWS)


def test_flash_calls_the_function_that_torch_replaces(monkeypatch):
    import torch.distributed.tensor.experimental._context_parallel._attention as torchs

    calls, plain = [], F.scaled_dot_product_attention

    def ring(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        calls.append((attn_mask, is_causal))
        return plain(q, k, v, attn_mask, dropout_p, is_causal, **options)

    model = swapped("flash")
    expected = model(**ROWS).logits
    monkeypatch.setattr(F, "scaled_dot_product_attention", ring)
    monkeypatch.setitem(torchs._replaced_functions, ring, ("scaled_dot_product_attention", None))
    torch.testing.assert_close(model(**ROWS).logits, expected)
    assert calls == [(None, True)] * model.config.num_hidden_layers
