"""Windows, padding, packing and continuing prompts through torch's varlen kernel.

The kernel runs on CUDA only. Elsewhere a dense function with its documented semantics stands in.
"""

import json
from dataclasses import replace

import pytest
import torch

from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.evaluation.kernel_checks import check_kernels
from attnzoo.ops.flash import check_varlen, varlen, varlen_kernel, varlen_verdicts
from attnzoo.ops.flash.api import flash_attention
from attnzoo.ops.flash.call import FlashCall
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.runtime import kernel_groups
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.verdicts import FAILED, PASSED, Verdict
from tests.helpers import change_implementation, qkv
from tests.ops.dense_varlen import dense_varlen_attn, replace_kernel

ON_CUDA = torch.cuda.is_available()


@pytest.fixture
def kernel(monkeypatch):
    """Replace the kernel by the stand-in, and return the calls that it gets."""
    with replace_kernel(monkeypatch) as received:
        yield received


def padding(length, *counts):
    return torch.arange(length) >= length - torch.tensor(counts)[:, None]


SEGMENTS = (torch.arange(9) >= torch.tensor([[4], [7]])).long()
CASES = {
    "padding": (9, {"padding": padding(9, 9, 4)}),
    "gaps": (9, {"causal": True, "padding": torch.arange(18).view(2, 9) % 5 % 3 != 1}),
    "an empty row": (9, {"causal": True, "padding": padding(9, 3, 0)}),
    "segments": (9, {"causal": True, "segment_ids": SEGMENTS}),
    "segments of one": (
        9,
        {"segment_ids": torch.arange(9).expand(2, -1), "padding": padding(9, 9, 6)},
    ),
    "window": (9, {"window": (2, 1)}),
    "causal window": (9, {"causal": True, "window": (3, 5)}),
    "own key only": (9, {"causal": True, "window": (0, 0)}),
    "wide": (9, {"window": (2**62, 2**40)}),
    "window, padding": (9, {"causal": True, "window": (2, 0), "padding": padding(9, 9, 4)}),
    "right padding": (
        9,
        {"causal": True, "window": (2, 0), "padding": ~padding(9, 0, 3)},
    ),
    "window, segments": (9, {"window": (1, 2), "segment_ids": SEGMENTS}),
    "continuing": (4, {"causal": True, "q_offset": 5}),
    "static cache": (4, {"causal": True, "q_offset": 3}),
    "continuing, window": (4, {"causal": True, "q_offset": 5, "window": (2, 0)}),
    "one token": (1, {"causal": True, "q_offset": 8, "window": (2, 0)}),
    "continuing, padding": (
        4,
        {"causal": True, "q_offset": 5, "window": (3, 0), "padding": padding(9, 9, 2)},
    ),
    "continuing, segments": (4, {"causal": True, "q_offset": 5, "segment_ids": SEGMENTS}),
    "first tokens": (9, {"causal": True, "window": (2, 0), "num_sinks": 3}),
    "first tokens, padding": (
        9,
        {"causal": True, "window": (1, 0), "num_sinks": 2, "padding": padding(9, 9, 5)},
    ),
    "first tokens, right padding": (
        9,
        {"causal": True, "window": (0, 0), "num_sinks": 4, "padding": ~padding(9, 0, 6)},
    ),
    "first tokens, an empty row": (
        9,
        {"window": (1, 2), "num_sinks": 2, "padding": padding(9, 9, 0)},
    ),
    "first tokens, continuing": (
        4,
        {"causal": True, "q_offset": 4, "window": (2, 0), "num_sinks": 2},
    ),
    "first tokens, continuing, padding": (
        4,
        {
            "causal": True,
            "q_offset": 5,
            "window": (1, 0),
            "num_sinks": 3,
            "padding": padding(9, 9, 7),
        },
    ),
    "static cache, padding": (
        4,
        {"causal": True, "q_offset": 3, "padding": padding(9, 9, 7)},
    ),
}


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gets_what_equals_a_mask(case, heads, kernel):
    queries, fields = CASES[case]
    mask, tensors = AttentionMask(**fields), qkv(queries, 9, heads=heads)
    offset = mask.q_offset
    found = []
    for run in (
        lambda *x: varlen.run_varlen(FlashCall(*x, mask, 0.3)),
        lambda *x: softmax_attention(*x, scale=0.3, mask=mask).out,
    ):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = run(*leaves)
        if mask.padding is not None:  # queries at padding give zeros here
            out = out * mask.padding[:, offset : offset + queries][:, None, :, None]
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-11)
    assert len(kernel) == 1


def test_a_continuing_prompt_is_one_call_with_grouped_heads(kernel):
    mask = AttentionMask(causal=True, q_offset=5)
    varlen.run_varlen(FlashCall(*qkv(4, 9, heads=(4, 2)), mask, 0.3))
    (rows, keys, _, starts, key_starts, *longest), options = kernel[0]
    assert len(rows) == 8
    assert starts.tolist() == [0, 4, 8]
    assert key_starts.tolist() == [0, 9, 18]
    assert longest == [4, 9]
    assert options["window_size"] == (-1, 0)
    assert (len(keys), options["enable_gqa"]) == (18, True)


