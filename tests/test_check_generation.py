"""``check_generation`` passes for a correct backend and fails for an incorrect one."""

import pytest
import transformers as hf

import attnzoo
from attnzoo.backends.linear import LinearBackend
from attnzoo.testing import ConformanceError, check_generation
from tests.helpers import tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def without_state(inputs):
    return inputs._replace(state=None)


def with_other_keys_in_a_batch(inputs):
    is_batch = inputs.sequences is not None or len(inputs.q) > 1
    return inputs._replace(k=inputs.k * (1.5 if is_batch else 1))


def test_a_copy_of_the_model_is_checked(model):
    check_generation(model, attnzoo.AttentionSpec("linear"))
    assert not any("attnzoo" in name for name, _ in model.named_modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_state, "greedy generation with left padding"),
        (with_other_keys_in_a_batch, "in a batch with"),
    ],
)
def test_errors_are_found(model, change, message, monkeypatch):
    attend = LinearBackend.attend
    monkeypatch.setattr(LinearBackend, "attend", lambda self, inputs: attend(self, change(inputs)))
    with pytest.raises(ConformanceError, match=f"generation differs from one pass: .*{message}"):
        check_generation(model, "linear")


def test_models_that_cannot_be_checked_are_refused(model):
    with pytest.raises(ValueError, match="decoding='hashed'"):
        check_generation(model, "reformer")
    with pytest.raises(ValueError, match=r"got torch\.bfloat16"):
        check_generation(hf.LlamaForCausalLM(model.config).bfloat16())
