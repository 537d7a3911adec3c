"""Masked-language-model fine-tuning of a tiny BERT."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.embeddings import Texts
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.masked import MaskedQuality, Masking, measure_masked, verdict

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "alpha", "beta", "gamma", "delta"]
SPEC = attnzoo.AttentionSpec("linear", feature_map="hedgehog", window=2)
MASKING = Masking(mask_token=4, kept=(0, 1, 2, 3, 4), vocab_size=9, probability=0.3, seed=0)


def save_encoder(path, *, mask_token="[MASK]", **changes):
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        **changes,
    )
    hf.BertForMaskedLM(config).save_pretrained(path)
    tokens = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special |= {"unk_token": "[UNK]"} | ({"mask_token": mask_token} if mask_token else {})
    hf.PreTrainedTokenizerFast(tokenizer_object=tokens, **special).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts in which one word follows another, so that masked words can be predicted."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = []
    for n in range(80):
        words = [WORDS[5 + (n + i) % 4] for i in range(6 + n % 9)]
        rows.append(json.dumps({"text": " ".join(words)}))
    path.write_text("\n".join(rows))
    return path


def config(**changes):
    loop = LoopConfig(batch_size=8, checkpoint_every=3)
    options = {"steps": 8, "row_length": 24, "judged_rows": 8, "weights_lr": 5e-3, "train": "full"}
    return FinetuneConfig(**{**options, "tune_softmax": False, "loop": loop, **changes})


def test_masks_have_the_shares_of_bert():
    tokens = torch.randint(5, 9, (400, 64), generator=torch.Generator().manual_seed(0))
    tokens[:, 0], tokens[:, -3:] = 1, 0
    inputs, labels = MASKING(tokens, 1)
    selected = labels != -100
    assert not selected[:, 0].any()
    assert not selected[:, -3:].any()
    assert torch.equal(labels[selected], tokens[selected])
    assert torch.equal(inputs[~selected], tokens[~selected])
    assert float(selected[:, 1:-3].float().mean()) == pytest.approx(0.3, abs=0.01)
    found = inputs[selected]
    # of the random tokens, one in nine is the mask and one in nine the token itself
    assert float((found == 4).float().mean()) == pytest.approx(0.8 + 0.1 / 9, abs=0.01)
    kept = (found == tokens[selected]).float().mean()
    assert float(kept) == pytest.approx(0.1 + 0.1 / 9, abs=0.01)


def test_draws_depend_on_the_text_and_the_step_only():
    tokens = torch.randint(5, 9, (6, 12), generator=torch.Generator().manual_seed(0))
    inputs, labels = MASKING(tokens, 3)
    again, _ = MASKING(tokens[[4, 1]], 3)  # another batch, as of another process
    assert torch.equal(again, inputs[[4, 1]])
    assert not torch.equal(MASKING(tokens, 4)[1], labels)
    few = Masking(mask_token=4, kept=(0,), vocab_size=9, probability=1e-9, seed=0)
    assert ((few(tokens, 0)[1] != -100).sum(1) == 1).all()


def test_an_encoder_learns_masked_words(encoder, texts, tmp_path, attnzoo_command):
    out = tmp_path / "out"
    attnzoo_command(
        *("finetune", encoder, "--data", texts, "--out", out, "--steps", 40, "--length", 24),
        *("--attention", "linear:feature_map=hedgehog,window=2", "--weights-lr", 5e-3),
        *("--mlm-probability", 0.2, "--label-smoothing", 0.01),
    )
    outcome = json.loads((out / "finetuning.json").read_text())
    lines = outcome["lines"]
    assert outcome["config"]["mlm_probability"] == 0.2
    assert lines["result"]["loss"] < lines["raw swap"]["loss"] - 0.3
    assert lines["softmax tuned"]["loss"] < lines["softmax"]["loss"] - 0.3
    card = (out / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card
    assert "| accuracy |" in card
    model = hf.AutoModelForMaskedLM.from_pretrained(out)
    assert model.config.attnzoo["backend"] == "linear"


def test_loss_and_accuracy_of_masked_words(encoder):
    model = hf.AutoModelForMaskedLM.from_pretrained(encoder)
    with torch.no_grad():
        for parameter in model.parameters():  # attention is far from uniform
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    tokens = torch.randint(5, 9, (20, 10), generator=torch.Generator().manual_seed(0))
    tokens[:5, 6:] = 0
    mask = (tokens != 0).long()
    found = measure_masked(model, Texts(tokens=tokens, attention_mask=mask), MASKING)
    losses, right = [], []
    with torch.no_grad():
        for row in tokens:
            inputs, labels = MASKING(row[None], 0)
            length = int((row != 0).sum())
            logits = model.eval()(inputs[:, :length]).logits[0]
            for place in range(length):
                if labels[0, place] != -100:
                    losses.append(float(F.cross_entropy(logits[place], labels[0, place])))
                    right.append(bool(logits[place].argmax() == labels[0, place]))
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.accuracy == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize("train", ["full", pytest.param("lora", marks=pytest.mark.exhaustive)])
def test_resumed_run_equals_uninterrupted_run(encoder, texts, tmp_path, interrupt, train):
    options = config(train=train, tune_softmax=True)
    whole = finetune(encoder, SPEC, [texts], tmp_path / "whole", options)
    interrupt(13, finetune, encoder, SPEC, [texts], tmp_path / "parts", options)
    parts = finetune(encoder, SPEC, [texts], tmp_path / "parts", options, resume=True)
    assert read_losses(tmp_path / "parts") == read_losses(tmp_path / "whole")
    assert parts["lines"] == whole["lines"]


def test_verdict_begins_with_a_result_worse_than_its_window():
    lines = {
        name: MaskedQuality(loss=loss, accuracy=0.5, loss_rows=[loss] * 4)
        for name, loss in (("softmax", 1.0), ("window alone", 1.5), ("result", 1.25))
    }
    assert verdict(lines).startswith(
        "The loss of masked tokens of held-out text is 1.250 ± 0.000 nats"
    )
    lines["result"] = MaskedQuality(loss=1.75, accuracy=0.5, loss_rows=[1.75] * 4)
    assert verdict(lines).startswith("The result is worse than its window alone")
    noisy = [1.0, 2.0, 1.5, 1.6]
    lines["result"] = MaskedQuality(loss=1.525, accuracy=0.5, loss_rows=noisy)
    assert "No difference from the window alone is measured: 0.025 ± " in verdict(lines)


def test_what_cannot_be_masked_is_refused(encoder, texts, saved, spec, tmp_path):
    without = save_encoder(tmp_path / "without", mask_token=None)
    run = SPEC, [texts], tmp_path / "out"
    with pytest.raises(SpecError, match="has no mask token"):
        finetune(without, *run, config())
    with pytest.raises(SpecError, match="needs a decoder; an encoder predicts masked tokens"):
        finetune(encoder, *run, config(train_on="completions"))
    with pytest.raises(ConfigError, match="mlm_probability is for encoders"):
        finetune(saved, spec, [texts], tmp_path / "out", config(mlm_probability=0.2))
    with pytest.raises(ConfigError, match="mlm_probability must be above 0 and below 1"):
        config(mlm_probability=1.0)
    hf.ViTModel(
        hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path / "vit")
    with pytest.raises(SpecError, match="no masked-language model of this family"):
        finetune(tmp_path / "vit", *run, config())
