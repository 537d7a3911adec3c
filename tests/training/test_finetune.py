"""Fine-tuning by TRL's trainers: the result, the softmax baseline, documents of packed rows."""

import json

import datasets
import pytest
import torch
import transformers as hf
import trl
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import attnzoo
from attnzoo.errors import ConfigError, SpecError
from attnzoo.training.finetune import finetune
from attnzoo.training.run_folder import RunError

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")


def config(out, **changes):
    options = {"max_steps": 6, "learning_rate": 3e-3, "per_device_train_batch_size": 4}
    options |= {"max_length": 48, "packing": True, "packing_strategy": "bfd_split"}
    options |= {"bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    options |= {"gradient_checkpointing": False, "save_steps": 3, "logging_steps": 1}
    return trl.SFTConfig(str(out), **{**options, **changes})


def test_a_swap_is_finetuned_beside_softmax(saved, text, tmp_path):
    spec = attnzoo.AttentionSpec("longformer", window=4)
    out = tmp_path / "out"
    found = finetune(saved, spec, [text], config(out, max_steps=20))
    lines = found["lines"]
    assert lines["softmax"] != lines["raw swap"]
    assert lines["result"] < lines["raw swap"] - 0.1
    assert lines["softmax tuned"] < lines["softmax"] - 0.1
    assert json.loads((out / "finetuning.json").read_text()) == found
    model = hf.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.attnzoo["backend"] == "longformer"
    # the saved model is already swapped, so it takes no spec
    more = finetune(out, None, [text], config(tmp_path / "more", max_steps=1))["lines"]
    assert more["before"] == pytest.approx(lines["result"])
    assert more["softmax tuned"] != more["result"]


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor:FutureWarning")
@pytest.mark.parametrize("changes", [{"loss_type": "dft"}, {"label_smoothing_factor": 0.3}])
def test_held_out_losses_are_cross_entropies(saved, text, spec, tmp_path, changes):
    """Whatever is trained with; documents that are cut are told of."""
    said = []
    options = {"packing": False, "max_steps": 1, "learning_rate": 1e-9}
    found = finetune(
        *(saved, spec, [text], config(tmp_path / "out", **options, **changes)),
        compare=False,
        log=said.append,
    )["lines"]
    exact = finetune(saved, spec, [text], config(tmp_path / "exact", **options), compare=False)[
        "lines"
    ]
    assert found["result"] == pytest.approx(exact["result"], rel=1e-5)
    assert said[0].startswith("2 of 2 documents have 48 tokens or more")


def test_a_run_that_ended_after_training_has_its_best_state(
    saved, text, spec, tmp_path, monkeypatch
):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    best |= {"save_steps": 1, "max_steps": 3, "learning_rate": 10.0}  # the first step is the best
    run = saved, spec, [text]
    whole = finetune(*run, config(tmp_path / "out", **best), compare=False)["lines"]
    with monkeypatch.context() as patch:
        patch.setattr("attnzoo.training.finetune._save", lambda *_: None)
        finetune(*run, config(tmp_path / "parts", **best), compare=False)
    args = config(tmp_path / "parts", **best, resume_from_checkpoint="True")
    assert finetune(*run, args, compare=False)["lines"] == whole


class Stopped(Exception):
    pass


@pytest.fixture
def stop_after(monkeypatch):
    """A function that lets so many steps of all trainers together run, and no more."""
    step = hf.Trainer.training_step

    def limit(steps):
        left = iter(range(steps))

        def training_step(*args, **options):
            if next(left, None) is None:
                raise Stopped
            return step(*args, **options)

        monkeypatch.setattr(hf.Trainer, "training_step", training_step)

    return limit


@pytest.mark.exhaustive
def test_a_resumed_run_equals_an_uninterrupted_one(saved, text, spec, tmp_path, stop_after):
    """After a stop in the second stage; a checkpoint cut short is left out."""
    whole = finetune(saved, spec, [text], config(tmp_path / "whole"))
    stop_after(10)
    out = tmp_path / "parts"
    with pytest.raises(Stopped):
        finetune(saved, spec, [text], config(out))
    (out / "checkpoints" / "softmax" / "checkpoint-99").mkdir()
    with pytest.raises(RunError, match="holds a run; go on with"):
        finetune(saved, spec, [text], config(out))
    other = [
        saved,
        spec,
        [text, text / "a.txt"],
        config(out, seed=9, resume_from_checkpoint="True"),
    ]
    with pytest.raises(
        RunError, match=r"another run: its config\.seed is 42, not 9, its config\.use_peft is false"
    ):
        finetune(*other, trl.ModelConfig(use_peft=True))
    with pytest.raises(RunError, match="another run: its data is"):
        finetune(*other[:3], config(out, resume_from_checkpoint="True"))
    stop_after(3)
    resumed = finetune(saved, spec, [text], config(out, resume_from_checkpoint="True"))
    assert resumed == {**whole, "model": resumed["model"]}
    weights, expected = (load_file(x / "model.safetensors") for x in (out, tmp_path / "whole"))
    assert all(torch.equal(x, expected[name]) for name, x in weights.items())
    assert finetune(saved, spec, [text], config(out, resume_from_checkpoint="True")) == resumed


def test_adapters_are_merged(saved, text, spec, tmp_path):
    """And the backends' own parameters are trained beside them."""
    out = tmp_path / "out"
    adapters = trl.ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "o_proj"])
    found = finetune(saved, spec, [text], config(out), adapters, compare=False)
    model, old = (hf.AutoModelForCausalLM.from_pretrained(x) for x in (out, saved))
    fresh = attnzoo.swap(hf.AutoModelForCausalLM.from_pretrained(saved), spec)
    name = "model.layers.1.self_attn.attnzoo.far_log_weight"
    assert not torch.equal(model.get_parameter(name), fresh.get_parameter(name))
    trained = {n for n, p in old.named_parameters() if not torch.equal(p, model.get_parameter(n))}
    assert {n.split(".")[-2] for n in trained} == {"q_proj", "o_proj"}
    again = finetune(out, None, [text], config(tmp_path / "more", max_steps=1), compare=False)
    assert again["lines"]["before"] == pytest.approx(found["lines"]["result"])
    assert "softmax tuned" not in again["lines"]


