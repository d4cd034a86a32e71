"""A task for latbench: BERT-base of huggingface's transformers with random weights, as `bert_base.py` else.

It needs `pip install transformers`.
"""

from bert_base import sentences
from random_weights import RandomWeights
from torch import Tensor, nn


class Bert(nn.Module):
    """Tokens (n, t) to the last layer's features (n, t, width)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(BertConfig(), add_pooling_layer=False)

    def forward(self, tokens: Tensor) -> Tensor:
        features: Tensor = self.bert(input_ids=tokens).last_hidden_state
        return features


task = RandomWeights("bert-of-transformers", Bert, sentences)
model, example, calibration, loss, score = task.model, task.example, task.calibration, task.loss, task.score
name, score_name = task.name, task.score_name