def test_keys_of_segments_without_queries_are_left_out(kernel):
    mask = AttentionMask(causal=True, q_offset=7, segment_ids=SEGMENTS)
    varlen.run_varlen(FlashCall(*qkv(2, 9), mask, 0.3))
    (_, _, _, starts, key_starts, *_), _ = kernel[0]
    assert starts.tolist() == [0, 2, 4]
    assert key_starts.tolist() == [0, 5, 7]  # of five and of two keys


@pytest.mark.parametrize(
    ("queries", "fields", "reason"),
    [
        (9, {"window": (2, 0), "padding": torch.arange(9).expand(2, -1) != 4}, "padding inside"),
        (9, {"function": lambda: None}, "a function"),
        (
            9,
            {"causal": True, "window": (2, 0), "num_sinks": 2, "segment_ids": SEGMENTS},
            "each segment has first tokens of its own",
        ),
        (4, {"causal": True, "q_offset": torch.tensor(5)}, "is a tensor"),
        (4, {"causal": True, "q_offset": 7}, "4 queries from position 7"),
        (4, {}, "not causal"),
        (4, {"causal": True, "q_offset": 3, "segment_ids": SEGMENTS}, "not the last of the keys"),
    ],
)
def test_unsupported_masks_raise(queries, fields, reason, kernel):
    tensors = [x[..., :8].repeat(1, 1, 1, 8)[..., :8].bfloat16() for x in qkv(queries, 9)]
    with pytest.raises(UnsupportedError, match=f"impl='varlen' cannot run .*{reason}"):
        flash_attention(*tensors, mask=AttentionMask(**fields), impl="varlen")


def test_unsupported_tensors_raise(kernel):
    x = torch.randn(1, 2, 9, 12)
    call = {"mask": AttentionMask(window=(2, 2)), "impl": "varlen"}
    with pytest.raises(UnsupportedError, match=r"q is torch.float32, .*no multiple of 8"):
        flash_attention(x, x, x, **call)
    x = torch.randn(1, 2, 9, 16).bfloat16()
    with pytest.raises(UnsupportedError, match=r"dropout of 0\.1"):
        flash_attention(x, x, x, dropout=0.1, **call)
    assert flash_attention(x, x, x, **call).impl.impl == "varlen"


@pytest.mark.skipif(ON_CUDA, reason="there is a GPU")
def test_without_a_gpu_the_kernel_is_refused_by_name():
    x = torch.randn(1, 2, 9, 16).bfloat16()
    with pytest.raises(UnsupportedError, match=r"the tensors are on cpu \(varlen runs on cuda\)"):
        flash_attention(x, x, x, mask=AttentionMask(window=(2, 2)), impl="varlen")


