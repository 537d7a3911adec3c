"""Adapters that transformers itself adds and loads, and the swap that their files record."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file

import attnzoo
from attnzoo.errors import SpecError, UnsupportedError

pytestmark = [
    pytest.mark.usefixtures("any_peft"),
    pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:this swap drops the trained extras:UserWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]
SWAPS: dict[str | None, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "hedgehog": ("linear", {"feature_map": "hedgehog"}),
    "gates": ("gated_linear", {}),
    "window": ("flash", {"window": 4}),
}
WITH_PARAMETERS = ("hedgehog", "gates")


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture
def base(folder):
    return lambda: hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)


def swap(model: Any, name: str) -> Any:
    return attnzoo.swap(model, SWAPS[name][0], **SWAPS[name][1])


def train(model: Any, ids: Any) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.eval()


def logits(model: Any, ids: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def recorded(folder: Path) -> Any:
    return json.loads((folder / "adapter_config.json").read_text())["attnzoo"]


def saved_and_loaded(model: Any, base: Any, folder: Path) -> Any:
    """Save an adapter, load the base model, swap it as the adapter's file says, and load both."""
    model.save_pretrained(folder)
    again = attnzoo.swap(base(), recorded(folder))
    again.load_adapter(str(folder))
    return again


@pytest.mark.parametrize("name", SWAPS)
def test_swap_then_add(name, base, ids, tmp_path):
    model = swap(base(), name)
    model.add_adapter(lora())
    train(model, ids)
    again = saved_and_loaded(model, base, tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    in_peft = peft.PeftModel.from_pretrained(swap(base(), name), tmp_path)
    assert torch.equal(logits(in_peft, ids), logits(model, ids))


@pytest.mark.parametrize(
    ("trained", "loaded"),
    [
        ("AutoModel", "AutoModelForCausalLM"),
        ("AutoModelForCausalLM", "AutoModel"),
        ("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
    ],
)
def test_an_adapter_of_another_class(trained, loaded, folder, ids, tmp_path):
    """A head is a prefix more in the names, which transformers removes, and nobody adds."""

    def states(model):
        with torch.no_grad():
            return model.eval()(ids, output_hidden_states=True).hidden_states[-1]

    swap(getattr(hf, trained).from_pretrained(folder), "gates").save_pretrained(tmp_path / "base")
    model = getattr(hf, trained).from_pretrained(tmp_path / "base")
    model.add_adapter(lora())
    for name, x in model.named_parameters():
        if "attnzoo" in name or "lora" in name:
            x.data += 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(tmp_path / "adapter")
    expected = states(model)
    other = getattr(hf, loaded)
    again = other.from_pretrained(tmp_path / "base")
    before = states(again)
    same_names = "AutoModel" not in (trained, loaded)
    if same_names:
        assert torch.equal(
            states(peft.PeftModel.from_pretrained(again, tmp_path / "adapter")), expected
        )
        return
    with pytest.raises(SpecError, match="trained on a model of another class"):
        peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    again = other.from_pretrained(tmp_path / "base")
    if trained == "AutoModel":
        with pytest.raises(SpecError, match="trained on a model of another class"):
            again.load_adapter(str(tmp_path / "adapter"))
        return
    again.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(states(again), expected)
    assert not torch.equal(expected, before)


def test_parameters_that_no_module_has_are_refused(base, ids, tmp_path):
    model = swap(base(), "gates")
    model.add_adapter(lora())
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    renamed = {k.replace("layers.0", "layers.9"): x for k, x in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    again = swap(base(), "gates")
    before = logits(again, ids)
    with pytest.raises(SpecError, match=r"do not have the same .*layers\.9\.self_attn\.attnzoo"):
        again.load_adapter(str(tmp_path))
    assert torch.equal(logits(again, ids), before)
    assert not any("lora" in key for key in again.state_dict())


@pytest.mark.parametrize(
    ("name", "order"),
    [("linear", "load"), ("window", "from_pretrained"), ("hedgehog", "add"), ("gates", "load")],
)
def test_adapter_then_swap(name, order, base, ids, tmp_path):
    model = base()
    model.add_adapter(lora())
    train(model, ids)
    if order != "add":
        model.save_pretrained(tmp_path / "before")
        if order == "load":
            model = base()
            model.load_adapter(str(tmp_path / "before"))
        else:
            model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    swap(model, name)
    if name in WITH_PARAMETERS:
        with pytest.raises(UnsupportedError, match=r"swap the model before model\.add_adapter"):
            model.save_pretrained(tmp_path)
        for module in model.modules():
            if isinstance(module, attnzoo.AttentionBackend):
                module.requires_grad_(False)
    again = saved_and_loaded(model, base, tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("second", SWAPS)
def test_the_last_swap_is_recorded(second, base, ids, tmp_path):
    model = swap(base(), "hedgehog")
    model.add_adapter(lora())
    swap(model, second)
    if second in WITH_PARAMETERS:
        with pytest.raises(UnsupportedError, match="not part of the adapter"):
            model.save_pretrained(tmp_path)
        return
    again = saved_and_loaded(model, base, tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("disable", [attnzoo.restore, "sdpa"])
def test_no_swap_is_recorded_of_a_model_that_runs_none(disable, base, ids, tmp_path):
    model = swap(base(), "hedgehog")
    model.add_adapter(lora())
    train(model, ids)
    if disable == "sdpa":
        model.set_attn_implementation(disable)
    else:
        disable(model)
    model.save_pretrained(tmp_path)
    assert "attnzoo" not in json.loads((tmp_path / "adapter_config.json").read_text())
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again, ids), logits(model, ids), atol=1e-5, rtol=1e-5)


def test_several_adapters(base, ids, tmp_path):
    model = swap(base(), "hedgehog")
    expected = {}
    for name in ("first", "second"):
        model.add_adapter(lora(), name)
        model.set_adapter(name)
        train(model, ids)
        expected[name] = logits(model, ids)
        model.save_pretrained(tmp_path / name)
    again = attnzoo.swap(base(), recorded(tmp_path / "first"))
    for name in expected:
        again.load_adapter(str(tmp_path / name), name)
    for name, x in expected.items():
        again.set_adapter(name)
        assert torch.equal(logits(again, ids), x)


def test_folder_of_an_adapter(base, ids, tmp_path):
    """``from_pretrained`` loads the base model, which has no swap unless its config has one."""
    model = swap(base(), "hedgehog")
    model.add_adapter(lora())
    train(model, ids)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        SpecError, match=r"base model alone.*swap the model: attnzoo\.swap\(model, "
    ):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    config = base().config
    config.attnzoo = recorded(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, attn_implementation="attnzoo"
    )
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_adapters_are_disabled_and_enabled(name, base, ids):
    model = swap(base(), name)
    raw = logits(model, ids)
    model.add_adapter(lora())
    train(model, ids)
    expected = logits(model, ids)
    model.disable_adapters()
    assert torch.equal(logits(model, ids), raw)
    model.enable_adapters()
    assert torch.equal(logits(model, ids), expected)


def test_weights_of_another_swap_do_not_replace_an_adapter(base, ids, tmp_path):
    model = swap(base(), "linear")
    model.add_adapter(lora())
    train(model, ids)
    model.save_pretrained(tmp_path)
    expected = logits(model, ids)

    def transformers_loaders(model: Any) -> Any:
        model.add_adapter(lora())
        return [lambda: model.load_adapter(str(tmp_path), "default", hotswap=True)]

    def peft_loaders(model: Any) -> Any:
        adapted = peft.get_peft_model(model, lora())
        return [
            lambda: adapted.load_adapter(str(tmp_path), "default"),
            lambda: hotswap_adapter(adapted, str(tmp_path), "default", torch_device="cpu"),
        ]

    for loaders in (transformers_loaders, peft_loaders):
        other, same = swap(base(), "window"), swap(base(), "linear")
        for load in loaders(other):
            before = logits(other, ids)
            with pytest.raises(SpecError, match="trained under another attention"):
                load()
            assert torch.equal(logits(other, ids), before)
        for load in loaders(same):
            load()
            assert torch.equal(logits(same, ids), expected)


@pytest.mark.parametrize("library", ["transformers", "peft", "compiled"])
def test_an_adapter_that_replaces_another_one_brings_its_backends_or_is_refused(
    library, base, ids, tmp_path
):
    def adapted(seed: int, **options: Any) -> Any:
        model = swap(base(), "gates")
        if library == "transformers":
            model.add_adapter(lora(**options))
        else:
            model = peft.get_peft_model(model, lora(**options))
        generator = torch.Generator().manual_seed(seed)
        for key, x in model.named_parameters():
            if "lora" in key or "modules_to_save" in key:
                x.data += 0.3 * torch.randn(x.shape, generator=generator)
        return model

    def replace(model: Any, folder: Path) -> None:
        if library == "transformers":
            model.load_adapter(str(folder), "default", hotswap=True)
        else:
            target = torch.compile(model) if library == "compiled" else model
            hotswap_adapter(target, str(folder), "default", torch_device="cpu")

    with_extras, without = adapted(3), adapted(4, modules_to_save=[])
    with_extras.save_pretrained(tmp_path / "with")
    without.save_pretrained(tmp_path / "without")
    model = adapted(5)
    if library == "transformers":
        replace(model, tmp_path / "with")
        assert torch.equal(logits(model, ids), logits(with_extras, ids))
    else:
        with pytest.raises(UnsupportedError, match="hotswap replaces no parameters"):
            replace(model, tmp_path / "with")
    for other, folder in ((model, "without"), (without, "with")):
        state = {key: x.clone() for key, x in other.state_dict().items()}
        with pytest.raises(SpecError, match=r"has parameters of (no|2) backend.*another name"):
            replace(other, tmp_path / folder)
        assert all(torch.equal(x, state[key]) for key, x in other.state_dict().items())


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer(model: Any, folder: Path, ids: Any, steps: int) -> Any:
    arguments = hf.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=1,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return hf.Trainer(model=model, args=arguments, train_dataset=Rows(ids))


@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_checkpoints_of_the_trainer(library, base, ids, tmp_path):
    def adapted(name: str, *, before: bool) -> Any:
        model = swap(base(), name) if before else base()
        if library == "transformers":
            model.add_adapter(lora())
        else:
            model = peft.get_peft_model(model, lora())
        return model if before else swap(model, name)

    for name, before in (("window", False), ("gates", True)):
        model = adapted(name, before=before)
        out = tmp_path / name
        trainer(model, out, ids, 2).train()
        again = attnzoo.swap(base(), recorded(out / "checkpoint-2"))
        again.load_adapter(str(out / "checkpoint-2"))
        assert torch.equal(logits(again, ids), logits(model, ids))
    if library == "peft":  # transformers does not resume its own adapters
        trainer(adapted("gates", before=True), out, ids, 3).train(resume_from_checkpoint=True)
        with pytest.raises(SpecError, match="trained under another attention"):
            trainer(adapted("window", before=True), out, ids, 4).train(resume_from_checkpoint=True)
