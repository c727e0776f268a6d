"""FLOPs a model needs: from its dimensions (transformer.py) and from its `config.json` (configs.py)."""

from flopwatch.flops.configs import UnknownModel, from_config
from flopwatch.flops.transformer import Convention, LatentAttention, Recompute, Term, Transformer

__all__ = ["Convention", "LatentAttention", "Recompute", "Term", "Transformer", "UnknownModel", "from_config"]
