import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertModel, ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from attnzoo import AttentionSpec
from attnzoo.demo import LENGTHS, SwapResult, results_table, run_demo, summary, write_report
from attnzoo.errors import AttnzooError, SpecError
from attnzoo.evaluation.models import embedded_model_path

RESULTS = [
    SwapResult(
        label=name,
        spec={"backend": name.split()[0]},
        bits_per_byte=1.0 + i,
        recall_bits_per_byte=0.5 + i,
        decode_ms={256: 1.0, 1024: 2.0},
        loss_rows=[1.0 + i - 0.1, 1.0 + i + 0.1] * 4,
        rounds_ms={
            n: [ms * (1 + k / 100) for k in range(12)] for n, ms in ((256, 1.0), (1024, 2.0))
        },
        original_ms={256: [4.0] * 12, 1024: [5.0 + k / 20 for k in range(12)]},
        cache_bytes={256: 1000, 1024: 1000 + 3000 * (i < 1)},
    )
    for i, name in enumerate(["softmax", "flash window 32", "linear"])
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The demo on the embedded model, two attentions, short."""
    out = tmp_path_factory.mktemp("demo")
    specs = [AttentionSpec("flash", window=32), AttentionSpec("linear")]
    return out, run_demo(model=embedded_model_path(), text=None, out=out, specs=specs, quick=True)


def test_results_are_written(quick):
    out, results = quick
    data = json.loads((out / "results.json").read_text())
    assert [r["label"] for r in data["results"]] == [r.label for r in results]
    assert data["lengths"] == list(LENGTHS[:2])
    assert (data["model"], bool(data["machine"])) == ("embedded", True)
    assert not list(out.glob("*.partial"))


def test_expected_relations_of_results(quick):
    by_label = {r.label: r for r in quick[1]}
    softmax, control, linear = (by_label[x] for x in ("softmax", "flash window 32", "linear"))
    assert control.bits_per_byte > softmax.bits_per_byte + 0.1
    assert linear.bits_per_byte > softmax.bits_per_byte
    assert softmax.cache_bytes[1024] == pytest.approx(4 * softmax.cache_bytes[256], rel=0.1)
    for constant in (control, linear):
        assert len(set(constant.cache_bytes.values())) == 1
    assert all(ms > 0 for r in by_label.values() for ms in r.decode_ms.values())


def test_the_report_has_the_table_and_names_the_control_first(quick):
    out, results = quick
    refused = SwapResult(label="odd <one>", spec={"backend": "odd"}, refused="it is <b>odd</b>")
    text = write_report(out, [*results, refused]).read_text()
    assert "odd &lt;one&gt; is not supported: it is &lt;b&gt;odd&lt;/b&gt;" in text
    assert all(f"<td>{result.label}</td>" in text for result in results)
    assert {x.stem for x in (out / "pictures").glob("*.png")} == {"decoding", "cache"}
    assert results_table(results).columns[:5] == [
        *("attention", "bits/byte", "recall", "ms @256", "ms @1k"),
    ]
    said = summary(results)
    assert re.match(r"The control, a window of 32 tokens, costs 0\.\d+ ± 0\.\d+ bits", said), said


def test_the_summary_states_clear_differences_only():
    text = summary(RESULTS)
    assert "costs 1.000 ± 0.000 bits per byte" in text
    assert "1 of 1 untrained swaps are clearly worse" in text
    assert (
        "At 1k tokens linear decodes 2.5 ± 0.0 times as fast as the model's own attention" in text
    )
    assert "+1.00 on recall" in text
    without = [replace(x, recall_bits_per_byte=None) for x in RESULTS]
    assert "costs 1.000 ± 0.000 bits per byte." in summary(without)
    noisy = [replace(x, original_ms=x.rounds_ms) for x in RESULTS]
    noisy[2] = replace(noisy[2], loss_rows=[2.0, 9.0, 1.0, 0.5] * 2)
    text = summary(noisy)
    assert "(no difference measured)" in text
    assert "untrained swaps" not in text


def test_users_own_model(tmp_path):
    path = tmp_path / "gpt2"
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=384, n_positions=256)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(path)
    ByT5Tokenizer().save_pretrained(path)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    out = tmp_path / "out"
    results = run_demo(model=path, text=text, out=out, specs=[AttentionSpec("linear")], quick=True)
    assert [r.label for r in results] == ["softmax", "linear"]  # the control is always there
    assert not [r.refused for r in results if r.refused]
    assert all(6 < r.bits_per_byte < 11 for r in results)  # an untrained model: about log2(384)
    assert json.loads((out / "results.json").read_text())["lengths"] == [128]


def test_mistakes_are_refused(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("x" * 2000)
    with pytest.raises(SpecError, match="needs --data"):
        run_demo(model=tmp_path, text=None, out=tmp_path)
    with pytest.raises(SpecError, match=r"no config\.json"):
        run_demo(model=tmp_path, text=text, out=tmp_path)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(AttnzooError, match="causal"):
        run_demo(model=tmp_path, text=text, out=tmp_path)
