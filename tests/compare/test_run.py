import json
import os
import resource
import time

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

import attnzoo
from attnzoo.commands.compare import parse_lengths
from attnzoo.compare.report import group_curves, qualities, quality_table, unable, write_report
from attnzoo.compare.run import (
    CompareConfig,
    check,
    compare,
    missing_quality,
    read_model_info,
)
from attnzoo.compare.workers import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    REFUSED,
    TIMED_OUT,
    Workers,
    measure_quality,
)
from attnzoo.errors import AttnzooError, SpecError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.results import FILE, append, read
from attnzoo.evaluation.rows import require_finite
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


@pytest.fixture
def in_process(monkeypatch):
    """Measure in this process: an error that is no refusal stops the test."""

    def run(self, function, *arguments, device="cpu"):
        try:
            return {"status": OK, **function(*arguments)}
        except AttnzooError as error:
            return {"status": REFUSED, "reason": str(error)}

    monkeypatch.setattr(Workers, "run", run)


def compare_config(model, out, **given):
    """Return a plan that takes little time."""
    specs = [AttentionSpec("flash"), AttentionSpec("linear")]
    base = {"lengths": [64, 128, 256], "specs": specs, "tokens": 256, "min_run_time": 0.02}
    return CompareConfig(model=read_model_info(model), out=out, **(base | given))


@pytest.fixture(scope="module")
def measured(llama, text, tmp_path_factory):
    """The results of a complete comparison of the small model."""
    out = tmp_path_factory.mktemp("out")
    config = compare_config(llama, out, text=text, quality_length=256, lengths=[64, 256])
    return config, compare(config)


def test_every_case_has_a_row(measured):
    config, rows = measured
    cost = [row for row in rows if row["kind"] == "cost"]
    assert {(row["level"], row["T"], row["attention"]) for row in cost} == {
        (level, length, name)
        for level in ("op", "model")
        for length in (64, 256)
        for name in ("flash", "linear")
    }
    assert all(row["status"] == OK and row["median_ms"] > 0 < row["peak_bytes"] for row in cost)
    assert {row["B"] for row in cost if row["T"] == 64} == {4}  # of 256 tokens
    assert {row["exact"] for row in cost if row["attention"] == "flash"} == {True}
    assert read(config.out / FILE) == rows


def test_approximations_are_timed_beside_exact_attention(measured):
    _, rows = measured
    for row in rows:
        if row["kind"] == "cost":
            pairs = 0 if row["exact"] else row["rounds"]
            assert len(row["baseline_ms"]) == pairs
            assert len(row["rounds_ms"]) == row["rounds"] >= 2
            assert min(row["rounds_ms"]) == row["min_ms"]


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
    (equal,) = (row for row in rows if row["kind"] == "equal window")
    assert (equal["attention"], equal["T"]) == ("linear", 256)
    assert set(judged) == {"flash", "linear", f"flash window {equal['window']}"}
    for row in judged.values():
        assert row["trained"] == 128
        assert 6 < row["bits_per_byte"] < 11  # an untrained model: about log2(384)
        assert row["bits_per_byte_beyond"] is not None
        assert list(row["loss_by_position"]) == ["64", "128", "256"]
        assert "a uniform guess has 8.58" in " ".join(row["notes"])  # copies are left out
        assert row["needle_by_distance"]
        assert 0 <= row["generation"]["agreement"] <= 1
    assert judged["flash"]["generation"]["agreement"] == 1  # it is the original
    assert qualities(rows) == {}  # the model is not trained
    assert "exact attention itself has" in unable(rows)


def test_a_second_run_measures_nothing(measured, monkeypatch):
    config, rows = measured

    def fails(*_, **__):
        raise AssertionError("it was measured already")

    monkeypatch.setattr(Workers, "run", fails)
    assert compare(config) == rows