@pytest.mark.parametrize("kind", ["messages", "completions"])
def test_examples(saved, spec, tmp_path, kind):
    """Loss and held-out rows have completions only; of the assistant in messages."""
    source, words = tmp_path / "source", ["<unk>", "</s>", *map(str, range(40)), "a", "b"]
    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>"
        "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    special = {"unk_token": "<unk>", "eos_token": "</s>", "chat_template": template}
    hf.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(source)
    hf.AutoModelForCausalLM.from_pretrained(saved).save_pretrained(source)
    lines = []
    for n in range(40):
        pair = {"prompt": f"{n} ", "completion": "a b " * (n % 5 + 1)}
        roles = zip(("user", "assistant"), pair.values(), strict=True)
        messages = [{"role": role, "content": content} for role, content in roles]
        lines.append(json.dumps(pair if kind == "completions" else {"messages": messages}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    options = {"packing": False, "max_steps": 12, "learning_rate": 1e-2}
    chosen, other = "completion_only_loss", "assistant_only_loss"
    chosen, other = (other, chosen) if kind == "messages" else (chosen, other)
    run = source, spec, [tmp_path / "data.jsonl"]
    args = config(tmp_path / "out", **options, **{chosen: True})
    found = finetune(*run, args, compare=False)["lines"]
    assert found["result"] < found["raw swap"] - 1
    with pytest.raises(ConfigError, match=f"give {chosen}|You set `assistant_only_loss=True`"):
        finetune(*run, config(tmp_path / "new", **options, **{other: True}))


WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "alpha", "beta", "gamma", "delta"]


def test_weights_are_trained_in_the_type_that_is_given(saved, text, spec, tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    hf.AutoTokenizer.from_pretrained(saved).save_pretrained(tmp_path / "narrow")
    for name, dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
        args = config(tmp_path / name, max_steps=1)
        found = trl.ModelConfig(dtype=name)
        finetune(tmp_path / "narrow", spec, [text], args, found, compare=False)
        assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == dtype


def test_invalid_arguments_are_refused(saved, text, spec, tmp_path):
    with pytest.raises(SpecError, match="is not swapped; give an attention"):
        finetune(saved, None, [text], config(tmp_path / "out"))
    with pytest.raises(ConfigError, match="max_length"):
        finetune(saved, spec, [text], config(tmp_path / "out", max_length=None))


BACKENDS = [
    *(("softmax", {}), ("flash", {"window": 5, "num_sinks": 2}), ("longformer", {"window": 7})),
    *(("linear", {"feature_map": "hedgehog"}), ("linear", {"feature_map": "taylor", "window": 3})),
    ("gated_linear", {"gate": "gla", "feature_map": "hedgehog", "window": 4}),
    ("gated_linear", {"gate": "mlstm"}),
    ("delta", {"short_convolution": 4, "output_gate": True, "window": 3}),
    *(("performer", {"num_features": 20}), ("reformer", {"chunk_size": 4})),
    ("block_sparse", {"block_size": 4, "window": 6, "top_k": 2}),
]


def test_documents_of_packed_rows_do_not_see_each_other(saved, tmp_path):
    """The hidden states of each are those of the document alone, in float64."""
    texts = ["the dog", "a long story about a cat that sat on the mat", "hello", "one two three"]
    model = hf.AutoModelForCausalLM.from_pretrained(saved)
    trainer = trl.SFTTrainer(
        model=model,
        args=config(tmp_path / "out", max_length=70, per_device_train_batch_size=2),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=hf.AutoTokenizer.from_pretrained(saved),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    assert len(lengths) == 4
    model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # attention is far from uniform
    states = []
    model.base_model.register_forward_hook(lambda *x: states.append(x[-1].last_hidden_state))
    for name, options in BACKENDS:
        attnzoo.swap(model, name, **options)
        model.double()
        states.clear()
        with torch.no_grad():
            trainer.compute_loss(model, dict(batch))
            for ids in batch["input_ids"].split(lengths, 1):
                model(ids, use_cache=False)
        packed, *alone = states
        error = (packed - torch.cat(alone, 1)).abs().max()
        assert error < 1e-12, (name, options, error)
        attnzoo.restore(model)
