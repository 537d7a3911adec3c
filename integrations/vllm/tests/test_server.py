"""The server, in processes of its own, as users start it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch

SECONDS = 600  # to start; most of it is importing vLLM in each process


@pytest.fixture
def server(folders, tmp_path):
    """Start a server of the embedded model, whose folder has the old form.

    Return a function that waits until it answers and returns its address: the references can be
    computed while it starts.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--model", str(folders["embedded"]), "--served-model-name", "swapped"]
    command += ["--dtype", "float32", "--max-model-len", "512"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"

    def wait():
        end = time.monotonic() + SECONDS
        while True:
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
            try:
                urlopen(f"{address}/health", timeout=5)
                return address
            except (URLError, ConnectionError, TimeoutError):
                time.sleep(1)

    try:
        yield wait
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def test_completions_are_the_tokens_of_generate(server, references):
    address = server()
    for x in references["embedded", torch.float32][:6]:
        asked = {"model": "swapped", "prompt": x.prompt, "max_tokens": x.count, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        request = Request(f"{address}/v1/completions", json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        with urlopen(request, timeout=120) as answer:
            (choice,) = json.load(answer)["choices"]
        assert choice["token_ids"] == x.tokens
