"""FLOPs a transformer needs, from its dimensions: the numerator of MFU.

Counted are the matrix multiplications, forward and backward: 2 FLOP per weight forward and twice that backward, so
6 per weight and token, and the attention scores. Left out are recomputation, the input embedding (a look-up), norms,
biases, activations and the router. Three conventions, which differ by 1 % (GPT-3 at 2k) to 70 % (Llama 3 8B at 128k):

causal  6 W + 6 L H e s   per token: scores below the diagonal only, as Megatron-LM and NeMo count since 2025
full    6 W + 12 L H e s  all s x s scores, as torchtitan and older tables count
palm    6 N + 12 L H e s  all parameters, input embedding included (PaLM, https://arxiv.org/abs/2204.02311, appendix B)

W weights of the matmuls a token passes through (LM head in, also when tied), N all such parameters, L layers, H query
heads, e head dimension, s sequence length. Not covered: state-space layers, multi-token prediction, frozen weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Convention = Literal["causal", "full", "palm"]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Dimensions of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""

    query_rank: int
    key_value_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Dimensions of a decoder-only transformer; a mixture-of-experts model has `experts_per_token` above 0."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    mlp_width: int = 0  # of the layers with a plain MLP
    mlp_matrices: int = 2  # 3 when gated (SwiGLU, GeGLU), in experts too
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width / heads
    latent: LatentAttention | None = None  # in place of kv_heads and head_dim
    experts_per_token: int = 0  # routed experts one token passes through
    expert_width: int = 0
    shared_width: int = 0  # summed width of the experts that every token passes through
    dense_layers: int = 0  # layers of a mixture-of-experts model that have a plain MLP
    window: int | None = None  # keys a token sees at most, itself included
    windowed_layers: int | None = None  # layers with that window; None: all
    tied_embeddings: bool = False
    parameters: int | None = None  # N of `palm`, active experts only; None: W and the input embedding

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.vocabulary) < 1:
            raise ValueError("layers, width, heads and vocabulary must be at least 1")
        if self.head_dim is None and self.latent is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads; give head_dim")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} keys sees nothing; None means no window")

    @property
    def matmul_weights(self) -> int:
        """Return W, the weights of all matmuls one token passes through."""
        plain = self.mlp_matrices * self.width * self.mlp_width
        experts = self.mlp_matrices * self.width * (self.experts_per_token * self.expert_width + self.shared_width)
        dense_layers = self.dense_layers if self.experts_per_token else self.layers
        return (self.layers * self._attention_weights() + dense_layers * plain
                + (self.layers - dense_layers) * experts + self.vocabulary * self.width)

    def _attention_weights(self) -> int:
        d, h = self.width, self.heads
        if (m := self.latent) is not None:
            return (d * m.query_rank + m.query_rank * h * (m.nope_dim + m.rope_dim)
                    + d * (m.key_value_rank + m.rope_dim) + m.key_value_rank * h * (m.nope_dim + m.value_dim)
                    + h * m.value_dim * d)
        e = self._head_dim()
        return 2 * d * h * e + 2 * d * (self.kv_heads or h) * e

    def _head_dim(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim

    def _score_flops_per_key(self) -> int:
        """Return the FLOPs of one token attending to one key in one layer: QK and PV, forward and backward."""
        m = self.latent
        dims = 2 * self._head_dim() if m is None else m.nope_dim + m.rope_dim + m.value_dim
        return 6 * self.heads * dims

    def flops(self, tokens: int, sum_len_squared: int, convention: Convention = "causal") -> int:
        """Return the FLOPs of `tokens` tokens in packed samples whose squared lengths sum to `sum_len_squared`.

        Raises ValueError for `causal` with a window: a window needs each length, see `flops_per_sequence`.
        """
        if convention == "palm":
            embedding = 0 if self.tied_embeddings else self.vocabulary * self.width
            weights = self.matmul_weights + embedding if self.parameters is None else self.parameters
        else:
            weights = self.matmul_weights
        scores = self.layers * self._score_flops_per_key() * sum_len_squared
        if convention == "causal":
            if self.window is not None:
                raise ValueError("packed samples under a window: add up flops_per_sequence of each length")
            scores //= 2  # exact: _score_flops_per_key is even
        elif convention not in ("full", "palm"):
            raise ValueError(f"convention {convention!r}: write causal, full or palm")
        return 6 * weights * tokens + scores

    def flops_per_sequence(self, sequence_length: int, convention: Convention = "causal") -> int:
        """Return the FLOPs of one sequence, forward and backward."""
        s, w = sequence_length, self.window
        if convention != "causal" or w is None:
            return self.flops(s, s * s, convention)
        windowed = self.layers if self.windowed_layers is None else self.windowed_layers
        # A window shorter than the sequence shows w keys to all tokens but the first, which see 1, 2 ... w - 1.
        keys = 2 * s * w - w * (w - 1) if w < s else s * s
        per_two_keys = self._score_flops_per_key() // 2
        return 6 * self.matmul_weights * s + per_two_keys * (windowed * keys + (self.layers - windowed) * s * s)

    def flops_per_token(self, sequence_length: int, convention: Convention = "causal") -> float:
        """Return the mean FLOPs per token of sequences of one length."""
        return self.flops_per_sequence(sequence_length, convention) / sequence_length
