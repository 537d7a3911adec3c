"""Versions that are not tested are proved on tiny models, or refused by name."""

import json

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.autoload import FAILED_PATCHES
from attnzoo.errors import UnsupportedError
from attnzoo.hf import patches, release_check, seam
from attnzoo.hf.attention.call import LayerHook
from attnzoo.runtime.verdicts import FAILED, PASSED


@pytest.fixture(autouse=True)
def new_version(monkeypatch, tmp_path):
    """Install a version that no test has seen, and keep verdicts in a folder of the test."""
    monkeypatch.setattr(seam, "TESTED", {"transformers": (), "torch": ()})
    monkeypatch.setenv("ATTNZOO_CACHE", str(tmp_path))
    release_check._refusal.cache_clear()
    yield
    release_check._refusal.cache_clear()


def fail_if_called():
    raise AssertionError("checked again")


def test_a_working_version_passes_once(llama, tmp_path, monkeypatch):
    attnzoo.swap(llama(), "linear")
    (file,) = tmp_path.glob("release-swap-*.json")
    stored = json.loads(file.read_text("utf-8"))
    assert stored["outcome"] == PASSED
    assert stored["identity"]["transformers"] == hf.__version__

    release_check._refusal.cache_clear()  # another process
    monkeypatch.setattr(release_check, "check_release", fail_if_called)
    attnzoo.swap(llama(), "linear")


def test_tested_versions_are_not_checked(llama, monkeypatch):
    found = release_check.installed_versions()
    monkeypatch.setattr(seam, "TESTED", {name: (x,) for name, x in found.items()})
    monkeypatch.setattr(release_check, "check_release", fail_if_called)
    attnzoo.swap(llama(), "linear")


def renamed_cache(monkeypatch):
    """What transformers 5.24 did: the layers' cache has a name that the hook does not know."""
    monkeypatch.setattr(seam, "CACHE", ("an_old_name",))


def lost_cache(monkeypatch):
    """The hook finds no cache, and says nothing."""
    find = LayerHook.find
    monkeypatch.setattr(LayerHook, "find", lambda self, *given: [*find(self, *given)[:3], None])
    monkeypatch.setattr(LayerHook, "cache", lambda self, args, kwargs: None)


def lost_padding(monkeypatch):
    """The mask function no longer receives the padding."""
    monkeypatch.setattr("attnzoo.hf.masks._padding", lambda *_: None)


CHANGES = {
    renamed_cache: r"passes its cache as '.*', a name that attnzoo does not know",
    lost_cache: r"a dynamic cache holds no states, but DynamicLayer",
    lost_padding: r"softmax differs from the model's own attention",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__)
def test_a_version_that_does_not_fit_is_refused_by_name(change, llama, monkeypatch):
    model = llama()
    with monkeypatch.context() as patch:
        change(patch)
        verdict = release_check.check_release()
        assert verdict.outcome == FAILED
        version = rf"does not work with transformers {hf.__version__}, torch .*"
        refused = rf"{version}{CHANGES[change]}.*Install transformers \d"
        with pytest.raises(UnsupportedError, match=refused):
            attnzoo.swap(model, "linear")
    assert not hasattr(model.config, "attnzoo")
    release_check._refusal.cache_clear()
    with pytest.raises(UnsupportedError, match=version):  # remembered
        attnzoo.swap(llama(), "flash")
    config = hf.LlamaConfig(**model.config.to_dict() | {"attnzoo": {"backend": "linear"}})
    with pytest.raises(UnsupportedError, match=version):
        hf.LlamaForCausalLM._from_config(config, attn_implementation="attnzoo")


def test_a_patch_that_does_not_fit_leaves_transformers_usable(llama, monkeypatch):
    attnzoo.swap(llama(), "linear")  # PEFT, say, is imported and patched later
    patches.PATCHES["transformers.modeling_utils"](hf.activations)  # a module without the class
    try:
        with pytest.raises(UnsupportedError, match=r"patches does not fit .*activations"):
            attnzoo.swap(llama(), "linear")
    finally:
        FAILED_PATCHES.clear()


def test_a_change_in_a_folder_is_checked_again(monkeypatch, tmp_path):
    monkeypatch.setattr(release_check, "__file__", str(tmp_path / "release_check.py"))
    before = release_check._source_hash()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "state_layer.py").write_text("size = 1\n")
    assert release_check._source_hash() != before


def test_the_check_does_not_depend_on_the_model_that_is_built():
    """The first swapped model of a process may be built on the meta device, in 16 bits."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert release_check.check_release().outcome == PASSED
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
