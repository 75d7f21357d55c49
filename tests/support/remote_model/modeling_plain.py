"""A causal language model without attention, as somebody might keep it in a folder."""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_plain import PlainConfig


class PlainNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class PlainBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.norm = PlainNorm(width, config.eps)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


class PlainForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = PlainConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, **kwargs):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=self.lm_head(x))
