"""Loss on completions only: what is tokenized, packed, trained on and evaluated."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.training.completions import (
    best_fit,
    example_of,
    pack_completions,
    tokenize_example,
)
from attnzoo.training.documents import DataError
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loading import load_causal, load_rows
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.quality import evaluate_rows
from attnzoo.training.recover import RecoverConfig, recover

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} </end>{% endgeneration %}{% else %}{{ m.content }} </end>{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
CHAT = [
    {"role": "user", "content": "two plus two"},
    {"role": "assistant", "content": "is four"},
    {"role": "user", "content": "and three"},
    {"role": "assistant", "content": "is seven"},
]


@pytest.fixture(scope="module")
def byte_tokenizer():
    return hf.AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module")
def chat_tokenizer():
    words = [
        "<user>",
        "<assistant>",
        "</end>",
        "two",
        "plus",
        "is",
        "four",
        "and",
        "three",
        "seven",
    ]
    model = models.WordLevel({w: i for i, w in enumerate(["<unk>", *words])}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</end>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sixty prompts with completions of different lengths."""
    path = tmp_path_factory.mktemp("completions") / "data.jsonl"
    generator = torch.Generator().manual_seed(0)
    rows = []
    for n in range(60):
        a, b = torch.randint(1, 9, (2,), generator=generator).tolist()
        rows.append({"prompt": f"{n}: {a}x=", "completion": "ab" * b})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_messages_of_the_assistant_have_labels(chat_tokenizer):
    """The mask is the one that transformers computes from a template with ``generation``."""
    ids, labels = tokenize_example({"messages": CHAT}, chat_tokenizer)
    expected = chat_tokenizer.apply_chat_template(
        CHAT, return_assistant_tokens_mask=True, return_dict=True
    )
    assert ids == expected["input_ids"]
    assert [int(label != -100) for label in labels] == expected["assistant_masks"]
    assert sum(expected["assistant_masks"]) == 6
    assert chat_tokenizer.decode([x for x in labels if x != -100]).split()[-1] == "</end>"
    parts = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    ids_of_parts, labels_of_parts = tokenize_example(parts, chat_tokenizer)
    assert ids_of_parts == ids
    last = ids.index(chat_tokenizer.convert_tokens_to_ids("seven")) - 1  # "is seven </end>"
    assert labels_of_parts == [-100] * last + ids[last:]


def test_prompts_and_completions_as_strings(byte_tokenizer):
    ids, labels = tokenize_example({"prompt": "ab", "completion": "cd"}, byte_tokenizer)
    a = ord("a") + 3  # ByT5's bytes begin at 3, and 1 is its end token
    assert ids == [a, a + 1, a + 2, a + 3, 1]
    assert labels == [-100, -100, *ids[2:]]


def test_tokens_that_merge_a_prompt_with_its_completion_are_predicted(chat_tokenizer):
    ids, labels = tokenize_example({"prompt": "two pl", "completion": "us is"}, chat_tokenizer)
    expected = chat_tokenizer("two plus is </end>", add_special_tokens=False)["input_ids"]
    assert ids[:2] == expected[:2]
    assert labels == [-100, *ids[1:]]


def test_a_template_that_rewrites_history_is_refused(chat_tokenizer, byte_tokenizer):
    rewriting = "{{ messages | length }}" + TEMPLATE
    chat_tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=chat_tokenizer.backend_tokenizer, chat_template=rewriting
    )
    with pytest.raises(DataError, match="renders the beginning of a conversation differently"):
        tokenize_example({"messages": CHAT}, chat_tokenizer)
    with pytest.raises(DataError, match="tokenizer has no chat template"):
        tokenize_example({"messages": CHAT}, byte_tokenizer)