def test_an_interrupted_run_is_resumed(llama, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def stop(self, work, case, *rest, **named):
        raise Killed

    config = compare_config(llama, tmp_path, lengths=[64, 128], levels=["op"], quality=False)
    compare(compare_config(llama, tmp_path, lengths=[64], levels=["op"], quality=False))
    lines = (tmp_path / FILE).read_text().splitlines()
    monkeypatch.setattr(Workers, "run", stop)
    with pytest.raises(Killed):
        compare(config)
    assert (tmp_path / FILE).read_text().splitlines() == lines
    monkeypatch.undo()
    rows = compare(config)
    assert len(rows) == 4
    assert (tmp_path / FILE).read_text().splitlines()[: len(lines)] == lines


def test_decoding_keeps_a_state_of_constant_size(llama, in_process, tmp_path):
    rows = compare(compare_config(llama, tmp_path, mode="decode", lengths=[64, 256], quality=False))
    assert all(row["status"] == OK for row in rows), rows
    kept = {(row["level"], row["attention"], row["T"]): row["kept_bytes"] for row in rows}
    for level in ("op", "model"):
        assert kept[level, "linear", 64] == kept[level, "linear", 256]
        assert kept[level, "flash", 256] == pytest.approx(4 * kept[level, "flash", 64], rel=0.1)
    assert kept["op", "flash", 64] == 2 * 4 * 64 * 2 * 8  # keys and values, 2 heads of 8


def test_training_has_gradients(measured, llama, in_process, tmp_path):
    rows = compare(compare_config(llama, tmp_path, mode="train", lengths=[64], quality=False))
    assert all(row["status"] == OK for row in rows), rows
    rows += [row for row in measured[1] if row["kind"] == "cost" and row["T"] == 64]
    memory = {(r["mode"], r["level"], r["attention"]): r["peak_bytes"] for r in rows}
    for level in ("op", "model"):
        assert memory["train", level, "linear"] > memory["forward", level, "linear"]


def test_an_encoder_is_measured(text, in_process, tmp_path):
    """Its quality is the similarity of its embeddings to those of exact attention."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=384,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    bert = BertModel(config)
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.mul_(5)  # attention that is far from uniform
    bert.save_pretrained(tmp_path / "bert")
    ByT5Tokenizer().save_pretrained(tmp_path / "bert")
    given = {"lengths": [128, 256], "levels": ["model"], "text": text}
    config = compare_config(tmp_path / "bert", tmp_path / "out", **given)
    rows = compare(config)
    judged = {row["attention"]: row for row in rows if row["kind"] == "quality"}
    assert list(judged["flash"]["cosine_by_length"]) == ["64", "128"]
    assert judged["flash"]["cosine"] == pytest.approx(1, abs=1e-3)
    assert judged["flash"]["least"] > judged["linear"]["cosine"]
    assert quality_table(rows).columns == ["attention", "cosine @64", "cosine @128", "least"]
    assert write_report(config.out, rows).stat().st_size > 20_000
    status = {(row["kind"], row["T"], row["attention"]): row["status"] for row in rows}
    assert status["cost", 128, "flash"] == status["cost", 128, "linear"] == OK
    (refused,) = (r for r in rows if (r["T"], r["attention"]) == (256, "flash"))
    assert refused["status"] == REFUSED
    assert "128 positions" in refused["reason"]
    with pytest.raises(SpecError, match="not causal"):
        compare(compare_config(tmp_path / "bert", tmp_path / "other", mode="decode"))
    assert not (tmp_path / "other").exists()


# -- what goes wrong -------------------------------------------------------------------------------


def test_what_fails_is_a_status():
    """Calls functions of libraries, because another process cannot import this file."""
    workers = Workers(timeout=3, memory_bytes=3 * 2**30)
    assert workers.run(dict, [("sum", 10)]) == {"status": OK, "sum": 10}
    assert workers.run(time.sleep, 60)["status"] == TIMED_OUT
    assert workers.run(torch.ones, 2**31)["status"] == OUT_OF_MEMORY
    assert workers.run(os._exit, 3) == {"status": FAILED, "reason": "its process ended with 3"}
    refused = workers.run(parse_lengths, "many")
    assert refused["status"] == REFUSED
    assert "many" in refused["reason"]
    overflow = workers.run(require_finite, float("nan"), "loss")
    assert overflow == {
        "status": FAILED,
        "reason": "the loss is nan: the model's outputs are not finite",
    }
    assert workers.run(dict, [("sum", 7)])["sum"] == 7


def test_longer_cases_are_not_tried_after_one_ran_out(llama, tmp_path, monkeypatch):
    tried = []

    def out_of_memory(self, work, case, *rest, device):
        tried.append((case.attention, case.T))
        full = case.attention == "flash" and case.T >= 128
        good = {"median_ms": 1.0, "min_ms": 1.0, "spread": 0.0, "peak_bytes": 1, "kept_bytes": None}
        return {"status": OUT_OF_MEMORY} if full else {"status": OK, **good}

    monkeypatch.setattr(Workers, "run", out_of_memory)
    rows = compare(compare_config(llama, tmp_path, levels=["op"], quality=False))
    assert ("flash", 256) not in tried
    status = {row["T"]: row["status"] for row in rows if row["attention"] == "flash"}
    assert status == {64: OK, 128: OUT_OF_MEMORY, 256: "not run"}
    ((_, (flash, _)),) = group_curves(rows).items()
    assert flash.missing == {128: OUT_OF_MEMORY, 256: "not run"}
    (skipped,) = (row for row in rows if row["status"] == "not run")
    assert skipped["reason"] == "it already failed at 128 tokens"


def test_a_file_of_another_version_is_refused(llama, tmp_path):
    other = {"format": 1, "attnzoo": "9.9", "status": "ok"}
    (tmp_path / FILE).write_text(json.dumps(other) + "\n")
    with pytest.raises(SpecError, match=r"attnzoo 9\.9 .*--fresh"):
        compare(compare_config(llama, tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"format": 1, "status": "ok", "attnzoo": "VERSION"}\n{"format": 1, "sta',
            "Line 2 .*truncated",
        ),
        ('{"format": 1, "status": "ok", "attnzoo": "VERSION"}', "Line 1 .*truncated"),
        ("nonsense\n{}\n", "Line 1 .*not a result"),
        ("[1, 2]\n", "not a result of attnzoo"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_broken_file_is_refused(llama, tmp_path, content, message):
    content = content.replace("VERSION", attnzoo.__version__)
    (tmp_path / FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(SpecError, match=message):
        compare(compare_config(llama, tmp_path))


def test_fresh_moves_the_old_file(llama, in_process, tmp_path):
    (tmp_path / FILE).write_text("nonsense")
    config = compare_config(llama, tmp_path, lengths=[64], levels=["op"], fresh=True)
    said = []
    compare(config, log=said.append)
    assert said == ["Quality is not measured: give --data a file in the model's language."]
    assert (tmp_path / "results.jsonl.old").read_text() == "nonsense"
    assert len(read(tmp_path / FILE)) == 2


def test_other_weights_are_another_model(llama, tmp_path):
    model = LlamaForCausalLM.from_pretrained(llama)
    found = [read_model_info(llama).sha]
    for name, change in (("same", 0.0), ("trained", 1e-3)):
        with torch.no_grad():
            model.lm_head.weight += change
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_bytes((llama / "config.json").read_bytes())
        found.append(read_model_info(tmp_path / name).sha)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "first",
    [
        {"text": "other"},
        {"quality_length": 128},
        {"lengths": [64]},
        {"dtype": "bfloat16"},
        {"tokens": 512},
        {"min_run_time": 0.01},
        {"timeout": 7.0},
        {"mode": "decode"},
        {"model": "model"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_report_has_the_rows_of_one_request(llama, text, tmp_path, monkeypatch, first):
    """Rows of other data, lengths, types or limits in the folder are neither used nor shown."""

    def run(self, function, case, *given, device="cpu"):
        if function is measure_quality:
            measured = {"rows": [1.0] * len(given[1].rows), "bits_per_byte": 1.0}
            return {"status": OK, "unigram_bits_per_byte": 99.0, **measured}
        good = {"median_ms": 1.0, "min_ms": 1.0, "spread": 0.0, "peak_bytes": 1}
        return {"status": OK, "kept_bytes": None, **good}

    monkeypatch.setattr(Workers, "run", run)
    (tmp_path / "other").write_text(text.read_text().replace("line", "word"))
    model = LlamaForCausalLM.from_pretrained(llama)
    model.config.rms_norm_eps = 1e-5
    model.save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    given = {"lengths": [64, 256], "text": text, "quality_length": 256, "levels": ["op"]}
    changed = {"model": llama, **given, **first}
    paths = {"other": tmp_path / "other", "model": tmp_path / "model"}
    changed = {name: paths[x] if x in ("other", "model") else x for name, x in changed.items()}
    before = compare(compare_config(out=tmp_path, **changed))
    alone = compare(compare_config(llama, tmp_path / "alone", **given))
    rows = compare(compare_config(llama, tmp_path, **given))
    assert rows == alone != before
    assert set(qualities(rows)) == {x["attention"] for x in rows if x["kind"] == "quality"}
    assert read(tmp_path / FILE) == before + [row for row in rows if row not in before]


def test_a_folder_that_cannot_be_written(llama, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AttnzooError, match="cannot be written"):
        compare(compare_config(llama, tmp_path / "file" / "out", quality=False))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(AttnzooError, match=r"is a link to .*nowhere', which does not exist"):
        compare(compare_config(llama, tmp_path / "link", quality=False))


def test_a_full_disk_keeps_whole_rows(tmp_path):
    """Simulated by a limit on the size of files, in the middle of a row."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    append(tmp_path, {"first": 1})
    written = (tmp_path / FILE).read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(written) + 5, before[1]))
    try:
        with pytest.raises(AttnzooError, match="free disk space, then repeat the command"):
            append(tmp_path, {"second": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / FILE).read_bytes() == written
    with pytest.raises(ValueError, match="not JSON compliant"):
        append(tmp_path, {"loss": float("nan")})


def test_why_no_quality_is_measured(llama, text):
    for model, given, reason in (
        (llama, {}, "give --data a file in the model's language"),
        (llama, {"text": text}, ""),
        (llama, {"quality": False}, "it was not requested"),
        (embedded_model_path(), {}, ""),
    ):
        assert missing_quality(compare_config(model, None, **given)) == reason


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "decoed"}, "Did you mean 'decode'"),
        ({"levels": ["opp"]}, "Did you mean 'op'"),
        ({"dtype": "float33"}, "float33"),
        ({"dtype": "int8"}, "No dtype of weights is called 'int8'"),
        ({"devices": ["cuda"]}, "no CUDA"),
        ({"devices": ["tpu"]}, "No device is called 'tpu'"),
        ({"devices": []}, "No device is called ''"),
        ({"levels": []}, "No level is called ''"),
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
        compare(compare_config(llama, out, **given))
    assert not out.exists()


