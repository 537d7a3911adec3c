import json
import re

import pytest
import torch
from rich.console import Console
from transformers import BertConfig, BertModel, ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from attnzoo import AttentionSpec
from attnzoo.demo.report import results_table, summary, terminal_table, write_report
from attnzoo.demo.run import LENGTHS, default_specs, run_demo
from attnzoo.errors import AttnzooError, SpecError, UnknownBackendError
from attnzoo.evaluation.models import spec_label
from attnzoo.registry import available_backends
from attnzoo.report.format import format_bytes

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The demo on the embedded model, three backends, short."""
    out = tmp_path_factory.mktemp("demo")
    names = ["softmax", "flash", "linear"]
    results = run_demo(
        model=None, text=None, out=out, specs=default_specs(names), quick=True, console=QUIET
    )
    page = write_report(out, results)
    return out, results, page


def test_every_available_backend_is_shown():
    shown = [spec.default.backend for spec in default_specs(None)]
    assert set(shown) == set(available_backends())
    assert shown[0] == "softmax"


def test_an_unknown_backend_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UnknownBackendError, match="Did you mean 'linear'"):
        run_demo(
            model=None,
            text=None,
            out=tmp_path / "x",
            specs=default_specs(["linaer"]),
            quick=True,
            console=QUIET,
        )
    assert not (tmp_path / "x").exists()


def test_results_are_written(quick):
    out, results, _ = quick
    data = json.loads((out / "results.json").read_text())
    assert [r["label"] for r in data["results"]] == [r.label for r in results]
    assert data["lengths"] == list(LENGTHS[:2])
    assert data["machine"]
    assert not list(out.glob("*.tmp"))


def test_expected_relations_of_results(quick):
    _, results, _ = quick
    by_label = {r.label: r for r in results}
    softmax, flash = by_label["softmax"], by_label["flash"]
    control, linear = by_label["flash window 32"], by_label["linear"]
    assert flash.bits_per_byte == pytest.approx(softmax.bits_per_byte, abs=1e-4)
    assert control.bits_per_byte > softmax.bits_per_byte + 0.1
    assert linear.bits_per_byte > softmax.bits_per_byte
    for grows in (softmax, flash):
        assert grows.cache_bytes[1024] == pytest.approx(4 * grows.cache_bytes[256], rel=0.1)
    for constant in (control, linear):
        assert len(set(constant.cache_bytes.values())) == 1
    assert all(ms > 0 for r in results for ms in r.decode_ms.values())


def test_table_and_summary_name_the_control_first(quick):
    _, results, _ = quick
    heads = terminal_table(results).columns
    assert heads == ["attention", "bits/byte", "recall", "ms @256", "ms @1k", "cache @1k"]
    assert set(heads) <= set(results_table(results).columns)
    text = summary(results)
    assert re.match(r"The control, a window of 32 tokens, costs 0\.\d+ ± 0\.\d+ bits", text), text


def test_report_is_self_contained(quick):
    _, results, page = quick
    text = page.read_text()
    assert "<script src=" not in text
    assert '<link rel="stylesheet"' not in text
    for result in results:
        assert result.label in text


def test_users_own_model(tmp_path):
    path = tmp_path / "gpt2"
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=384, n_positions=256)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(path)
    ByT5Tokenizer().save_pretrained(path)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    out = tmp_path / "out"
    results = run_demo(
        model=path, text=text, out=out, specs=[AttentionSpec("linear")], quick=True, console=QUIET
    )
    assert [r.label for r in results] == ["softmax", "linear"]  # the control is always there
    assert not [r.refused for r in results if r.refused]
    assert all(6 < r.bits_per_byte < 11 for r in results)  # an untrained model: about log2(384)
    assert json.loads((out / "results.json").read_text())["lengths"] == [128]


def test_a_model_without_text_is_refused(tmp_path):
    with pytest.raises(SpecError, match="needs --data"):
        run_demo(model=tmp_path, text=None, out=tmp_path, specs=None, quick=True, console=QUIET)


def test_a_folder_without_model_is_refused(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("x" * 1000)
    with pytest.raises(SpecError, match=r"no config\.json"):
        run_demo(model=tmp_path, text=text, out=tmp_path, specs=None, quick=True, console=QUIET)


def test_an_encoder_is_refused(tmp_path):
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    text = tmp_path / "t.txt"
    text.write_text("x" * 2000)
    with pytest.raises(AttnzooError, match="causal"):
        run_demo(model=tmp_path, text=text, out=tmp_path, specs=None, quick=True, console=QUIET)


def test_labels():
    assert [spec_label(spec) for spec in default_specs(["flash"])] == [
        "softmax",
        "flash",
        "flash window 32",
        "flash window 32 num_sinks 4",
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(None, "-"), (0, "0 B"), (2048, "2.0 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_sizes(count, text):
    assert format_bytes(count) == text
