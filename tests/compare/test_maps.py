import json
from pathlib import Path

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.compare.maps import difference, make_maps, write_maps
from attnzoo.errors import SpecError
from attnzoo.evaluation.heads import entropy
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.spec import AttentionSpec


def test_entropy_and_difference():
    alike, sharp = torch.full((1, 8), 1 / 8), torch.eye(8)[:1]
    assert float(entropy(alike)) == pytest.approx(3.0, abs=1e-5)
    assert float(entropy(sharp)) == pytest.approx(0.0, abs=1e-5)
    assert float(difference(alike, sharp)) == pytest.approx(7 / 8)
    assert float(difference(alike, alike)) == 0


@pytest.fixture(scope="module")
def found():
    return {
        name: make_maps(
            embedded_model_path(),
            AttentionSpec(name, **options),
            text=None,
            layer=2,
            head=3,
            tokens=96,
        )
        for name, options in (("flash", {}), ("longformer", {"window": 16}), ("linear", {}))
    }


def test_exact_attention_differs_from_itself_by_rounding(found):
    maps = found["flash"]
    torch.testing.assert_close(maps.exact, maps.approximate, rtol=0, atol=1e-5)
    assert len(maps.exact) == 4
    assert maps.facts(2)["difference"] == 0
    assert maps.facts(2)["same_favourite"] == 1


def test_both_maps_are_of_the_same_queries_and_keys(found):
    """A window's map is the exact one, masked and normalised again."""
    maps = found["longformer"]
    cut = maps.exact * torch.ones(96, 96, dtype=torch.bool).tril().triu(-15)
    expected = cut / cut.sum(2, keepdim=True)
    torch.testing.assert_close(maps.approximate, expected, rtol=0, atol=1e-5)


def test_rows_of_all_maps_are_weights(found):
    for maps in found.values():
        torch.testing.assert_close(maps.approximate.sum(2), torch.ones(4, 96), rtol=0, atol=1e-3)
        assert maps.exact.triu(1).abs().max() == 0


def test_written_files(found, tmp_path):
    page = write_maps(tmp_path, found["linear"], 3)
    facts = json.loads((tmp_path / "maps.json").read_text())
    assert facts["attnzoo"] == attnzoo.__version__
    assert [head["head"] for head in facts["heads"]] == [0, 1, 2, 3]
    assert page.read_text().count("<img") == 4
    pictures = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    assert pictures == {"exact", "approximate", "difference", "entropy"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": 4}, "one of 0 to 3"),
        ({"head": 4}, "0 to 3"),
        ({"model": Path("nowhere")}, "no saved model"),
        ({"text": "nowhere.txt"}, "cannot be read"),
    ],
)
def test_mistakes(given, message, tmp_path):
    options = {
        "model": embedded_model_path(),
        "text": None,
        "layer": 0,
        "head": 0,
        "tokens": 8,
    } | given
    if options["text"]:
        options["text"] = tmp_path / options["text"]
    model = options.pop("model")
    with pytest.raises(SpecError, match=message):
        make_maps(model, AttentionSpec("linear"), **options)


def test_the_map_of_an_encoder_is_that_of_the_stock_model(tmp_path):
    """On its special tokens too; a text that is cut keeps the last one."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = hf.BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = hf.BertConfig(vocab_size=len(words), num_hidden_layers=3, **sizes)
    model = hf.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    model.save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat " * 9)
    spec = AttentionSpec("longformer", window=2)
    found = make_maps(tmp_path, spec, text=text, layer=1, head=2, tokens=20)
    assert found.tokens[:3] + found.tokens[-1:] == ["[CLS]", "the", "cat", "[SEP]"]
    model.set_attn_implementation("eager")
    ids = tokenizer.convert_tokens_to_ids(found.tokens)
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_attentions=True).attentions[1][0]
    torch.testing.assert_close(found.exact, expected, rtol=1e-4, atol=1e-5)
    cut = expected * torch.ones(20, 20).tril(2).triu(-2)
    cut = cut / cut.sum(2, keepdim=True)
    torch.testing.assert_close(found.approximate, cut, rtol=1e-4, atol=1e-5)
