"""FLOPs of a model from its dimensions (transformer.py) or `config.json` (configs.py), and cards' peaks (peaks.py)."""

from flopwatch.flops.configs import UnknownModel, from_config
from flopwatch.flops.transformer import Convention, LatentAttention, Recompute, Term, Transformer

__all__ = ["Convention", "LatentAttention", "Recompute", "Term", "Transformer", "UnknownModel", "from_config"]
