"""No command runs code of a model's folder, whatever is answered on standard input."""

import builtins
import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnzoo.cli import app
from attnzoo.errors import AttnzooError
from attnzoo.evaluation.models import embedded_model_path

CLASSES = ("Config", "Model", "Tokenizer", "Processor", "ImageProcessor")
COMMANDS = {
    "describe": (),
    "swap": ("--attention", "linear", "--output-dir", "OUT"),
    "convert": ("--to", "mistral", "--output-dir", "OUT"),
    "plan": (
        *("--data", "DATA", "--output-file", "OUT"),
        *("--candidate", "flash:window=8", "--target-length", "64"),
    ),
    "plan --from": ("--data", "DATA", "--output-file", "OUT", "--from", "MODEL"),
    "recover": ("--data", "DATA", "--attention", "linear", "--output-dir", "OUT"),
    "recover --teacher": (
        *("--data", "DATA", "--teacher", "MODEL", "--train", "full", "--output-dir", "OUT"),
    ),
    "finetune": ("--data", "DATA", "--attention", "linear", "--output-dir", "OUT"),
    "evaluate": ("--data", "DATA"),
    "compare": ("--output-dir", "OUT", "--attention", "linear", "--lengths", "64"),
    "heads": ("--rows", "1", "--data", "DATA"),
    "heads --save": ("--rows", "1", "--data", "DATA", "--prune", "0.5", "--save", "OUT"),
    "inspect": ("--output-dir", "OUT", "--attention", "linear", "--data", "DATA"),
    "memory": ("--attention", "linear"),
}


def write_json(path, **data):
    path.write_text(json.dumps(data))


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def hostile_folder(folder, kind, marker):
    """Write a model folder with code that creates the file ``marker`` where it is run."""
    source = embedded_model_path()
    shutil.copytree(source, folder)
    auto = {
        **{f"Auto{name}": f"hostile.Hostile{name}" for name in CLASSES},
        "AutoModelForCausalLM": "hostile.HostileModel",
        "AutoTokenizer": ["hostile.HostileTokenizer", "hostile.HostileTokenizer"],
    }
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    (folder / "hostile.py").write_text(code + "".join(f"class Hostile{x}: pass\n" for x in CLASSES))
    config = json.loads((source / "config.json").read_text())
    match kind:
        case "model":
            config |= {"model_type": "hostile", "architectures": ["HostileModel"]}
        case "head":  # a known config, for which transformers has no causal model
            config = {"model_type": "vit", "architectures": ["HostileModel"]}
        case "tokenizer":
            own = {"tokenizer_class": "HostileTokenizer", "processor_class": "HostileProcessor"}
            for name in ("tokenizer_config", "processor_config", "preprocessor_config"):
                write_json(folder / f"{name}.json", auto_map=auto, **own)
        case "weights":
            (folder / "model.safetensors").unlink()
            with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as weights:
                weights.writestr("archive/data.pkl", pickle.dumps(Payload(marker)))
                weights.writestr("archive/version", "3\n")
        case "adapter":
            write_json(
                folder / "adapter_config.json",
                peft_type="LORA",
                base_model_name_or_path=str(folder),
                auto_mapping={"base_model_class": "HostileModel", "parent_library": "hostile"},
                attnzoo={"backend": "linear", "options": {"feature_map": "hostile:HostileModel"}},
            )
            (folder / "adapter_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    write_json(folder / "config.json", **config, auto_map=auto)


@pytest.mark.parametrize("kind", ["model", "head", "tokenizer", "weights", "adapter"])
def test_no_command_runs_code_of_the_folder(kind, tmp_path, monkeypatch):
    folder, marker, data = tmp_path / "model", tmp_path / "marker", tmp_path / "data.txt"
    hostile_folder(folder, kind, marker)
    data.write_text("a line of text\n" * 2000)
    questions = []
    monkeypatch.setattr(builtins, "input", lambda text="": questions.append(text) or "yes")
    monkeypatch.chdir(folder)  # a module beside a script can be imported
    own = json.loads((folder / "config.json").read_text())
    for name, given in COMMANDS.items():
        if name in ("compare", "memory") and kind not in ("model", "head"):
            continue  # would measure for seconds
        config = own
        if name == "evaluate":  # takes a swapped model
            classes = [f"Attnzoo{name}" for name in own["architectures"]]
            config = {**own, "model_type": f"attnzoo_{own['model_type']}", "architectures": classes}
            config["attnzoo"] = {"backend": "flash", "options": {"window": 48}}
        write_json(folder / "config.json", **config)
        paths = {"OUT": str(tmp_path / f"out of {name}"), "DATA": str(data), "MODEL": str(folder)}
        arguments = [name.split()[0], str(folder), *(paths.get(x, x) for x in given)]
        result = CliRunner().invoke(app, arguments, input="yes\n" * 99)
        assert not marker.exists(), name
        assert not questions, name
        assert isinstance(result.exception, AttnzooError | OSError | None), (name, result.exception)
