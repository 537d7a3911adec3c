"""An adapter of a swapped model in two processes: one trains and saves it, another loads it."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import sys, peft, torch, transformers, attnzoo
from attnzoo.evaluation.models import embedded_model_path

folder = sys.argv[1]
model = transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path())
attnzoo.swap(model, "gated_linear", feature_map="hedgehog", window=8)
model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
ids = torch.arange(40, 72).view(2, 16)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _ in range(2):
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
model.eval().save_pretrained(folder)
with torch.no_grad():
    torch.save(model(input_ids=ids).logits, folder + "/logits.pt")
"""
LOAD = """
import json, sys, peft, torch, transformers  # before attnzoo, as in many programs
import attnzoo
from attnzoo.errors import SpecError
from attnzoo.evaluation.models import embedded_model_path

folder = sys.argv[1]
ids = torch.arange(40, 72).view(2, 16)
model = transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path())
try:
    peft.PeftModel.from_pretrained(model, folder)
except SpecError as error:
    message = str(error)
else:
    raise AssertionError("an adapter of a swap loads onto a model without one")
with torch.no_grad():
    exec("import attnzoo; " + message[message.index("attnzoo.swap("):])  # what the error suggests
    loaded = peft.PeftModel.from_pretrained(model, folder).eval()
    expected = torch.load(folder + "/logits.pt")
    assert torch.equal(loaded(input_ids=ids).logits, expected)
"""
WITHOUT = """
import sys, warnings, peft
assert "attnzoo" not in sys.modules
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    peft.PeftConfig.from_pretrained(sys.argv[1])
assert any("'attnzoo'" in str(warning.message) for warning in caught), caught
"""


def test_adapter_saved_in_one_process_and_loaded_in_another(fresh_python, tmp_path):
    for program in (TRAIN, LOAD, WITHOUT):  # the last one: PEFT names the field that it ignores
        done = fresh_python(program, tmp_path, cwd=ROOT)
        assert done.returncode == 0, done.stderr


def test_example(tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "integrations" / "peft" / "example.py"))
    last = example["main"](["--steps", "6", "--out", str(tmp_path)])
    first = float(capsys.readouterr().out.partition("step 0: loss ")[2].split()[0])
    assert last < first
    assert (tmp_path / "adapter_model.safetensors").is_file()
