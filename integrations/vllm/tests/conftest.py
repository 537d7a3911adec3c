"""One engine at a time, in this process; references and folders are made once."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import gc

import models
import pytest
import torch


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return the folder of each model, saved."""
    made = {}
    for name, (build, layers) in models.MODELS.items():
        made[name] = tmp_path_factory.mktemp("models") / name
        models.swap(build(), layers).save_pretrained(made[name])
        models.finish(made[name], is_old=name == "embedded")
    return made


@pytest.fixture(scope="session")
def references(folders, request):
    """Return what ``generate()`` says, by model and dtype.

    It is computed before the first engine, which changes transformers' classes in this process.
    """
    chosen = [vars(x)["callspec"].params for x in request.session.items if "callspec" in vars(x)]
    wanted = {(x["name"], x["dtype"]) for x in chosen if "dtype" in x}
    wanted |= {(name, torch.float32) for name in folders}
    found = {(name, dtype): models.generate(folders[name], dtype) for name, dtype in wanted}
    softmax = models.random_qwen(len(models.LAYERS)).eval()
    asked = found["qwen", torch.float32]
    logits = [models.next_logits(softmax, x.prompt, x.tokens) for x in asked]
    return found | {"softmax": [x.argmax(1).tolist() for x in logits]}


@pytest.fixture
def engine(references):
    """Return a function that starts an engine, which ends with the test."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    started = []

    def start(folder, **options):
        limits = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 128}
        started.append(LLM(str(folder), **limits, **options))
        return started[-1]

    yield start
    started.clear()
    gc.collect()
    cleanup_dist_env_and_memory()
