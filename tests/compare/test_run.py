import json
import os
import time

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

import attnzoo
from attnzoo.compare import run as run_module
from attnzoo.compare.advice import qualities
from attnzoo.compare.cases import make_cases
from attnzoo.compare.lengths import parse_lengths
from attnzoo.compare.measure import FAILED, OK, OUT_OF_MEMORY, REFUSED, TIMED_OUT
from attnzoo.compare.process import Workers
from attnzoo.compare.report import advice, groups_of, write_report
from attnzoo.compare.results import FILE, read
from attnzoo.compare.run import Plan, compare, find_subject, too_long
from attnzoo.errors import SpecError
from attnzoo.spec import AttentionSpec


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=384,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    ByT5Tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} has {i * i} in it\n" for i in range(400)))
    return path


def plan(model, out, **given):
    """Return a plan that takes little time."""
    specs = [AttentionSpec("flash"), AttentionSpec("linear")]
    base = {"lengths": [64, 128, 256], "specs": specs, "tokens": 256, "threads": 1}
    return Plan(model=str(model), out=out, **(base | given))


@pytest.fixture(scope="module")
def measured(llama, text, tmp_path_factory):
    """A whole comparison of the small model."""
    out = tmp_path_factory.mktemp("out")
    asked = plan(llama, out, text=text, quality_length=256, lengths=[64, 256])
    return asked, compare(asked)


def test_every_case_has_a_row(measured):
    asked, rows = measured
    cost = [row for row in rows if row["kind"] == "cost"]
    assert {(row["level"], row["T"], row["attention"]) for row in cost} == {
        (level, length, name)
        for level in ("op", "layer", "model")
        for length in (64, 256)
        for name in ("flash", "linear")
    }
    assert all(row["status"] == OK and row["median_ms"] > 0 < row["peak_bytes"] for row in cost)
    assert {row["B"] for row in cost if row["T"] == 64} == {4}  # of 256 tokens
    assert {row["exact"] for row in cost if row["attention"] == "flash"} == {True}
    assert read(asked.out / FILE) == rows


def test_a_row_says_where_it_is_from(measured):
    _, rows = measured
    for row in rows:
        assert row["attnzoo"] == attnzoo.__version__
        assert {"cpu", "threads", "torch", "transformers"} <= set(row["machine"])
        assert row["model"] | {"H": 4, "Hkv": 2, "D": 8, "E": 8} == row["model"]


def test_memory_is_what_the_call_holds(measured):
    """At 256 tokens the operator makes 4 rows of 4 heads of 8, and little more."""
    _, rows = measured
    (flash,) = (
        r
        for r in rows
        if (r.get("level"), r["T"], r["attention"]) == ("op", 256, "flash") and r["kind"] == "cost"
    )
    out = 4 * 4 * 256 * 8
    assert out <= flash["peak_bytes"] < 40 * out


def test_quality_is_judged_inside_and_beyond_the_trained_length(measured):
    _, rows = measured
    judged = {row["attention"]: row for row in rows if row["kind"] == "quality"}
    assert set(judged) == {"flash", "linear"}
    for row in judged.values():
        assert row["trained"] == 128
        assert 6 < row["bits_per_byte"] < 11  # nothing was learned: about log2(384)
        assert row["bits_per_byte_beyond"] is not None
        assert list(row["loss_by_position"]) == ["64", "128", "256"]
        assert row["copy_by_distance"]
        assert row["needle_by_distance"]
    assert qualities(rows)["flash"].cost == 0


def test_a_second_run_measures_nothing(measured, monkeypatch):
    asked, rows = measured

    def fails(*_, **__):
        raise AssertionError("it was measured already")

    monkeypatch.setattr(Workers, "run", fails)
    again = compare(asked)
    assert sorted(row["key"] for row in again) == sorted(row["key"] for row in rows)


