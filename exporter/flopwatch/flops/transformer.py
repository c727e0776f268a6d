"""FLOPs of a transformer from its dimensions: the numerator of MFU. Pure functions, exact integers.

Counted are the matrix multiplications, 6 FLOP per weight and token, and the attention scores. Left out are
recomputation, the input embedding (a look-up), norms, biases, activations and the router. Three conventions:

causal  6 W + 6 L H e s   per token: scores below the diagonal only, as Megatron-LM and NeMo count since 2025
full    6 W + 12 L H e s  all s x s scores, as torchtitan and older tables count; windows are ignored
palm    6 N + 12 L H e s  all parameters, input embedding included (PaLM, https://arxiv.org/abs/2204.02311, appendix B)

W is the number of matmul weights a token passes through: the LM head's, also when tied, and of experts the active ones.
N is the number of parameters a token passes through. L layers, H query heads, e head dimension, s sequence length.
docs/model-flops.md has the formulas for GQA, MLA, experts, windows, MTP, packing, LoRA and recomputation.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Convention = Literal["causal", "full", "palm"]
Recompute = Literal["full", "selective"]

CONVENTIONS: tuple[Convention, ...] = ("causal", "full", "palm")
LORA_TARGETS = ("attention_query", "attention_key_value", "attention_output", "mlp", "experts", "shared_experts")
_FREEZABLE = (*LORA_TARGETS, "lm_head")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Dimensions of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""

    query_rank: int | None  # None: queries are not compressed (DeepSeek-V2-Lite)
    key_value_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Matmuls:
    """Matrices of one kind, such as mlp: shapes of one set, sets a token passes through (uses), all sets (copies)."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    uses: int
    copies: int | None  # None: not known
    passes: int = 3  # of 2 FLOP per weight: forward, gradient of the input, gradient of the weight
    recomputed: bool = True  # whether full recomputation repeats it

    @property
    def weights(self) -> int:
        """Return the number of weights of these matrices that one token passes through."""
        return self.uses * sum(rows * columns for rows, columns in self.shapes)

    @property
    def parameters(self) -> int:
        """Return the number of weights of all these matrices. Raises ValueError if `copies` is not known."""
        if self.copies is None:
            raise ValueError("the number of parameters needs experts=, the routed experts of a layer")
        return self.copies * sum(rows * columns for rows, columns in self.shapes)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Attention scores of all layers with the same window."""

    name: str
    layers: int
    window: int | None
    passes: int = 3  # the forward pass counted once, the backward pass twice


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the FLOPs of a sequence. `product` shows how `flops` is computed, as a written multiplication."""

    name: str
    product: str
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Dimensions of a decoder-only transformer. A mixture-of-experts model has `experts_per_token` above 0."""

    layers: int
    width: int
    heads: int
    vocabulary: int  # rows of the LM head, padding included
    mlp_width: int = 0  # of the layers with an MLP instead of experts
    mlp_matrices: int = 2  # 3 when gated (SwiGLU, GeGLU), in experts too
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width / heads
    latent: LatentAttention | None = None  # in place of kv_heads and head_dim
    experts_per_token: int = 0  # routed experts one token passes through
    experts: int | None = None  # routed experts of a layer; only `parameters` needs it
    expert_width: int = 0
    shared_width: int = 0  # summed width of the experts that every token passes through
    dense_layers: int | tuple[int, ...] = 0  # layers without experts in a model with experts: the first n, or indices
    window: int | tuple[int | None, ...] | None = None  # keys a token sees at most, itself included; or one per layer
    mtp_layers: int = 0  # multi-token prediction modules, each with a layer like the last
    tied_embeddings: bool = False
    other_parameters: int = 0  # outside the counted matmuls: norms, biases, routers, learned positions
    mtp_other_parameters: int = 0  # the same in one multi-token prediction module
    expert_biases: bool = False
    lora_rank: int = 0  # above 0: adapters train, everything else is frozen
    lora_targets: tuple[str, ...] = LORA_TARGETS
    frozen: tuple[str, ...] = ()  # kinds of matmul that do not train: of LORA_TARGETS, or lm_head
    frozen_layers: int = 0  # the first n layers and the input embedding do not train

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.vocabulary) < 1:
            raise ValueError("layers, width, heads and vocabulary must be at least 1")
        if self.head_dim is None and self.latent is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads; give head_dim")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if isinstance(self.window, tuple) and len(self.window) != self.layers:
            raise ValueError(f"{len(self.window)} windows for {self.layers} layers; give one each, None for no window")
        for window in self._windows():
            if window is not None and window < 1:
                raise ValueError(f"a window of {window} keys sees nothing; None means no window")
        if self.experts is not None and self.experts < self.experts_per_token:
            raise ValueError(f"a token cannot pass through {self.experts_per_token} of {self.experts} experts")
        if self.mtp_layers and (self.lora_rank or self.frozen or self.frozen_layers):
            raise ValueError("multi-token prediction with frozen weights is not defined; set mtp_layers to 0")
        if self.lora_rank and (self.frozen or self.frozen_layers):
            raise ValueError("LoRA freezes everything but the adapters; leave frozen and frozen_layers out")
        for names, known in ((self.lora_targets, LORA_TARGETS), (self.frozen, _FREEZABLE)):
            if unknown := sorted(set(names) - set(known)):
                raise ValueError(f"no family is called {', '.join(unknown)}: choose from {', '.join(known)}")
        if not 0 <= self.frozen_layers <= self.layers:
            raise ValueError(f"{self.frozen_layers} frozen layers of {self.layers}")

    @property
    def matmul_weights(self) -> int:
        """Return W, the number of matmul weights one token passes through, without LoRA adapters."""
        return sum(matmul.weights for matmul in self._matmuls())

    @property
    def parameters(self) -> int:
        """Return the number of parameters, without LoRA adapters and multi-token prediction (`mtp_parameters`)."""
        others = self.other_parameters + self._expert_biases(self.experts or 0)
        return _parameters(self._main()) + self.vocabulary * self.width + others

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters one token passes through, with the active experts only."""
        others = self.other_parameters + self._expert_biases(self.experts_per_token)
        return sum(matmul.weights for matmul in self._main()) + self._embedding() + others

    @property
    def mtp_parameters(self) -> int:
        """Return the parameters that multi-token prediction adds, without the shared embedding and LM head."""
        return _parameters(self._mtp()) + self.mtp_layers * self.mtp_other_parameters

    @property
    def lora_parameters(self) -> int:
        """Return the number of parameters of the LoRA adapters."""
        return _parameters(self._adapters())

    def flops(self, tokens: int, sum_len_squared: int, convention: Convention = "causal") -> int:
        """Return the FLOPs of `tokens` tokens in packed samples whose squared lengths sum to `sum_len_squared`.

        Raises ValueError for `causal` with a window, which needs the length of each sample: use `flops_of_samples`.
        """
        if convention == "causal" and any(window is not None for window in self._windows()):
            raise ValueError("packed samples under a window: flops_of_samples takes the length of each")
        per_token, per_square = _coefficients(self, _checked(convention))
        return per_token * tokens + per_square * sum_len_squared

    def flops_of_samples(self, lengths: Iterable[int], convention: Convention = "causal") -> int:
        """Return the FLOPs of samples of these lengths, packed or not. The result is exact also with windows."""
        return sum(count * self.flops_per_sequence(length, convention) for length, count in Counter(lengths).items())

    def flops_per_sequence(self, sequence_length: int, convention: Convention = "causal") -> int:
        """Return the FLOPs of one sequence, forward and backward. Raises ValueError for a length below 1."""
        return sum(term.flops for term in self.terms(sequence_length, convention))

    def flops_per_token(self, sequence_length: int, convention: Convention = "causal") -> float:
        """Return the mean FLOPs per token of sequences of one length."""
        return self.flops_per_sequence(sequence_length, convention) / sequence_length

    def hardware_flops_per_sequence(
        self, sequence_length: int, recompute: Recompute, convention: Convention = "causal"
    ) -> int:
        """Return the FLOPs executed for one sequence, recomputation included (https://arxiv.org/abs/2205.05198).

        full       every layer runs forward once more; the LM head does not
        selective  the attention scores run forward once more
        """
        if recompute not in ("full", "selective"):
            raise ValueError(f"recomputation {recompute!r}: write full or selective")
        s, matmuls = sequence_length, (*self._matmuls(), *self._adapters())
        again = sum(self._forward_scores(scores, s, convention) for scores in self._scores() if scores.passes > 1)
        if recompute == "full":
            again += sum(2 * one.weights * s for one in matmuls if one.recomputed and one.passes > 1)
        return self.flops_per_sequence(sequence_length, convention) + again

    def terms(self, sequence_length: int, convention: Convention = "causal") -> tuple[Term, ...]:
        """Return the summands of `flops_per_sequence`: kinds of matmul, then attention scores. Raises ValueError."""
        s = sequence_length
        if s < 1:
            raise ValueError(f"a sequence of {s} tokens has nothing to count")
        palm = _checked(convention) == "palm"
        if palm and (self.lora_rank or self.frozen or self.frozen_layers):
            raise ValueError(
                "palm counts 6 per parameter, which is not defined for frozen weights: take causal or full"
            )
        terms = []
        for matmul in (*self._matmuls(shared_head=palm), *self._adapters()):
            shapes = " + ".join(f"{rows} x {columns}" for rows, columns in matmul.shapes)
            product = f"{matmul.uses} x ({shapes}) x {2 * matmul.passes} x {s}"
            terms.append(Term(matmul.name, product, 2 * matmul.passes * matmul.weights * s))
        if palm:
            other = self.other_parameters + self._expert_biases(self.experts_per_token)
            other += self.mtp_layers * self.mtp_other_parameters
            if embedding := self._embedding():
                terms.append(Term("input_embedding", f"{self.vocabulary} x {self.width} x 6 x {s}", 6 * embedding * s))
            if other:
                terms.append(Term("other_parameters", f"{other} x 6 x {s}", 6 * other * s))
        for scores in self._scores():
            flops = scores.passes * self._forward_scores(scores, s, convention)
            terms.append(Term(scores.name, self._scores_product(scores, s, convention), flops))
        return tuple(terms)

    def _windows(self) -> tuple[int | None, ...]:
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.layers

    def _is_dense(self, layer: int) -> bool:
        if not self.experts_per_token:
            return True
        dense = self.dense_layers
        return layer in dense if isinstance(dense, tuple) else layer < dense

    def _embedding(self) -> int:
        """Return the number of parameters of the input embedding, 0 if it is tied to the LM head."""
        return 0 if self.tied_embeddings else self.vocabulary * self.width

    def _head_dim(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim

    def _expert_biases(self, experts: int) -> int:
        """Return the number of biases in `experts` experts of every layer with experts."""
        if not self.expert_biases:
            return 0
        sparse = sum(not self._is_dense(layer) for layer in range(self.layers))
        return sparse * experts * ((self.mlp_matrices - 1) * self.expert_width + self.width)

    def _attention_shapes(self) -> dict[str, tuple[tuple[int, int], ...]]:
        query: tuple[tuple[int, int], ...]
        d, h, m = self.width, self.heads, self.latent
        if m is None:
            e = self._head_dim()
            key_or_value = (d, (self.kv_heads or h) * e)
            query, key_value, output = ((d, h * e),), (key_or_value, key_or_value), ((h * e, d),)
        else:
            queries, q, c = h * (m.nope_dim + m.rope_dim), m.query_rank, m.key_value_rank
            query = ((d, queries),) if q is None else ((d, q), (q, queries))
            key_value = ((d, c + m.rope_dim), (c, h * (m.nope_dim + m.value_dim)))
            output = ((h * m.value_dim, d),)
        return {"attention_query": query, "attention_key_value": key_value, "attention_output": output}

    def _mlp_shapes(self, width: int) -> tuple[tuple[int, int], ...]:
        return ((self.width, width),) * (self.mlp_matrices - 1) + ((width, self.width),)

    def _layer(self, layers: int, dense: int, passes: int) -> list[Matmuls]:
        """Return the matmuls of `layers` layers, `dense` of them with an MLP instead of experts."""
        sparse = layers - dense
        experts = None if self.experts is None else sparse * self.experts
        families: list[tuple[str, tuple[tuple[int, int], ...], int, int | None]] = [
            *((name, shapes, layers, layers) for name, shapes in self._attention_shapes().items()),
            ("mlp", self._mlp_shapes(self.mlp_width), dense, dense),
            ("experts", self._mlp_shapes(self.expert_width), sparse * self.experts_per_token, experts),
            ("shared_experts", self._mlp_shapes(self.shared_width), sparse, sparse),
        ]
        return [
            Matmuls(name, shapes, uses, copies, min(passes, 2) if name in self.frozen else passes)
            for name, shapes, uses, copies in families
            if uses and shapes[0][0] * shapes[0][1]
        ]

    def _main(self) -> list[Matmuls]:
        """Return the matmuls of the model without LoRA adapters and multi-token prediction."""
        low, trains = self.frozen_layers, 2 if self.lora_rank else 3
        dense = [self._is_dense(layer) for layer in range(self.layers)]
        copies, passes = 0 if self.tied_embeddings else 1, 2 if "lm_head" in self.frozen else trains
        head = Matmuls("lm_head", ((self.width, self.vocabulary),), 1, copies, passes, recomputed=False)
        lowest = self._layer(low, sum(dense[:low]), self._low_passes())
        return [*lowest, *self._layer(self.layers - low, sum(dense[low:]), trains), head]

    def _low_passes(self) -> int:
        """Return the passes of a frozen lowest layer: 1 (forward), or 2 if gradients pass it to reach the embedding.

        They do so if the embedding is tied to an LM head that trains.
        """
        return 2 if self.tied_embeddings and "lm_head" not in self.frozen else 1

    def _mtp(self) -> list[Matmuls]:
        """Return the matmuls of multi-token prediction, without the shared LM head."""
        if not self.mtp_layers:
            return []
        layers = self._layer(self.mtp_layers, self.mtp_layers if self._is_dense(self.layers - 1) else 0, 3)
        return [
            *(Matmuls(f"mtp_{layer.name}", layer.shapes, layer.uses, layer.copies) for layer in layers),
            Matmuls("mtp_projection", ((2 * self.width, self.width),), self.mtp_layers, self.mtp_layers),
        ]

    def _matmuls(self, shared_head: bool = False) -> list[Matmuls]:
        """Return all matmuls but adapters. With `shared_head`, multi-token prediction adds no further LM head."""
        matmuls = [*self._main(), *self._mtp()]
        if self.mtp_layers and not shared_head:
            shapes = ((self.width, self.vocabulary),)
            matmuls.append(Matmuls("mtp_lm_head", shapes, self.mtp_layers, 0, recomputed=False))
        return matmuls

    def _adapters(self) -> list[Matmuls]:
        rank, adapters = self.lora_rank, []
        for one in self._main() if rank else []:
            if one.name in self.lora_targets:
                shapes = tuple(pair for rows, columns in one.shapes for pair in ((rows, rank), (rank, columns)))
                adapters.append(Matmuls("lora_" + one.name, shapes, one.uses, one.copies))
        return adapters

    def _scores(self) -> list[_Scores]:
        windows, low = self._windows(), self.frozen_layers
        passes = 1 if self._low_passes() == 1 else 3
        scores = [
            _Scores("attention_scores" if window is None else "windowed_attention_scores", layers, window, these)
            for these, part in ((passes, windows[:low]), (3, windows[low:]))
            for window, layers in Counter(part).items()
        ]
        return scores + [_Scores("mtp_attention_scores", self.mtp_layers, windows[-1])] * bool(self.mtp_layers)

    def _forward_scores(self, scores: _Scores, sequence_length: int, convention: Convention) -> int:
        m = self.latent
        # Half the forward FLOPs (QK and PV) of one token attending to one key in one layer.
        dims = self.heads * (2 * self._head_dim() if m is None else m.nope_dim + m.rope_dim + m.value_dim)
        return dims * scores.layers * _pairs_twice(sequence_length, scores.window, convention)

    def _scores_product(self, scores: _Scores, s: int, convention: Convention) -> str:
        w, m = scores.window, self.latent
        if convention != "causal":
            pairs = f"{s} x {s}"
        elif w is None or w >= s:
            pairs = f"{s} x {s} / 2"
        else:
            pairs = f"({s} x {w} - {w} x {w - 1} / 2)"
        e = self._head_dim()
        dims = f"{e} + {e}" if m is None else f"{m.nope_dim + m.rope_dim} + {m.value_dim}"
        return f"{scores.layers} x {pairs} x {2 * scores.passes} x {self.heads} x ({dims})"


def _parameters(matmuls: Iterable[Matmuls]) -> int:
    return sum(matmul.parameters for matmul in matmuls)


def _checked(convention: Convention) -> Convention:
    if convention not in CONVENTIONS:
        raise ValueError(f"convention {convention!r}: write causal, full or palm")
    return convention


def _pairs_twice(s: int, window: int | None, convention: Convention) -> int:
    """Return twice the number of (token, visible key) pairs in a sequence, so that the result is an integer."""
    if convention != "causal":
        return 2 * s * s
    # A window shorter than the sequence shows w keys to all tokens but the first, which see 1, 2 ... w - 1.
    return s * s if window is None or window >= s else 2 * s * window - window * (window - 1)


@lru_cache(maxsize=64)
def _coefficients(model: Transformer, convention: Convention) -> tuple[int, int]:
    """Return the FLOPs per token and per squared length of a model without windows."""
    one, two = (model.flops_per_sequence(s, convention) for s in (1, 2))
    per_square = (two - 2 * one) // 2  # f(s) = a s + b s^2
    return one - per_square, per_square
