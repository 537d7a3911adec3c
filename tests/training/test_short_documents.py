"""Numbers of commands on documents that are shorter than a row, against each document run alone.

The model has fewer positions than a row has tokens, so that rows read as one document fail.
"""

import json
import math
import random
import sys

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.cli import main
from attnzoo.compare.run import CompareConfig, Workers, compare, read_model_info
from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.corpus import string_tokenizer
from attnzoo.evaluation.generation import (
    Needles,
    copy_rows,
    make_generation_batch,
    make_recall_batch,
)
from attnzoo.evaluation.models import embedded_model_path, max_positions
from attnzoo.evaluation.quality import evaluate_rows, rows_with_repeats
from attnzoo.evaluation.rows import Rows, pack_documents, predictions, separates_documents
from attnzoo.training import evaluator as evaluation
from attnzoo.training import recovery
from attnzoo.training.data import (
    DataError,
    RowOptions,
    load_documents,
    load_rows,
    load_texts,
    split_documents,
)
from attnzoo.training.evaluator import evaluate, rows_to_eval_batch, select_rows
from attnzoo.training.plan import make_plan
from tests.training.student_pair import load, write_pair

LENGTH = 320  # of a row
EXACT = {"rel": 1e-5, "abs": 1e-7}
WINDOW = attnzoo.AttentionSpec("longformer", window=24)


def sentences(seed, lengths):
    """Documents of so many characters, each a token."""
    draw = random.Random(seed)
    return ["".join(draw.choice("abcdefgh ") for _ in range(n)) for n in lengths]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """JSON lines of 120 documents of 92 to 127 tokens, with the token that ends each."""
    file = tmp_path_factory.mktemp("data") / "text.jsonl"
    texts = sentences(1, [91 + (7 * i) % 36 for i in range(120)])
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return file


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The folder of a tiny GPT-2 with 160 positions, whose attention is far from uniform."""
    torch.manual_seed(0)
    config = hf.GPT2Config(
        **{"vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160},
        **{"layer_norm_epsilon": 3e-5, "eos_token_id": 1, "bos_token_id": None},
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    )
    model = hf.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(folder)
    return folder


def documents_of_rows(texts, folder, count):
    """The documents of the first rows: tokens one after the other, each with its end, cut."""
    encode, found, size = string_tokenizer(folder), [], 0
    for text in texts:
        ids = torch.tensor([*encode(text).tolist(), 1])
        while len(ids) and size < count * LENGTH:
            space = LENGTH - size % LENGTH
            found.append(ids[:space])
            size, ids = size + len(found[-1]), ids[space:]
    return found


@torch.no_grad()
def alone(folder, spec, documents):
    """Log-probabilities of each document, which runs alone, in float64."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    if spec is not None:
        attnzoo.swap(model, spec)
    return [model(x[None], use_cache=False).logits[0].log_softmax(-1) for x in documents]


def divergence(exact, swapped):
    pairs = zip(exact, swapped, strict=True)
    return float(torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs]).mean())


def loss_of(documents, log_probs):
    """Bits per byte; a token is a byte."""
    pairs = zip(documents, log_probs, strict=True)
    losses = torch.cat([-p[:-1].gather(-1, x[1:, None])[:, 0] for x, p in pairs])
    return float(losses.mean()) / math.log(2)


def test_plan_measures_documents(data, gpt2, attnzoo_command, tmp_path):
    out = tmp_path / "plan.json"
    attnzoo_command(
        *("plan", gpt2, "--data", data, "--max-length", LENGTH, "--rows", 2, "--output-file", out),
        *("--candidate", "longformer:window=24", "--target-length", 160),
    )
    texts, _ = split_documents(load_documents([data], RowOptions(), None))
    documents = documents_of_rows(texts["text"], gpt2, 2)
    exact, plan = alone(gpt2, None, documents), json.loads(out.read_text())
    for layer in plan["layers"]:
        number = str(layer["layer"])
        spec = attnzoo.AttentionSpec("flash", layers={number: WINDOW.default.to_dict()})
        expected = divergence(exact, alone(gpt2, spec, documents))
        assert layer["alone"]["longformer:window=24"] == pytest.approx(expected, **EXACT)
    spec = attnzoo.AttentionSpec.from_dict(plan["spec"])
    expected = divergence(exact, alone(gpt2, spec, documents))
    assert plan["divergence"] == pytest.approx(expected, **EXACT)