def test_a_run_that_was_cut_goes_on(llama, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def stop(self, work, case, *rest, **named):
        raise Killed

    asked = plan(llama, tmp_path, lengths=[64, 128], levels=["op"], quality=False)
    compare(plan(llama, tmp_path, lengths=[64], levels=["op"], quality=False))
    lines = (tmp_path / FILE).read_text().splitlines()
    monkeypatch.setattr(Workers, "run", stop)
    with pytest.raises(Killed):
        compare(asked)
    assert (tmp_path / FILE).read_text().splitlines() == lines
    monkeypatch.undo()
    rows = compare(asked)
    assert len(rows) == 4
    assert (tmp_path / FILE).read_text().splitlines()[: len(lines)] == lines


def test_advice_recommends_what_was_measured_only(measured):
    asked, rows = measured
    told = advice(rows, "forward", asked.model)
    assert "reformer" not in told
    assert write_report(asked.out, rows, "forward", asked.model).stat().st_size > 1e6


def test_decoding_keeps_a_state_of_constant_size(llama, tmp_path):
    rows = compare(plan(llama, tmp_path, mode="decode", lengths=[64, 256], quality=False))
    assert all(row["status"] == OK for row in rows), rows
    kept = {(row["level"], row["attention"], row["T"]): row["kept_bytes"] for row in rows}
    for level in ("op", "layer", "model"):
        assert kept[level, "linear", 64] == kept[level, "linear", 256]
        assert kept[level, "flash", 256] == pytest.approx(4 * kept[level, "flash", 64], rel=0.1)
    assert kept["op", "flash", 64] == 2 * 4 * 64 * 2 * 8  # keys and values, 2 heads of 8


def test_training_has_gradients(llama, tmp_path):
    rows = compare(plan(llama, tmp_path, mode="train", lengths=[64], quality=False))
    assert all(row["status"] == OK for row in rows), rows
    forward = compare(plan(llama, tmp_path, lengths=[64], quality=False))
    memory = {(r["mode"], r["level"], r["attention"]): r["peak_bytes"] for r in forward}
    for level in ("op", "layer", "model"):
        assert memory["train", level, "linear"] > memory["forward", level, "linear"]


def test_an_encoder_is_measured(tmp_path):
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    asked = plan(tmp_path / "bert", tmp_path / "out", lengths=[128, 256])
    rows = compare(asked)
    status = {(row["level"], row["T"], row["attention"]): row["status"] for row in rows}
    assert status["op", 256, "linear"] == OK
    assert status["layer", 128, "flash"] == status["model", 128, "linear"] == OK
    (refused,) = (
        r for r in rows if (r["level"], r["T"], r["attention"]) == ("model", 256, "flash")
    )
    assert refused["status"] == REFUSED
    assert "128 positions" in refused["reason"]
    with pytest.raises(SpecError, match="not causal"):
        compare(plan(tmp_path / "bert", tmp_path / "other", mode="decode"))
    assert not (tmp_path / "other").exists()


# -- what goes wrong -------------------------------------------------------------------------------


def test_what_fails_is_a_status():
    """Work of libraries, for another process cannot import this file."""
    workers = Workers(threads=1, timeout=3, memory_bytes={"cpu": 3 * 2**30})
    assert workers.run(dict, [("sum", 10)]) == {"status": OK, "sum": 10}
    assert workers.run(time.sleep, 60)["status"] == TIMED_OUT
    assert workers.run(torch.ones, 2**31)["status"] == OUT_OF_MEMORY
    assert workers.run(os._exit, 3) == {"status": FAILED, "reason": "its process ended with 3"}
    refused = workers.run(parse_lengths, "many")
    assert refused["status"] == REFUSED
    assert "many" in refused["reason"]
    assert workers.run(dict, [("sum", 7)])["sum"] == 7


def test_longer_cases_are_not_tried_after_one_ran_out(llama, tmp_path, monkeypatch):
    tried = []

    def out_of_memory(self, work, case, subject, device):
        tried.append((case.attention, case.T))
        full = case.attention == "flash" and case.T >= 128
        good = {"median_ms": 1.0, "min_ms": 1.0, "spread": 0.0, "peak_bytes": 1, "kept_bytes": None}
        return {"status": OUT_OF_MEMORY} if full else {"status": OK, **good}

    monkeypatch.setattr(Workers, "run", out_of_memory)
    rows = compare(plan(llama, tmp_path, levels=["op"], quality=False))
    assert ("flash", 256) not in tried
    status = {row["T"]: row["status"] for row in rows if row["attention"] == "flash"}
    assert status == {64: OK, 128: OUT_OF_MEMORY, 256: "not run"}
    ((_, (flash, _)),) = groups_of(rows).items()
    assert flash.missing[256].startswith("not run: at 128 tokens")


def test_a_case_that_would_take_too_long_is_not_tried():
    def case(length):
        specs = [AttentionSpec("softmax")]
        given = {"levels": ["op"], "mode": "forward", "tokens": 1, "batch": 1}
        return make_cases(specs, [length], dtype="float32", device="cpu", **given)[0]

    quadratic = {1024: 1.0, 2048: 4.0}
    assert too_long(quadratic, case(4096), 49) == ""  # 16 s, three times
    assert "48 s, as it grew from 1024 to 2048" in too_long(quadratic, case(4096), 47)
    assert too_long({2048: 100.0}, case(4096), 1) == ""  # nothing is known of how it grows


def test_a_file_of_another_version_is_refused(llama, tmp_path):
    other = {"format": 1, "attnzoo": "9.9", "status": "ok"}
    (tmp_path / FILE).write_text(json.dumps(other) + "\n")
    with pytest.raises(SpecError, match=r"attnzoo 9\.9 .*--fresh"):
        compare(plan(llama, tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"format": 1, "status": "ok", "attnzoo": "VERSION"}\n{"format": 1, "sta',
            "Line 2 .*cut off",
        ),
        ('{"format": 1, "status": "ok", "attnzoo": "VERSION"}', "Line 1 .*cut off"),
        ("nonsense\n{}\n", "Line 1 .*is no JSON"),
        ("[1, 2]\n", "no result of attnzoo"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_broken_file_is_refused(llama, tmp_path, content, message):
    content = content.replace("VERSION", attnzoo.__version__)
    (tmp_path / FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(SpecError, match=message):
        compare(plan(llama, tmp_path))


def test_fresh_sets_it_aside(llama, tmp_path, monkeypatch):
    (tmp_path / FILE).write_text("nonsense")
    compare(plan(llama, tmp_path, lengths=[64], levels=["op"], quality=False, fresh=True))
    assert (tmp_path / "results.jsonl.old").read_text() == "nonsense"
    assert len(read(tmp_path / FILE)) == 2


def test_results_of_another_model_are_refused(llama, tmp_path, measured):
    asked, _ = measured
    with pytest.raises(SpecError, match="another model"):
        compare(plan("embedded", asked.out, quality=False))


def test_a_folder_that_cannot_be_written(llama, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        compare(plan(llama, tmp_path / "file" / "out", quality=False))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "decoed"}, "Did you mean 'decode'"),
        ({"levels": ["opp"]}, "Did you mean 'op'"),
        ({"dtype": "float33"}, "float33"),
        ({"tokens": 0}, "tokens must be above 0, got 0"),
        ({"memory_gib": -1.0}, "memory_gib must be above 0"),
        ({"devices": ["cuda"]}, "no CUDA"),
        ({"text": "nowhere.txt"}, "cannot be read"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(llama, tmp_path, given, message):
    if "devices" in given and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    out = tmp_path / "out"
    if "text" in given:
        given = {"text": tmp_path / "nowhere.txt"}
    with pytest.raises(SpecError, match=message):
        compare(plan(llama, out, **given))
    assert not out.exists()


def test_too_little_text(llama, tmp_path):
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(SpecError, match="has 5 tokens"):
        compare(plan(llama, tmp_path / "out", text=tmp_path / "text.txt"))


def test_a_model_without_a_head(llama, text, tmp_path):
    """Its layers are causal, but it predicts nothing: no decoding, no quality."""
    LlamaModel.from_pretrained(llama).save_pretrained(tmp_path / "base")
    with pytest.raises(SpecError, match="no head that predicts tokens"):
        compare(plan(tmp_path / "base", tmp_path / "out", mode="decode"))
    rows = compare(
        plan(tmp_path / "base", tmp_path / "out", levels=["model"], lengths=[64], text=text)
    )
    assert [(row["kind"], row["status"]) for row in rows] == [("cost", OK)] * 2


def test_exact_attention_is_added_where_none_was_named(llama):
    subject = find_subject(str(llama))
    specs, _ = run_module.check(plan(llama, None, specs=[AttentionSpec("linear")]), subject)
    assert [spec.default.backend for spec in specs] == ["flash", "linear"]
