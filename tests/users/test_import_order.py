"""``import attnzoo`` before or after any import of transformers and the libraries around it."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).resolve().parents[2]
FORKS = Path(__file__).with_name("import_in_forks.py")
CHILDREN = 2  # at a time

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

ENTRIES = (  # each imports the modules that attnzoo patches in another order
    "import transformers.models.llama.modeling_llama",
    "from transformers import AutoConfig",
    "from transformers import AutoModelForCausalLM",
    "from transformers import DynamicCache",
    "from transformers import Trainer",
    "from transformers import pipeline",
    "from transformers.masking_utils import create_causal_mask",
    "from peft import LoraConfig",
    "from trl import SFTTrainer",
)
OTHERS = (  # most of them in the order of one of these
    "import transformers",
    "import transformers.modeling_utils",
    "import transformers.processing_utils",
    "from transformers import AutoFeatureExtractor",
    "from transformers import AutoImageProcessor",
    "from transformers import AutoModel",
    "from transformers import AutoModelForSequenceClassification",
    "from transformers import AutoProcessor",
    "from transformers import AutoTokenizer",
    "from transformers import BertModel",
    "from transformers import BitsAndBytesConfig",
    "from transformers import CLIPModel",
    "from transformers import CLIPProcessor",
    "from transformers import DataCollatorForLanguageModeling",
    "from transformers import GenerationConfig",
    "from transformers import LlamaConfig",
    "from transformers import LlamaForCausalLM",
    "from transformers import PreTrainedConfig",
    "from transformers import PretrainedConfig",
    "from transformers import PreTrainedModel",
    "from transformers import PreTrainedTokenizerFast",
    "from transformers import ProcessorMixin",
    "from transformers import Seq2SeqTrainer",
    "from transformers import set_seed",
    "from transformers import StaticCache",
    "from transformers import T5ForConditionalGeneration",
    "from transformers import TextStreamer",
    "from transformers import TrainingArguments",
    "from transformers import ViTModel",
    "from transformers import WhisperProcessor",
    "from transformers.cache_utils import Cache",
    "from transformers.configuration_utils import PreTrainedConfig",
    "from transformers.generation.utils import GenerationMixin",
    "from transformers.integrations.sdpa_attention import sdpa_attention_forward",
    "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS",
    "from transformers.models.auto.modeling_auto import AutoModelForCausalLM",
    "from accelerate import Accelerator",
    "import datasets",
    "import lm_eval.models.huggingface",
    "from peft import AutoPeftModelForCausalLM",
    "from peft import get_peft_model",
    "from peft import PeftModel",
    "from sentence_transformers import SentenceTransformer",
    "from trl import DPOTrainer",
    "from trl import GRPOTrainer",
    "from trl import SFTConfig",
)
FRESH = (
    "from transformers import pipeline",
    "from transformers import CLIPProcessor",
    "from sentence_transformers import SentenceTransformer",
    "from trl import SFTTrainer",
)
OPTIONAL = {"datasets", "lm_eval", "peft", "sentence_transformers", "trl"}

PROOF = """
import attnzoo, tempfile, torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, vocab_size=32)
config.attnzoo = {"backend": "linear"}
model = LlamaForCausalLM._from_config(config, attn_implementation="attnzoo").double()
assert [layer.backend for layer in attnzoo.describe(model)] == ["linear"]

ids = torch.arange(6)[None]
with torch.no_grad():
    alone = model(ids[:, 2:]).logits
    mask, positions = (ids >= 2).long(), (ids - 2).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(padded[:, 2:], alone)  # not without our mask function
assert [layer.impl != "" for layer in attnzoo.describe(model)] == [True]  # it ran

with tempfile.TemporaryDirectory() as folder:
    model.config.save_pretrained(folder)  # with the model type attnzoo_llama
    assert AutoConfig.from_pretrained(folder).attnzoo["backend"] == "linear"

