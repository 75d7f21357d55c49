"""Configuration of a model whose code lies beside its weights."""

from transformers import PreTrainedConfig


class PlainConfig(PreTrainedConfig):
    model_type = "plain_remote"

    def __init__(self, vocab_size=64, hidden_size=32, num_hidden_layers=2, eps=1e-6, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.eps = eps
