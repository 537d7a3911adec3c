"""The examples in the docstrings of public functions run, and every public function has one."""

import doctest
import importlib
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM

import attnzoo
import attnzoo.ops
from attnzoo.evaluation.models import embedded_model_path

# decorators, which register for the whole process (docs/extending.md), and a process group
WITHOUT = {"register", "register_feature_map", "register_gate", "context_parallel"}
FUNCTIONS = {
    name: value
    for module in (attnzoo, attnzoo.ops)
    for name in module.__all__
    if inspect.isfunction(value := getattr(module, name)) and name not in WITHOUT
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_of_a_public_function(name):
    function = FUNCTIONS[name]
    names = {
        **vars(importlib.import_module(function.__module__)),
        "torch": torch,
        "attnzoo": attnzoo,
        "folder": embedded_model_path(),
    }
    if "model" in inspect.signature(function).parameters:
        names["model"] = AutoModelForCausalLM.from_pretrained(embedded_model_path())
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, globs=names)
    assert test.examples, f"{name} has no example"
    torch.manual_seed(0)
    messages = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=messages.append)
    assert not messages, "".join(messages)
