"""Generate tokens of students with vLLM and nothing of attnzoo: ``python students_serve.py FILE``.

The file names the models and their options, has the prompts and the numbers of tokens, and gets the
tokens. The environment variables of vLLM are those of the tests, with ``VLLM_PLUGINS`` empty.
"""

import gc
import json
import sys
from pathlib import Path
from types import ModuleType

from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

TORCHVISION = "torchvision.transforms.v2"


class Unused(ModuleType):
    """A module whose functions nothing may use."""

    def __getattr__(self, name):
        """Raise for every function, also where an AttributeError would be handled."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"vLLM uses {self.__name__}.{name} for a model of text")


def load_class(name):
    """Import a class of vLLM in this process, which would be imported in another one to look at it.

    That of Qwen 3.5 imports those for images, and they torchvision, whose build on the package
    index is for GPUs and does not import here. Text uses none of its functions: a module in its
    place raises if one is used.
    """
    sys.modules[TORCHVISION] = Unused(TORCHVISION)
    vars(sys.modules[TORCHVISION])["functional"] = Unused(f"{TORCHVISION}.functional")
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    del sys.modules[TORCHVISION]


def generate(model, prompts, counts):
    """Return the greedy tokens of all prompts, six of which run at once in steps of 128 tokens."""
    load_class(model["class"])
    limits = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 128}
    engine = LLM(
        model["folder"],
        dtype=model["dtype"],
        model_impl=model["impl"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        **limits,
    )
    sampling = [
        SamplingParams(temperature=0, max_tokens=x, ignore_eos=True, detokenize=False)
        for x in counts
    ]
    given = [{"prompt_token_ids": x} for x in prompts]
    found = engine.generate(given, sampling, use_tqdm=False)
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return [list(x.outputs[0].token_ids) for x in found]


def main():
    """Add the tokens to the file."""
    sys.modules["attnzoo"] = sys.modules["attnzoo_vllm"] = None  # importing them fails
    path = Path(sys.argv[1])
    run = json.loads(path.read_text())
    for model in run["models"].values():
        model["tokens"] = generate(model, run["prompts"], run["counts"])
    path.write_text(json.dumps(run))


if __name__ == "__main__":
    main()
