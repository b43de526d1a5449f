"""What SelectEarly is worth in classifiers that read their first token, without padding.

python benchmarks/select_early.py --device cpu        writes benchmarks/results/select_early_cpu.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from one_rule import Row, main

from refold import SelectEarly


def row(layers: int, hidden: int, batch: int = 8, length: int = 128) -> Row:
    def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden,
        )
        ids = torch.randint(1000, 30000, (batch, length))
        return BertForSequenceClassification(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return f"BERT of {layers} layers × {hidden}, {batch} × {length}", make


if __name__ == "__main__":
    main(SelectEarly(), "select_early", [row(6, 384), row(6, 768), row(12, 768)])