def test_a_torch_without_windows(monkeypatch):
    received = {}

    def older(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        received.update(is_causal=is_causal, heads=k.shape[1], q=q)
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    monkeypatch.setattr(varlen, "device_reasons", lambda device: [])
    varlen_kernel._parameters.cache_clear()
    q, k = torch.ones(1, 4, 5, 16).bfloat16(), torch.ones(1, 2, 5, 16).bfloat16()
    mask = AttentionMask(causal=True, segment_ids=(torch.arange(5) >= 2).long()[None])
    varlen.run_varlen(FlashCall(q, k, k, mask, 0.5))
    assert received["is_causal"]
    assert received["heads"] == 4
    assert received["q"].eq(2).all()  # the kernel multiplies by 16 ** -0.5 itself
    (reason,) = varlen.varlen_reasons(FlashCall(q, k, k, AttentionMask(window=(2, 2)), 0.5))
    assert "has no window" in reason
    varlen_kernel._parameters.cache_clear()


def test_compiled_windows_equal_eager_ones(kernel, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(  # a custom operator, of which only the shape is traced
        "torch.nn.attention.varlen.varlen_attn", torch.compiler.disable(dense_varlen_attn)
    )
    mask = AttentionMask(causal=True, window=(3, 0), q_offset=5)

    def attend(q, k, v):
        return varlen.run_varlen(FlashCall(q, k, v, mask, 0.3))

    tensors = qkv(4, 9)
    compiled = torch.compile(attend, backend="eager")(*tensors)
    torch.testing.assert_close(compiled, attend(*tensors))


# -- verdicts --------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch, tmp_path, kernel):
    """A device without a verdict; the value is what its check returns."""
    verdicts = [Verdict(PASSED)]
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_groups, "_STATE", kernel_groups._State())
    monkeypatch.setattr(
        varlen_verdicts, "device_identity", lambda device: {"device": "NVIDIA Test"}
    )
    monkeypatch.setattr(varlen_verdicts, "run_check", lambda device, size: verdicts.pop())
    everywhere = {"devices": ("cpu", "cuda"), "auto_reasons": None}
    change_implementation(monkeypatch, "flash_attention", "varlen", **everywhere)
    return verdicts


X = torch.randn(1, 2, 9, 16).bfloat16()


def choice():
    """Return the implementation of a call with a window, and why."""
    return flash_attention(X, X, X, mask=AttentionMask(window=(2, 2))).impl


def test_auto_selects_the_kernel_where_it_passed(device):
    with pytest.warns(UserWarning, match="select torch's varlen kernel .*attnzoo doctor"):
        assert choice().impl != "varlen"
    assert len(device) == 1  # a call runs no check
    assert [check.outcome for check in check_kernels(choice)] == [PASSED]
    for _ in range(2):
        assert choice().impl == "varlen"
        assert "checked on NVIDIA Test" in choice().reason
    assert device == []


def test_auto_selects_another_implementation_where_it_failed(device):
    device[:] = [Verdict(FAILED, "dk differs")]
    check_kernels(choice)
    with pytest.warns(UserWarning, match="torch's varlen kernel .*: they failed .*dk"):
        found = choice()
    assert found.impl != "varlen"
    assert "varlen is skipped: they failed their check on NVIDIA Test: dk differs" in found.reason


SIZE = 64 if ON_CUDA else 8


@pytest.mark.parametrize("case", list(check_varlen.cases()), ids=str)
def test_the_kernel_passes_its_check(case, request):
    if not ON_CUDA:
        request.getfixturevalue("kernel")
    device = torch.device("cuda" if ON_CUDA else "cpu")
    assert list(check_varlen.wrong_results(case, SIZE, device)) == []


@pytest.mark.parametrize(("left", "right"), [(1, 0), (0, 1)])
def test_a_wrong_window_fails_the_check(left, right, kernel, monkeypatch, capsys):
    window = varlen.kernel_window

    def shifted(mask, found):
        before, after = window(mask, found)
        return before + left, after + right

    monkeypatch.setattr(varlen, "kernel_window", shifted)
    case = check_varlen.VarlenCase(150, 150, causal=False, window=(20, 20))
    monkeypatch.setattr(check_varlen, "cases", lambda: [case])
    check_varlen.main("8", "cpu")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wrong = {event["text"].split()[0] for event in events if event["event"] == "wrong"}
    assert wrong == {"out", "dq", "dk", "dv"}


def test_torch_accepts_the_arguments_of_the_kernel_with_extra_keys():
    """Its operators check them on meta tensors; no kernel runs."""
    with torch.device("meta"):
        q, starts = torch.empty(20, 4, 16).bfloat16(), torch.empty(3, dtype=torch.int32)
        call = varlen_kernel.Sequences(None, None, starts, starts, 12, 12), (3, 0), 0.3
        out, lse = varlen_kernel.call_varlen_attn(q, q[:, :2], q[:, :2], *call, return_lse=True)
        rows = q, q[:, :2], q[:, :2], out, lse
        grads = varlen_kernel.call_varlen_attn_backward(out, *rows, *call)
    assert (out.shape, lse.shape) == (q.shape, (4, 20))
    assert [x.shape for x in grads] == [x.shape for x in rows[:3]]


OPERATOR = "aten::_flash_attention_backward"


def test_a_torch_with_another_operator_for_gradients(kernel, monkeypatch):
    """Calls that need the operator are refused, those that do not still run."""
    # Fails if a new torch changes its private operator
    assert varlen_kernel.backward_reason() == ""
    (schema,) = map(str, torch._C._jit_get_schemas_for_operator(OPERATOR))
    for old, new in (
        ("Tensor rng_state, Tensor unused", "Tensor rng_state"),
        ("Tensor grad_out, Tensor query", "Tensor query, Tensor grad_out"),
        ("*, ", "*, int deterministic, "),
        ("window_size_left", "window"),
        ("(Tensor, Tensor, Tensor)", "(Tensor, Tensor)"),
    ):
        assert old in schema
        assert not varlen_kernel.takes_lse(torch._C.parse_schema(schema.replace(old, new)))
    assert varlen_kernel.takes_lse(
        torch._C.parse_schema(schema.replace(") ->", ", bool deterministic=False) ->"))
    )
    monkeypatch.setattr(varlen_kernel, "takes_lse", lambda schema: False)
    varlen_kernel._backward_reason.cache_clear()
    q, k, v = torch.randn(3, 1, 2, 9, 16).bfloat16()
    mask = AttentionMask(causal=True, window=(2, 0), num_sinks=2)
    with pytest.raises(UnsupportedError, match="gradients has other arguments in torch 2"):
        flash_attention(q, k, v, mask=mask, impl="varlen")
    mask = replace(mask, num_sinks=0)
    assert flash_attention(q, k, v, mask=mask, impl="varlen").impl.impl == "varlen"
    varlen_kernel._backward_reason.cache_clear()


def test_gradients_with_extra_keys_are_not_differentiated_again(kernel):
    q, k, v = (x.requires_grad_() for x in qkv(9, 9))
    mask = AttentionMask(causal=True, window=(2, 0), num_sinks=2)
    out = varlen.run_varlen(FlashCall(q, k, v, mask, 0.3))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated again; use another impl"):
        dq.sum().backward()