def held_out(data, gpt2, count):
    """Rows that a run evaluates, and their documents."""
    rows = select_rows(load_rows(gpt2, [data], RowOptions(max_length=LENGTH))[1], count)
    texts = [*split_documents(load_documents([data], RowOptions(), None))[1]["text"]]
    whole = [[*string_tokenizer(gpt2)(text).tolist(), 1] for text in texts]
    documents = rows.documents()
    for x in documents:  # each is the beginning of a document, or the rest of one that was cut
        assert any(y[: len(x)] == x.tolist() or y[-len(x) :] == x.tolist() for y in whole)
    return documents


def test_training_evaluates_documents(data, gpt2, attnzoo_command, tmp_path, monkeypatch):
    """recover and evaluate: loss, generated tokens, and the start of distillation."""
    starts = []
    factor = recovery.rate_factor
    monkeypatch.setattr(recovery, "rate_factor", lambda kl: starts.append(kl) or factor(kl))
    monkeypatch.setattr(evaluation, "ROWS", 32)
    monkeypatch.setattr(evaluation, "widest_window", lambda model: 9)
    sizes = ("--data", data, "--max-length", LENGTH, "--per-device-train-batch-size", 2)
    attention = ("--attention", "longformer:window=24", "--max-steps", 1, "--output-dir")
    attnzoo_command("recover", gpt2, *sizes, *attention, tmp_path / "one")
    documents = held_out(data, gpt2, 32)
    lines = json.loads((tmp_path / "one" / "recovery.json").read_text())["lines"]
    window = attnzoo.AttentionSpec("flash", window=9)
    specs = {"softmax": None, "raw swap": WINDOW, "window alone": window}
    exact = alone(gpt2, None, documents)
    for name, spec in specs.items():
        expected = loss_of(documents, alone(gpt2, spec, documents))
        assert lines[name]["loss"] == pytest.approx(expected, rel=1e-5)
        assert lines[name]["recall"] is None
    assert starts == [pytest.approx(divergence(exact, alone(gpt2, WINDOW, documents)), **EXACT)]
    size = sorted(map(len, documents))[(len(documents) - 1) // 2]
    prompts = [x[: size - 8] for x in documents if len(x) >= size]
    originals, found = (continued(gpt2, spec, prompts) for spec in (None, window))
    equal = float((originals == found).float().mean())
    assert lines["window alone"]["agreement"] == pytest.approx(equal)
    again = evaluate(tmp_path / "one", [data], row_length=LENGTH, control=9)["lines"]
    own = loss_of(documents, alone(tmp_path / "one", None, documents))
    assert again["result"]["loss"] == pytest.approx(own, rel=1e-5)


def continued(folder, spec, prompts):
    """Eight tokens after each prompt, one whole pass for each."""
    found = []
    for prompt in prompts:
        for _ in range(8):
            (log_probs,) = alone(folder, spec, [prompt])
            prompt = torch.cat([prompt, log_probs[-1:].argmax(-1)])
        found.append(prompt[-8:])
    return torch.stack(found)


def test_a_window_as_long_as_documents_changes_nothing(
    data, gpt2, attnzoo_command, tmp_path, monkeypatch, capsys
):
    """No plan is made, and nothing is trained but with the option."""
    rows = load_rows(gpt2, [data], RowOptions(max_length=LENGTH))[0].select([0, 1])
    with pytest.raises(SpecError, match=r"reads every key of documents of at most 1\d\d tokens"):
        make_plan(gpt2, rows, ["longformer:window=128"], target_length=160)
    with pytest.raises(ConfigError, match="at most 160, the model's positions; got 161"):
        make_plan(gpt2, rows, ["longformer:window=128"], target_length=161)
    monkeypatch.setattr(recovery, "CLOSE", 1e-3)
    command = ("recover", gpt2, "--data", data, "--max-length", LENGTH, "--max-steps", 1)
    command += ("--per-device-train-batch-size", 2, "--attention", "longformer:window=128")
    attnzoo_command(*command, "--output-dir", tmp_path / "a")
    assert "nothing is trained: the model starts" in capsys.readouterr().out
    found = json.loads((tmp_path / "a" / "recovery.json").read_text())
    assert "--always-train" in found["not_trained"]
    result, softmax = found["lines"]["result"], found["lines"]["softmax"]
    assert result["agreement"] == 1
    assert result["loss"] == pytest.approx(softmax["loss"], rel=1e-6)
    assert not found["losses"]
    attnzoo_command(*command, "--output-dir", tmp_path / "b", "--always-train")
    found = json.loads((tmp_path / "b" / "recovery.json").read_text())
    assert [*found["losses"]] == ["distil"]


@pytest.mark.exhaustive
def test_commands_with_a_text_measure_documents(data, gpt2, attnzoo_command, tmp_path, monkeypatch):
    """compare, heads and inspect."""
    monkeypatch.setattr(
        Workers, "run", lambda self, call, *given, device="cpu": {"status": "ok", **call(*given)}
    )
    config = CompareConfig(
        **{
            "model": read_model_info(gpt2),
            "lengths": [8],
            "levels": ["op"],
            "out": tmp_path,
            "text": data,
        },
        **{"specs": [WINDOW], "quality_length": 160, "min_run_time": 0.01},
    )
    measured = {x["attention"]: x for x in compare(config) if x["kind"] == "quality"}
    batch = make_recall_batch(gpt2, data, 160)
    documents = batch.rows.documents()
    assert max(map(len, documents)) <= 126
    assert not batch.copies  # documents are shorter than the shortest
    assert "the longest document has 126 tokens" in measured["flash"]["notes"][0]
    for name, spec in (("flash", None), ("longformer", WINDOW)):
        expected = loss_of(documents, alone(gpt2, spec, documents))
        found = next(x for key, x in measured.items() if key.startswith(name))
        assert found["bits_per_byte"] == pytest.approx(expected, abs=6e-5)
    text = ("--data", data, "--output-dir", tmp_path, "--overwrite")
    attnzoo_command("heads", gpt2, *text, "--rows", 3)
    texts = [string_tokenizer(gpt2)(json.loads(x)["text"]) for x in data.read_text().splitlines()]
    size = sorted(map(len, texts))[(len(texts) - 1) // 2]
    model = hf.AutoModelForCausalLM.from_pretrained(gpt2, attn_implementation="eager")
    with torch.no_grad():
        given = [x[None, :size] for x in texts if len(x) >= size][:3]
        weights = torch.cat([model(x, output_attentions=True).attentions[1] for x in given])
    entropy = -(weights * weights.clamp_min(1e-30).log2()).sum(-1).mean((0, 2))
    found = json.loads((tmp_path / "heads.json").read_text())["measures"]["entropy"]
    assert found["transformer.h.1.attn"] == pytest.approx(entropy.tolist(), rel=1e-4)
    attnzoo_command("inspect", gpt2, "--attention", "linear", *text, "--max-length", 160)
    maps = json.loads((tmp_path / "maps.json").read_text())["heads"]
    assert maps[0]["tokens"] == len(texts[0])


@pytest.mark.parametrize("family", ["bloom", "student"])
def test_documents_of_models_without_positions_or_with_states(family, tmp_path):
    """Without positions, or with recurrent layers of stock classes, whose states may run on."""
    if family == "bloom":
        model = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=99, hidden_size=32, n_head=4))
    else:
        write_pair(tmp_path, 2, "0")
        model = attnzoo.speed_up(load(tmp_path / "student"))
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 99, (2, 21), generator=draw)
    positions = torch.cat([torch.arange(9), torch.arange(12)]).expand(2, -1)
    rows = Rows(tokens=tokens, positions=positions, bytes_per_token=1.0)
    model.eval()
    if family == "bloom":
        assert not separates_documents(model, rows)
    ((_, found),) = predictions(model, rows, 2)
    for row, own in rows.places():
        with torch.no_grad():
            expected = model(tokens[row, own][None], use_cache=False).logits[0]
        torch.testing.assert_close(found[row, own], expected)


