"""The drafter under the model tests of transformers: `test_conformance.py` runs this file next to them.

The suite's tests of training want a model that returns a loss, so the drafter comes with one here: a regression of the
logits and confidences of whole blocks, through every parameter.
"""

import functools
import unittest

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from ready_hf import ReadyDrafterConfig, ReadyDrafterModel

from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, floats_tensor


# By this the suite knows base models, which have no loss.
MODEL_MAPPING_NAMES["ready_drafter"] = "ReadyDrafterModel"


class ReadyDrafterWithLoss(ReadyDrafterModel):
    @functools.wraps(ReadyDrafterModel.forward)
    def forward(self, *args, labels=None, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if labels is not None and not isinstance(outputs, tuple):
            head = torch.nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False, device=labels.device)
            torch.nn.init.eye_(head.requires_grad_(False).weight)
            logits, confidences = self.draft_logits(outputs.last_hidden_state, labels, head)
            outputs.loss = logits.square().mean() + confidences.square().mean()
        return outputs


class DrafterTester:
    """What the suite asks for: sizes, a configuration, inputs."""

    is_training = True
    batch_size, seq_length, context_length = 3, 8, 11
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    key_length = context_length + seq_length  # a block attends to the context and to itself

    def get_config(self):
        return ReadyDrafterConfig(
            vocab_size=99,
            hidden_size=self.hidden_size,
            intermediate_size=48,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=64,
            block_size=self.seq_length,
            target_layer_ids=[0, 2],
            markov_rank=8,
            markov_head_type="gated",
            state_layer_ids=[0, 1],
            state_shape=[2, 4, 6],
            reader_rank=8,
            reader_query_rank=4,
            reader_gate=True,
        )

    def prepare_config_and_inputs_for_common(self):
        config, batch = self.get_config(), self.batch_size
        inputs = {
            "noise_embeds": floats_tensor([batch, self.seq_length, self.hidden_size]),
            "context_hidden_states": floats_tensor([batch, self.context_length, 2 * self.hidden_size]),
            "states": floats_tensor([batch, 1, 2, *config.state_shape]),
            "attention_mask": torch.ones(batch, self.seq_length, dtype=torch.long),
        }
        return config, inputs


class DrafterTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (ReadyDrafterModel, ReadyDrafterWithLoss)
    additional_model_inputs = ["context_hidden_states", "states"]
    test_can_init_all_missing_weights_before_2023 = True  # the suite would leave us out: our files carry no year

    def setUp(self):
        self.model_tester = DrafterTester()
        self.config_tester = ConfigTester(self, config_class=ReadyDrafterConfig, has_text_modality=False)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class is ReadyDrafterWithLoss:
            shape = inputs["noise_embeds"].shape[:2]
            inputs["labels"] = torch.zeros(shape, dtype=torch.long, device=inputs["noise_embeds"].device)
        return inputs

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_model_get_set_embeddings(self):
        self.skipTest("ready_hf: a drafter has no embeddings, it uses its target's")

    def test_resize_tokens_embeddings(self):
        self.skipTest("ready_hf: a drafter has no embeddings, it uses its target's")

    def test_bc_cache_name_forward(self):
        self.skipTest("ready_hf: `cache` never had another name here")
