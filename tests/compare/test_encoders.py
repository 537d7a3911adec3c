"""``attnzoo inspect`` on an encoder: predictions, all heads, hidden states."""

import json
import sys

import pytest
import torch
import transformers as hf

from attnzoo.cli import main
from attnzoo.compare.encoders import (
    changed_table,
    is_encoder,
    prediction_table,
    principal_axes,
    read_encoder,
)
from attnzoo.compare.maps import maps_of_readings
from attnzoo.errors import SpecError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.hf.saving.files import swap_files
from attnzoo.spec import AttentionSpec

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "."]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The folder of a small BERT that classifies texts, and a text; tests only read them."""
    path = tmp_path_factory.mktemp("classifier")
    (path / "vocab.txt").write_text("\n".join(WORDS))
    hf.BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        id2label={0: "bad", 1: "fine", 2: "good"},
    )
    model = hf.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    model.save_pretrained(path)
    (path / "text.txt").write_text("the cat sat on a mat . " * 9)
    return path


def read(path, spec=None, tokens=20):
    return read_encoder(path, spec, text=path / "text.txt", tokens=tokens)


def test_softmax_reading_is_that_of_the_stock_model(classifier):
    found = read(classifier, AttentionSpec("linear"))
    assert found.tokens[:3] == ["[CLS]", "the", "cat"]
    assert [i for i, special in enumerate(found.special) if special] == [0, 19]
    model = hf.AutoModelForSequenceClassification.from_pretrained(
        classifier, attn_implementation="eager"
    )
    ids = hf.AutoTokenizer.from_pretrained(classifier).convert_tokens_to_ids(found.tokens)
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_attentions=True, output_hidden_states=True)
    stock = torch.cat(out.attentions), torch.cat(out.hidden_states), out.logits[0]
    exact = found.exact.weights, found.exact.states, found.exact.logits
    torch.testing.assert_close(exact, stock, rtol=1e-4, atol=1e-5)
    assert found.labels == ["bad", "fine", "good"]
    assert found.scores(found.exact) == pytest.approx(out.logits[0].softmax(0).tolist(), abs=1e-5)
    assert found.swapped.weights.shape == (3, 4, 20, 20)
    assert float(found.differences().max()) > 0.05
    assert found.cosines()[0] == pytest.approx(1.0)
    assert found.cosines()[3] < 0.999


def test_saved_swap_is_compared_with_its_original(classifier, tmp_path):
    spec = AttentionSpec("longformer", window=2, layers={"0": {"backend": "flash"}})
    swap_files(classifier, spec, tmp_path / "swapped")
    (tmp_path / "swapped" / "text.txt").write_text((classifier / "text.txt").read_text())
    found, given = read(tmp_path / "swapped"), read(classifier, spec)
    assert found.data() == given.data()
    gap = found.differences()
    assert float(gap[0].max()) < 1e-5  # its first layer is exact
    assert float(gap[1].max()) > 0.05
    first = changed_table(found).rows[0]
    layer, head = map(int, first[0].split(", "))
    query = int(first[1].split(":")[0])
    assert gap[layer, head, query] == gap.max()
    assert layer > 0
    maps = maps_of_readings(found, layer=layer, head=head)
    assert maps[0].head == head
    assert maps[0].facts()["difference"] == pytest.approx(float(gap[layer, head].mean()), abs=1e-4)
    with pytest.raises(SpecError, match="--head must be 0 to 3, got 9"):
        maps_of_readings(found, layer=0, head=9)


def test_predictions_are_in_a_table(classifier):
    found = read(classifier, AttentionSpec("flash"))
    rows = prediction_table(found).rows
    assert sorted(row[0] for row in rows) == ["bad", "fine", "good"]
    values = [float(row[1]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert all(row[1] == row[2] for row in rows)
    with pytest.raises(SpecError, match="--tokens must be 4 to 32 for this model, got 99"):
        read(classifier, tokens=99)


def test_principal_axes_are_those_of_the_covariance():
    torch.manual_seed(1)
    points = torch.randn(40, 9, dtype=torch.float64) * torch.linspace(3, 0.1, 9)
    before = torch.get_rng_state()
    _, axes = principal_axes(points)
    assert torch.equal(torch.get_rng_state(), before)
    vectors = torch.linalg.eigh((points - points.mean(0)).T @ (points - points.mean(0)))[1]
    expected = vectors[:, [-1, -2]]
    torch.testing.assert_close((axes * expected).sum(0).abs(), torch.ones(2).double(), atol=1e-4,
                               rtol=0)  # fmt: skip
    assert (axes.gather(0, axes.abs().argmax(0, keepdim=True)) > 0).all()
    assert torch.equal(principal_axes(points)[1], axes)


def test_command_writes_all_heads_and_layers(classifier, tmp_path, monkeypatch, capsys):
    arguments = ["inspect", classifier, "--text", classifier / "text.txt", "--tokens", 24]
    arguments += ["--layer", 2, "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "Prediction" in printed
    assert "Where the maps differ most" in printed
    written = json.loads((tmp_path / "out" / "maps.json").read_text())
    assert len(written["encoder"]["difference"]) == 3
    assert {len(row) for row in written["encoder"]["difference"]} == {4}
    assert written["heads"][0]["layer"] == 2
    text = (tmp_path / "out" / "maps.html").read_text()
    for part in ("[CLS]", "All heads, softmax", "Hidden states", "layer 2 ("):
        assert part in text
    assert (tmp_path / "out" / "pictures" / "encoder-states.png").is_file()


def test_a_decoder_is_none():
    assert not is_encoder(embedded_model_path())
