"""transformers' own model tests, on models that are built with a swap.

test_transformers_suite.py runs this file in a process of its own; the folder of transformers' tests
is on its path, and the environment variable BACKEND names the backend. What a backend does not
support stays exact. Models without a head, with other heads on the same layers, and of other
families than Llama and T5 run in `make exhaustive` only.
"""

import os
import unittest

import pytest
import torch
import transformers as hf
from suite.test_modeling_common import ModelTesterMixin, ids_tensor

import attnzoo
from attnzoo.evaluation.presets import preset_options

BACKEND = os.environ["BACKEND"]
EXHAUSTIVE = os.environ["EXHAUSTIVE"] == "1"
SIZES = {
    **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 512},
}
GROUPED = {"num_key_value_heads": 1, "pad_token_id": 0}


def classes(with_head, *others):
    """Return the model with a language-modelling head; if all tests run, after the others."""
    return (*others, with_head) if EXHAUSTIVE else (with_head,)


class ModelTester:
    """The interface that transformers' tests need of a family, with their names."""

    batch_size, seq_length, encoder_seq_length, num_choices = 3, 7, 7, 4
    num_hidden_layers = num_attention_heads = 2
    hidden_size, is_training = 32, True

    def __init__(self, make_config):
        self.make_config = make_config

    def get_config(self):
        config = self.make_config()
        (options,) = preset_options(BACKEND, "tiny")
        config.attnzoo = attnzoo.AttentionSpec(BACKEND, else_="softmax", **options)
        config._attn_implementation = "attnzoo"
        return config

    def prepare_config_and_inputs_for_common(self):
        config, tokens = self.get_config(), ids_tensor([3, 7], 99).clamp(2)
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if config.is_encoder_decoder:
            given |= {"decoder_input_ids": tokens.flip(1), "use_cache": False}
            given["decoder_attention_mask"] = torch.ones_like(tokens)
        return config, given


@pytest.mark.filterwarnings("ignore:.*(as requested|the .else. of the spec)")
class SuiteOfFamily(ModelTesterMixin):
    # asserts that the name of the implementation is "sdpa", which it is not
    test_sdpa_can_dispatch_non_composite_models = None
    # asserts that the tests of generation run too, which are not in the source distribution
    test_generation_tester_mixin_inheritance = None
    # sets output_attentions in the config, which transformers refuses for all but "eager"
    test_retain_grad_hidden_states_attentions = None

    def setUp(self):
        self.model_tester = ModelTester(self.make_config)

    def test_the_models_run_the_swap(self):
        for cls in self.all_model_classes:
            rows = attnzoo.describe(cls._from_config(self.model_tester.get_config()))
            assert {row.backend for row in rows} <= {BACKEND, "softmax"}


class LlamaTest(SuiteOfFamily, unittest.TestCase):
    all_model_classes = classes(
        hf.LlamaForCausalLM, hf.LlamaModel, hf.LlamaForSequenceClassification
    )

    def make_config(self):
        return hf.LlamaConfig(**SIZES, **GROUPED)


class Gemma3Test(SuiteOfFamily, unittest.TestCase):
    all_model_classes = classes(hf.Gemma3ForCausalLM, hf.Gemma3TextModel)

    def make_config(self):
        kinds = ["full_attention", "sliding_attention"]
        return hf.Gemma3TextConfig(
            **SIZES, **GROUPED, head_dim=16, sliding_window=4, layer_types=kinds
        )


class GPT2Test(SuiteOfFamily, unittest.TestCase):
    all_model_classes = classes(hf.GPT2LMHeadModel, hf.GPT2Model, hf.GPT2ForSequenceClassification)

    def make_config(self):
        tokens = {"bos_token_id": 98, "eos_token_id": 98, "pad_token_id": 97}
        return hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, **tokens)


class BertTest(SuiteOfFamily, unittest.TestCase):
    all_model_classes = classes(hf.BertForMaskedLM, hf.BertModel, hf.BertForTokenClassification)

    def make_config(self):
        return hf.BertConfig(**SIZES)


class T5Test(SuiteOfFamily, unittest.TestCase):
    all_model_classes = classes(hf.T5ForConditionalGeneration, hf.T5Model)
    is_encoder_decoder = True
    # fails without a swap too: it compares the whole model with one of its parts
    test_model_base_model_prefix = None

    def make_config(self):
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 37, "num_layers": 2, "num_heads": 2}
        tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
        return hf.T5Config(vocab_size=99, **sizes, **tokens, relative_attention_num_buckets=8)
