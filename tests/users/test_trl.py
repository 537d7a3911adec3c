"""TRL's trainers on swapped models: packing, paths and models in memory, with and without PEFT."""

import importlib
import runpy
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import attention_layers

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning"),
]
BACKENDS: dict[str, dict[str, Any]] = {
    "flash": {},
    "linear": {},
    "gated_linear": {"window": 8},
}
TEXTS = ["the dog runs", "a long story about a cat that sat on the mat", "hello", "one two three"]
PAIRS = {
    "prompt": ["the dog", "a cat"],
    "chosen": [" runs fast", " sits on the mat"],
    "rejected": [" no", " never never"],
}
CASES = [  # backend, where the model is, PEFT
    ("linear", "path", False),
    ("flash", "path", True),
    ("linear", "memory", False),
    ("gated_linear", "memory", True),
]


@pytest.fixture(scope="module")
def trl() -> Any:
    """The library, imported late: it takes seconds, also where this module is deselected."""
    pytest.importorskip("trl")
    return importlib.import_module("trl")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(embedded_model_path())


def tiny(tokenizer: Any, backend: str) -> Any:
    """A random Llama, swapped."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.LlamaForCausalLM(config)
    attnzoo.swap(model, backend, **BACKENDS[backend])
    return model


@pytest.fixture
def make_trainer(trl, tokenizer, tmp_path):
    """Return a function that builds a trainer of two steps."""

    def make(kind: str, model: Any, where: str, lora: bool, **options: Any) -> Any:
        if where == "path":
            model.save_pretrained(tmp_path / "model")
            tokenizer.save_pretrained(tmp_path / "model")
            model = str(tmp_path / "model")
        models = ("ref_model", "teacher_model")
        arguments = {name: options.pop(name) for name in models if name in options}
        if kind == "SFT":
            data = {"text": TEXTS * 4}
        elif kind == "DPO":
            data = {name: texts * 4 for name, texts in PAIRS.items()}
        elif kind == "Distillation":
            data = {"prompt": PAIRS["prompt"] * 4}
        else:
            data = {"prompt": PAIRS["prompt"] * 4}
            arguments["reward_funcs"] = lambda completions, **_: [
                float(i % 2) for i in range(len(completions))
            ]
        config = getattr(trl, f"{kind}Config")(
            output_dir=str(tmp_path / "out"),
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        return getattr(trl, f"{kind}Trainer")(
            model=model,
            args=config,
            train_dataset=datasets.Dataset.from_dict(data),
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]) if lora else None,
            **arguments,
        )

    return make


def log_probabilities(trainer: Any, kind: str, ids: Any, mask: Any) -> torch.Tensor:
    """What the trainer itself computes of the last four tokens; it passes no positions."""
    if kind != "Distillation":
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)[0]
    hidden = trainer._get_last_hidden_state(trainer.model, ids, mask, 4)
    logs = trainer.model.lm_head(hidden).log_softmax(-1)
    return logs.gather(-1, ids[:, -4:, None])[..., 0]


@pytest.mark.parametrize(
    ("kind", "backend", "lora"),
    [
        ("GRPO", "linear", True),
        ("RLOO", "flash", True),
        ("RLOO", "linear", False),
        ("Distillation", "flash", False),
        ("Distillation", "linear", True),
    ],
)
def test_log_probabilities_do_not_depend_on_the_padding_of_prompts(
    make_trainer, tokenizer, kind, backend, lora
):
    options = {"teacher_model": tiny(tokenizer, "flash")} if kind == "Distillation" else {}
    options |= {} if kind == "Distillation" else {"num_generations": 2, "beta": 0.0}
    trainer = make_trainer(kind, tiny(tokenizer, backend), "memory", lora, **options)
    ids = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        for x in trainer.model.eval().parameters():
            x.mul_(8 if x.ndim > 1 else 1)
        found = log_probabilities(trainer, kind, ids, mask)[1]
        alone = log_probabilities(trainer, kind, ids[1:, 5:], mask[1:, 5:])[0]
    assert_close(found, alone, atol=1e-4, rtol=1e-4)


def train(trainer: Any, backend: str) -> None:
    """Train, and check that the swap is in place and that every trained tensor changed."""
    backends = [layer_backend(layer.module) for layer in attention_layers(trainer.model)]
    assert [m.name for m in backends] == [backend] * 2
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    trained = {n: p for n, p in trained.items() if "q_proj" in n}
    before = {n: p.detach().clone() for n, p in trained.items()}
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    assert trained
    assert all(p.isfinite().all() for p in trained.values())
    moved = {n for n, p in trained.items() if not torch.equal(p, before[n])}
    assert moved == set(trained)
    assert all(m.ran is not None for m in backends)


@pytest.mark.parametrize(("backend", "where", "lora"), CASES)
def test_sft(make_trainer, tokenizer, backend, where, lora):
    model, packing = tiny(tokenizer, backend), (where == "path") == lora
    train(make_trainer("SFT", model, where, lora, packing=packing, max_length=64), backend)


@pytest.mark.parametrize(("backend", "where", "lora"), CASES)
def test_dpo(make_trainer, tokenizer, backend, where, lora):
    """TRL loads the reference model from the path of the policy, if PEFT does not make it."""
    options = {}
    if where == "memory" and not lora:
        options["ref_model"] = tiny(tokenizer, backend)
    train(make_trainer("DPO", tiny(tokenizer, backend), where, lora, **options), backend)


@pytest.mark.parametrize(("backend", "where", "lora"), CASES)
def test_grpo(make_trainer, tokenizer, backend, where, lora):
    beta = 0.0 if where == "memory" and not lora else 0.1  # above 0, a reference model is loaded
    options = {"num_generations": 2, "max_completion_length": 6, "beta": beta}
    train(make_trainer("GRPO", tiny(tokenizer, backend), where, lora, **options), backend)


def test_reference_model_of_a_swap_in_memory_is_refused(make_trainer):
    """The path of the policy holds no spec, so TRL's reference model would not be this model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path())
    attnzoo.swap(model, "linear")
    with pytest.raises(SpecError, match="requires a spec"):
        make_trainer("DPO", model, "memory", False)