def test_best_fit_fills_bins():
    assert best_fit([3, 9, 2, 5, 10, 7], 10) == [[4], [1], [5, 0], [3, 2]]
    lengths = torch.randint(1, 33, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    bins = best_fit(lengths, 32)
    assert sorted(i for members in bins for i in members) == list(range(500))
    sums = [sum(lengths[i] for i in members) for members in bins]
    assert max(sums) <= 32
    assert sum(lengths) / (32 * len(bins)) > 0.95


def test_rows_hold_whole_examples(byte_tokenizer):
    pairs = [("a", "b" * 9), ("cc", "dd"), ("e", "f")]
    examples = [example_of({"prompt": p, "completion": c, "n": 1}, "x") for p, c in pairs]
    rows = pack_completions(examples, byte_tokenizer, row_length=10, vocab_size=384)
    first, second = (byte_tokenizer.decode(row) for row in rows.tokens)
    assert first == "a" + "b" * 9  # cut: its end token is left out
    assert second.startswith("ccdd</s>ef</s>")
    assert rows.shortened == 1
    assert rows.positions[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    labels = rows[1]["labels"]
    assert (labels != -100).tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0]
    assert rows.ends.tolist() == [10, 8]
    assert len(rows.stream) == 18
    with pytest.raises(DataError, match="No completion begins within 1 tokens"):
        pack_completions(examples, byte_tokenizer, row_length=1, vocab_size=384)


def test_the_spelling_of_the_end_token_is_not_counted():
    example, found = example_of({"prompt": "a", "completion": "yes"}, "x"), []
    for end in ("</s>", "<|end_of_text|>"):
        tokenizer = hf.ByT5Tokenizer(eos_token=end)
        rows = pack_completions([example], tokenizer, row_length=16, vocab_size=384)
        found.append(rows.bytes_per_token)
    assert found == [3 / 4] * 2  # "yes" and the end


def test_examples_without_an_answer_are_refused(byte_tokenizer, monkeypatch):
    byte_tokenizer = copy.deepcopy(byte_tokenizer)
    byte_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    example = example_of({"messages": [{"role": "user", "content": "hello"}]}, "x")
    with pytest.raises(DataError, match="messages of the assistant are missing"):
        pack_completions([example], byte_tokenizer, row_length=64, vocab_size=384)


def config(**changes):
    loop = LoopConfig(batch_size=4, checkpoint_every=3)
    options = {"steps": 8, "row_length": 32, "judged_rows": 2, "weights_lr": 3e-3}
    options |= {"train": "full", "tune_softmax": False, "train_on": "completions"}
    return FinetuneConfig(**{**options, "loop": loop, **changes})


def losses_alone(model, examples, tokenizer):
    """Return the loss of every token of the completions, each example run alone."""
    found = []
    for example in examples:
        ids = torch.tensor(tokenizer(example["prompt"] + example["completion"])["input_ids"])
        start = len(tokenizer(example["prompt"], add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        found.append(F.cross_entropy(logits[start - 1 : -1], ids[start:], reduction="none"))
    return torch.cat(found)


def test_loss_is_that_of_each_completion_alone(model, data, spec, tmp_path, byte_tokenizer):
    saved = tmp_path / "model"  # whose attention is far from uniform
    model.save_pretrained(saved)
    byte_tokenizer.save_pretrained(saved)
    train, held_out = load_rows(saved, [data], "text", config(row_length=96))
    assert len(held_out) == 1  # several examples share a row
    examples = [json.loads(line) for line in data.read_text().splitlines()]
    texts = "".join(byte_tokenizer.decode(held_out.stream).split("</s>"))
    kept = [x for x in examples if x["prompt"] + x["completion"] in texts]
    assert len(kept) == 3
    model = load_causal(saved, spec).eval()
    rest = [x for x in examples if x not in kept]
    loop = LoopConfig(batch_size=len(train))  # the first step has every row, and a rate of 0
    finetune(saved, spec, [data], tmp_path / "out", config(steps=2, loop=loop, row_length=96))
    expected = losses_alone(model, rest, byte_tokenizer).mean()
    assert read_losses(tmp_path / "out")[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    losses = losses_alone(model, kept, byte_tokenizer)
    found = evaluate_rows(model, rows_to_eval_batch(held_out, 9))
    size = sum(len(x["completion"]) for x in kept) / len(losses)
    expected = float(losses.mean()) / size / math.log(2)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.recall is None


def test_accumulated_steps_weigh_labels_equally(saved, data, spec, tmp_path):
    found = []
    for parts in (1, 2):
        loop = LoopConfig(batch_size=4, accumulate=parts)
        finetune(saved, spec, [data], tmp_path / str(parts), config(steps=4, loop=loop))
        found.append([line["loss"] for line in read_losses(tmp_path / str(parts))])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_resumed_run_equals_uninterrupted_run(saved, data, spec, tmp_path, interrupt):
    whole = finetune(saved, spec, [data], tmp_path / "whole", config())
    assert whole["lines"]["result"]["loss"] < whole["lines"]["raw swap"]["loss"]
    interrupt(5, finetune, saved, spec, [data], tmp_path / "parts", config())
    parts = finetune(saved, spec, [data], tmp_path / "parts", config(), resume=True)
    assert read_losses(tmp_path / "parts") == read_losses(tmp_path / "whole")
    assert parts["lines"] == whole["lines"]


def test_recover_on_completions(saved, data, tmp_path, attnzoo_command):
    attnzoo_command(
        *("recover", saved, "--data", data, "--out", tmp_path / "out", "--train-on", "completions"),
        *("--attention", "gated_linear:feature_map=hedgehog,window=4", "--length", 64),
        *("--batch", 2, "--transfer-steps", 2, "--distil-steps", 2),
    )
    written = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert written["config"]["train_on"] == "completions"
    assert written["config"]["repeat_share"] == 0
    assert written["lines"]["result"]["recall"] is None


def test_invalid_use_is_refused(saved, data, text, spec, tmp_path):
    with pytest.raises(ConfigError, match="must be 'all' or 'completions', got 'prompts'"):
        config(train_on="prompts")
    with pytest.raises(ConfigError, match=r"repeat_share=0\.25 would write copied segments"):
        config(repeat_share=0.25)
    assert FinetuneConfig().repeat_share == 0.25
    with pytest.raises(DataError, match=r"a row needs the fields 'prompt' .* \(its fields: text\)"):
        finetune(saved, spec, [text], tmp_path / "out", config())
    one = tmp_path / "one.jsonl"
    one.write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(DataError, match="One example cannot be both"):
        finetune(saved, spec, [one], tmp_path / "out", config())
    encoder = hf.BertConfig(
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 16, "vocab_size": 384},
    )
    hf.BertModel(encoder).save_pretrained(tmp_path / "bert")
    hf.AutoTokenizer.from_pretrained(saved).save_pretrained(tmp_path / "bert")
    near = attnzoo.AttentionSpec("longformer", window=4)
    options = RecoverConfig(train_on="completions")
    with pytest.raises(SpecError, match="an encoder predicts none"):
        recover(tmp_path / "bert", near, [data], tmp_path / "out", options)