ROPE = {"rope_theta": 500_000.0, "factor": 3.0, "original_max_position_embeddings": 10}
PLACE_IN_ROW = {  # models whose mask restarts with positions, and that read more than these
    "phi3": {"rope_parameters": {**ROPE, "rope_type": "longrope"}, "pad_token_id": 0},
    "llama": {"rope_parameters": {**ROPE, "rope_type": "dynamic"}, "max_position_embeddings": 10},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 5},
}


@pytest.mark.parametrize("family", PLACE_IN_ROW)
def test_documents_of_models_that_read_the_place_in_a_row(family):
    """The longest document of a batch, a chunk of the row; or rows of documents are refused."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, **PLACE_IN_ROW[family]}
    if family == "phi3":
        sizes["original_max_position_embeddings"] = 10
        for name, factor in (("short_factor", 1.0), ("long_factor", 3.0)):
            sizes["rope_parameters"][name] = [factor] * 4
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(family, **sizes))
    model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(15 if parameter.dim() > 1 else 1)
    if family == "recurrent_gemma":
        attnzoo.swap(model, "flash")
    positions = [torch.cat(list(map(torch.arange, x))) for x in ([9, 12], [6, 4, 11], [21])]
    tokens = torch.randint(3, 99, (3, 21), generator=torch.Generator().manual_seed(3))
    rows = Rows(tokens=tokens, positions=torch.stack(positions), bytes_per_token=1.0)
    found = torch.cat([logits for _, logits in predictions(model, rows, 3)])
    for row, own in rows.places():
        with torch.no_grad():
            expected = model(tokens[row, own][None], use_cache=False).logits[0]
        torch.testing.assert_close(found[row, own], expected)


@pytest.mark.parametrize("command", ["plan", "recover", "finetune", "evaluate"])
def test_documents_beyond_the_positions_are_refused(command, gpt2, tmp_path, monkeypatch, capsys):
    """Before anything is measured; a row may be longer where its documents are not."""
    (tmp_path / "long.txt").write_text("".join(sentences(2, [9000])))
    given = ("--data", tmp_path / "long.txt", "--max-length", 161)
    if command == "evaluate":
        model = hf.AutoModelForCausalLM.from_pretrained(gpt2)
        attnzoo.swap(model, WINDOW).save_pretrained(tmp_path / "swapped")
        hf.AutoTokenizer.from_pretrained(gpt2).save_pretrained(tmp_path / "swapped")
        gpt2 = tmp_path / "swapped"
    elif command != "plan":
        given += ("--attention", "linear", "--output-dir", tmp_path / "out")
    monkeypatch.setattr(hf.GPT2LMHeadModel, "forward", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, (command, gpt2, *given))])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "a document of 161, and the model has 160 positions" in capsys.readouterr().err


ENCODERS = {"bert": 0, "roberta": 2}  # the first position


@pytest.mark.parametrize("family", ENCODERS)
def test_texts_beyond_the_positions_of_an_encoder_are_refused(family, gpt2, tmp_path):
    sizes = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "pad_token_id": 1}
    sizes["max_position_embeddings"] = 70 + ENCODERS[family]
    config = hf.AutoConfig.for_model(family, **sizes)
    hf.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    assert max_positions(tmp_path) == 70
    hf.AutoTokenizer.from_pretrained(gpt2).save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("".join(sentences(2, [4000])))
    load_texts(tmp_path, [tmp_path / "text.txt"], RowOptions(max_length=70))
    with pytest.raises(DataError, match="a document of 71, and the model has 70 positions"):
        load_texts(tmp_path, [tmp_path / "text.txt"], RowOptions(max_length=71))


def test_probes_are_within_documents(gpt2):
    """Copies, needles and repeats: of the two documents of 300 tokens among short ones."""
    encode = string_tokenizer(gpt2)
    documents = [encode(x) for x in sentences(5, [20, 31, 300, 44, 300, 17])]
    batch = make_generation_batch(documents, 512)
    assert batch.prompts.length + batch.new_tokens == 31  # half of the documents are shorter
    whole = ["".join(map(chr, x.tolist())) for x in documents]
    draw = torch.Generator().manual_seed(0)
    for rows in (copy_rows(documents, 128, draw), Needles(encode).rows(documents, 128, draw)):
        assert rows.length <= 300
        for row in rows.tokens:
            text = "".join(map(chr, row.tolist()))
            assert any(text[:64] in x for x in whole)
    rows = pack_documents(documents, 9, 356, 1.0)
    written, repeats = rows_with_repeats(rows, torch.Generator().manual_seed(0))
    assert len(written) == len(repeats) == 2
    for row, repeat in zip(written.tokens, repeats, strict=True):
        first, second = (row[x : x + repeat.length] for x in (repeat.first, repeat.second))
        assert torch.equal(first, second)
    for own, repeat in zip(written.positions, repeats, strict=True):
        between = own[repeat.first : repeat.second + repeat.length]
        assert torch.equal(between - between[0], torch.arange(len(between)))


def test_what_cannot_be_recalled_is_left_out(model):
    """Numbers of unknown tokens, and copies that a model predicts worse than by a uniform guess."""
    documents = [torch.randint(3, 300, (400,), generator=torch.Generator().manual_seed(1))]
    letters = lambda text: torch.tensor([ord(x) if x.isalpha() else 2 for x in text])  # noqa: E731
    assert "unknown token" in Needles(letters).reason
    assert Needles(lambda text: torch.tensor([byte % 64 for byte in text.encode()])).reason == ""
    rows = Rows.of_documents(torch.stack([documents[0][:300]] * 2))
    found = evaluate_rows(model, rows_to_eval_batch(rows, 2))
    assert found.recall is None
    assert f"a uniform guess has {math.log2(384):.2f}" in found.notes[0]