del model.config.attn_implementation
assert model.config.to_diff_dict()["attn_implementation"] == "attnzoo"
"""

# Threads that import from a package of transformers while it replaces itself by a lazy module can
# fail, with or without attnzoo, so these packages, not what is in them, are imported first.
THREADS = """
import threading, transformers
import transformers.distributed, transformers.generation, transformers.integrations
import transformers.models.auto
{first}
lines, errors = {lines}, []
barrier = threading.Barrier(len(lines))

def run(line):
    barrier.wait()
    try:
        exec(line, {{}})
    except Exception as error:
        errors.append(f"{{line}}: {{error!r}}")

threads = [threading.Thread(target=run, args=(line,)) for line in lines]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
"""
PARALLEL = {
    "transformers": THREADS.format(
        first="import attnzoo",
        lines=[
            f"from transformers import {name}"
            for name in ("pipeline", "LlamaForCausalLM", "Trainer", "AutoProcessor")
        ],
    ),
    "attnzoo's names": THREADS.format(
        first="import attnzoo",
        lines=[
            "from transformers import LlamaForCausalLM",
            *(
                f"import attnzoo; attnzoo.{name}"
                for name in ("swap", "describe", "context_parallel")
            ),
        ],
    ),
    "attnzoo itself": THREADS.format(
        first="",
        lines=["import transformers.modeling_utils", "import attnzoo"],
    ),
}
SEARCH = """
import attnzoo
from importlib.util import find_spec
assert find_spec("transformers.modeling_utils")  # a search, without an import
"""
SECOND_TRY = """
import attnzoo, sys
sys.modules["transformers.loss.loss_utils"] = None
try:
    import transformers.modeling_utils
except ImportError:
    del sys.modules["transformers.loss.loss_utils"]
else:
    raise AssertionError("the first import should fail")
"""


def installed(line: str) -> bool:
    """Whether the library that a line imports is installed, or is no optional one."""
    library = line.split()[1].partition(".")[0]
    return library not in OPTIONAL or find_spec(library) is not None


def environment() -> dict[str, str]:
    """Return variables for processes with one thread that find attnzoo, installed or not."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path.rstrip(os.pathsep)}


def check(programs: dict[str, str]) -> None:
    """Run each program and the proof in a process that is forked from one with torch loaded."""
    done = run(
        [sys.executable, FORKS, CHILDREN],
        input=json.dumps([program + PROOF for program in programs.values()]),
        env=environment(),
        timeout=1200,
        check=True,
    )
    outputs = dict(zip(programs, json.loads(done.stdout), strict=True))
    failed = {name: output for name, output in outputs.items() if output}
    report = "\n\n".join(f"== {name}: {output}" for name, output in failed.items())
    assert not failed, f"{len(failed)} of {len(outputs)} fail:\n{report}"


@needs_fork
def test_hooks_are_installed_whatever_is_imported_first():
    programs = {line: f"import attnzoo\n{line}" for line in ENTRIES if installed(line)}
    programs["attnzoo after a part"] = "import transformers.cache_utils\nimport attnzoo"
    programs["attnzoo.swap"] = "import attnzoo\nattnzoo.swap"
    programs["a search"] = SEARCH
    programs["a second try"] = SECOND_TRY
    check(programs | {f"threads import {name}": program for name, program in PARALLEL.items()})


@needs_fork
@pytest.mark.slow
@pytest.mark.exhaustive
def test_more_imports_after_attnzoo():
    check({line: f"import attnzoo\n{line}" for line in OTHERS if installed(line)})


@needs_fork
@pytest.mark.slow
def test_imports_before_attnzoo():
    lines = [line for line in ENTRIES + OTHERS if installed(line)]
    check({"one": f"{FRESH[0]}\nimport attnzoo", "all": "\n".join([*lines, "import attnzoo"])})


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.exhaustive] if line != FRESH[0] else [])
        for line in FRESH
    ],
)
def test_attnzoo_first_in_a_fresh_process(line):
    """Without torch loaded before attnzoo, as it is in the forked processes."""
    if not installed(line):
        pytest.skip(f"the library is not installed: {line}")
    program = f"import attnzoo\n{line}{PROOF}"
    run([sys.executable, "-c", program], env=environment(), check=True)