@pytest.mark.parametrize(
    ("backend", "option"),
    [*((name, {"packing": True}) for name in BACKENDS), ("linear", {"padding_free": True})],
    ids=str,
)
def test_packed_loss_is_the_loss_of_the_sequences(make_trainer, tokenizer, backend, option):
    """Each token's loss is that of its sequence alone, to the rounding of float32."""
    model = tiny(tokenizer, backend).eval()
    length = 64 if "packing" in option else None
    trainer = make_trainer("SFT", model, "memory", False, max_length=length, **option)
    batch = next(iter(trainer.get_train_dataloader()))
    assert {"seq_idx", "position_ids", "cu_seq_lens_q"} <= set(batch)
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    assert len(lengths) >= 2
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for ids in batch["input_ids"].split(lengths, 1):
            predicted = ids.shape[1] - 1
            total += model(ids, labels=ids).loss.double() * predicted
            count += predicted
        found = trainer.compute_loss(model, dict(batch))
        leaked = model(batch["input_ids"], labels=batch["labels"]).loss  # as one sequence
    error = abs(found.double() - total / count)
    assert error <= 8 * torch.finfo(torch.float32).eps * found
    assert abs(leaked - found) > 100 * error


@pytest.fixture
def original(tokenizer, tmp_path) -> Any:
    """A model without a swap, whose attention is far from uniform; saved in ``original``."""
    model = tiny(tokenizer, "flash")
    attnzoo.restore(model)
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(8 if x.ndim > 1 else 1)
    model.save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    return model


@pytest.mark.usefixtures("original")
def test_example(tmp_path, trl):
    module = runpy.run_path(str(ROOT / "integrations" / "trl" / "example.py"))
    given = ["--model", tmp_path / "original", "--steps", 2, "--out", tmp_path]
    trainer = module["main"]([*map(str, given)])
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config.attnzoo["backend"] == "linear"
    assert_close(dict(saved.state_dict()), dict(trainer.model.state_dict()), rtol=0, atol=0)


def test_distillation_example(tmp_path, trl, original, monkeypatch):
    """A step's loss is the reverse KL on what the student has generated, each row run alone."""
    compute, steps = trl.DistillationTrainer.compute_loss, []

    @torch.no_grad()
    def expected(model, teacher, inputs):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        found = []
        for ids, mask, own, kept in zip(*(inputs[name] for name in names), strict=True):
            own = own[kept.bool()]
            row = torch.cat([ids[mask.bool()], own])[None]
            last = slice(-len(own) - 1, -1)
            ours, theirs = (m(row).logits[0, last].log_softmax(-1) for m in (model, teacher))
            found.append((ours.exp() * (ours - theirs)).sum(-1))
        return torch.cat(found).mean()

    def compute_loss(self, model, inputs, *args, **options):
        loss = compute(self, model, inputs, *args, **options)
        steps.append((float(loss.detach()), float(expected(model, self.teacher_model, inputs))))
        return loss

    monkeypatch.setattr(trl.DistillationTrainer, "compute_loss", compute_loss)
    module = runpy.run_path(str(ROOT / "integrations" / "trl" / "distil.py"))
    given = ["--model", tmp_path / "original", "--steps", 2, "--tokens", 30, "--out", tmp_path]
    trainer = module["main"]([*map(str, given)])
    assert len(steps) == 2
    assert min(steps)[0] > 1e-3
    assert_close(*torch.tensor(steps, dtype=torch.float64).T, rtol=1e-4, atol=1e-6)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config.attnzoo["backend"] == "gated_linear"
    assert_close(dict(saved.state_dict()), dict(trainer.model.state_dict()), rtol=0, atol=0)
    teacher = dict(trainer.teacher_model.state_dict())
    assert_close(teacher, dict(original.state_dict()), rtol=0, atol=0)