def test_too_little_text(llama, tmp_path):
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(SpecError, match="has 5 tokens"):
        compare(compare_config(llama, tmp_path / "out", text=tmp_path / "text.txt"))


def test_a_model_without_a_head_does_not_decode(llama, tmp_path):
    LlamaModel.from_pretrained(llama).save_pretrained(tmp_path / "base")
    with pytest.raises(SpecError, match="no head that predicts tokens"):
        compare(compare_config(tmp_path / "base", tmp_path / "out", mode="decode"))


@pytest.mark.parametrize("names", [["linear"], ["linear", "flash", "linear"]])
def test_exact_attention_comes_first(llama, names):
    """It is the baseline of the others; an attention is measured once."""
    specs, _ = check(compare_config(llama, None, specs=[AttentionSpec(x) for x in names]))
    assert [spec.default.backend for spec in specs] == ["flash", "linear"]


def test_the_token_after_the_last_position_is_refused(tmp_path, in_process):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 384, "n_positions": 48}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    given = {"lengths": [47, 48], "levels": ["model"], "quality": False, "mode": "decode"}
    rows = compare(compare_config(tmp_path / "gpt2", tmp_path / "out", **given))
    assert {(row["T"], row["status"]) for row in rows} == {(47, OK), (48, REFUSED)}
    assert "48 positions, but the case needs 49" in rows[-1]["reason"]
