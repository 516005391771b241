"""A GPT that was trained with zero, for PyTorch and transformers: this one file, config.json and the weights.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

computes the same as zero: scores and softmax in float32, ALiBi for any number of heads and in contexts of any length,
grouped heads, windows, a cache of keys and values. It imports nothing but torch and transformers. It is for inference
and fine-tuning without dropout.

Shapes are named by suffix:
  B rows, T query positions, S key positions, D embedding, H heads of queries, G heads of keys, K head dimension
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_exact": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "selu": F.selu,
    "silu": F.silu,
}
T5_BUCKETS, T5_DISTANCE = 32, 128
# transformers 5.24 calls it cache.
NAME_OF_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class ZeroConfig(PretrainedConfig):
    """The keys of a model of zero, as `zero-weights export --with-code` writes them to config.json."""

    model_type = "zero"


class Norm(nn.Module):
    """LayerNorm or RMSNorm in float32, over `width` numbers, with the gains that the model has."""

    def __init__(self, config: ZeroConfig, width: int, has_gains: bool = True):
        super().__init__()
        self.kind = config.norm
        self.epsilon = config.norm_epsilon
        self.weight = nn.Parameter(torch.ones(width)) if has_gains else None
        self.bias = nn.Parameter(torch.zeros(width)) if has_gains and self.kind == "layer" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        if self.weight is not None:
            wide = wide * (self.weight.float() + (1 if self.kind == "rms_offset" else 0))
        if self.bias is not None:
            wide = wide + self.bias.float()
        return wide.to(x.dtype)


class Table(nn.Module):
    """An array of parameters with a name."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """One slope per head, interleaved where their number is not a power of two (arXiv 2108.12409, section 3)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes, device=device)


def t5_buckets(distance: torch.Tensor) -> torch.Tensor:
    """The bucket of each distance (arXiv 1910.10683, section 2.1, for causal attention)."""
    exact = T5_BUCKETS // 2
    log_steps = (T5_BUCKETS - exact) / math.log(T5_DISTANCE / exact)
    starts = [math.ceil(exact * math.exp(step / log_steps)) for step in range(1, T5_BUCKETS - exact)]
    later = sum((distance >= start).long() for start in starts)
    return torch.where(distance < exact, distance.clamp(min=0), exact + later)


def rotate(x_BHTK: torch.Tensor, positions_BT: torch.Tensor, frequencies: list[float], length: float) -> torch.Tensor:
    """Turns pairs (i, i + R / 2) of the first R dimensions of each head."""
    half = len(frequencies)
    angles = positions_BT[:, None, :, None].float() * torch.tensor(frequencies, device=x_BHTK.device)
    cos = angles.cos() * length
    sin = angles.sin() * length
    first = x_BHTK[..., :half].float()
    second = x_BHTK[..., half : 2 * half].float()
    rest = x_BHTK[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x_BHTK.dtype), rest], -1)


class Layer(nn.Module):
    """Attention and MLP, each normalized and added to the residual stream."""

    def __init__(self, config: ZeroConfig, number: int):
        super().__init__()
        self.config = config
        self.number = number
        width = config.hidden_size
        head = config.head_dim
        query_width = config.num_attention_heads * head
        key_width = config.num_key_value_heads * head
        self.query = nn.Linear(width, query_width, config.qkv_bias)
        self.key = nn.Linear(width, key_width, config.qkv_bias)
        self.value = nn.Linear(width, key_width, config.qkv_bias)
        self.attention_out = nn.Linear(query_width, width, config.out_bias)
        self.mlp_in = nn.Linear(width, config.intermediate_size, config.mlp_bias)
        if config.gated:
            self.mlp_gate = nn.Linear(width, config.intermediate_size, config.mlp_bias)
        self.mlp_out = nn.Linear(config.intermediate_size, width, config.mlp_bias)
        for name in ("norm_attention", "norm_mlp"):
            if config.norm_place != "after":
                setattr(self, name, Norm(config, width, config.norm_gains))
            if config.norm_place != "before":
                setattr(self, f"{name}_after", Norm(config, width, config.norm_gains))
        if config.qk_norm:
            over_all = config.qk_norm_over == "projection"
            self.query_norm = Norm(config, query_width if over_all else head, config.norm_gains or over_all)
            self.key_norm = Norm(config, key_width if over_all else head, config.norm_gains or over_all)
        if config.positions == "t5":
            self.relative_bias = Table(T5_BUCKETS, config.num_attention_heads)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, name):
            return x
        return getattr(self, name)(x)

    def forward(
        self,
        x_BTD: torch.Tensor,
        positions_BT: torch.Tensor,
        mask_BS: torch.Tensor | None,
        cache: DynamicCache | None,
    ) -> torch.Tensor:
        config = self.config
        attended_BTD = self._attention(self._norm("norm_attention", x_BTD), positions_BT, mask_BS, cache)
        sum_BTD = x_BTD + self._norm("norm_attention_after", attended_BTD) * config.residual_multiplier
        h_BTD = self._norm("norm_mlp", x_BTD if config.parallel_residual else sum_BTD)
        activation = ACTIVATIONS[config.activation]
        inner = (
            activation(self.mlp_gate(h_BTD)) * self.mlp_in(h_BTD) if config.gated else activation(self.mlp_in(h_BTD))
        )
        return sum_BTD + self._norm("norm_mlp_after", self.mlp_out(inner)) * config.residual_multiplier

    def _attention(
        self,
        h_BTD: torch.Tensor,
        positions_BT: torch.Tensor,
        mask_BS: torch.Tensor | None,
        cache: DynamicCache | None,
    ) -> torch.Tensor:
        config = self.config
        rows, count, _ = h_BTD.shape
        q = self.query(h_BTD)
        k = self.key(h_BTD)
        v = self.value(h_BTD)
        over_all = config.qk_norm and config.qk_norm_over == "projection"
        if over_all:
            q = self.query_norm(q)
            k = self.key_norm(k)
        q_BHTK, k_BGSK, v_BGSK = (x.view(rows, count, -1, config.head_dim).transpose(1, 2) for x in (q, k, v))
        if config.qk_norm and not over_all:
            q_BHTK = self.query_norm(q_BHTK)
            k_BGSK = self.key_norm(k_BGSK)
        if config.positions == "rotary":
            rotation = config.rotations[self.number % len(config.rotations)]
            q_BHTK, k_BGSK = (rotate(x, positions_BT, **rotation) for x in (q_BHTK, k_BGSK))
        if cache is not None:
            k_BGSK, v_BGSK = cache.update(k_BGSK, v_BGSK, self.number)
        shared = config.num_attention_heads // config.num_key_value_heads
        k_BHSK, v_BHSK = (x.repeat_interleave(shared, 1) for x in (k_BGSK, v_BGSK))
        scores = torch.matmul(q_BHTK.float(), k_BHSK.float().transpose(2, 3)) * config.score_multiplier
        weights = self._masked(scores, mask_BS)
        if config.extra_logit:
            weights = torch.cat([weights, torch.zeros_like(weights[..., :1])], -1).softmax(-1)[..., :-1]
        else:
            weights = weights.softmax(-1)
        attended_BHTK = torch.matmul(weights.to(v_BHSK.dtype), v_BHSK)
        return self.attention_out(attended_BHTK.transpose(1, 2).reshape(rows, count, -1))

    def _masked(self, scores_BHTS: torch.Tensor, mask_BS: torch.Tensor | None) -> torch.Tensor:
        """Capped scores with their biases; the lowest number if a query does not see a key."""
        config = self.config
        device = scores_BHTS.device
        queries, keys = scores_BHTS.shape[2:]
        distance_TS = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
        if config.attention_cap is not None:
            scores_BHTS = config.attention_cap * torch.tanh(scores_BHTS / config.attention_cap)
        if config.positions == "alibi":
            scores_BHTS = scores_BHTS - alibi_slopes(scores_BHTS.shape[1], device)[:, None, None] * distance_TS
        if config.positions == "t5":
            scores_BHTS = scores_BHTS + self.relative_bias.weight.float()[t5_buckets(distance_TS)].permute(2, 0, 1)
        window = config.windows[self.number % len(config.windows)]
        is_seen = (distance_TS >= 0) & (distance_TS < (window or keys))
        if mask_BS is not None:
            is_seen = is_seen & mask_BS[:, None, None, :].bool()
        return scores_BHTS.masked_fill(~is_seen, torch.finfo(torch.float32).min)


class ZeroForCausalLM(PreTrainedModel, GenerationMixin):
    """Tokens in, logits out."""

    config_class = ZeroConfig
    base_model_prefix = ""
    _no_split_modules = ["Layer"]  # noqa: RUF012  as transformers names it

    def __init__(self, config: ZeroConfig):
        super().__init__(config)
        self.vocabulary = Table(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.positions = Table(config.max_position_embeddings, config.hidden_size)
        if config.positions == "sinusoidal":
            self.positions = Table()  # one scale
        if config.embedding_norm:
            self.embedding_norm = Norm(config, config.hidden_size, config.norm_gains)
        self.blocks = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        if config.final_norm:
            self.norm = Norm(config, config.hidden_size, config.norm_gains)
        if not config.tied:
            self.head = Table(config.vocab_size, config.hidden_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are always read."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: DynamicCache | None = None,
        cache_position: torch.Tensor | None = None,
        inputs_embeds: None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits `(B, T, V)` in float32, and the mean loss of the next tokens if labels are given.

        `attention_mask`, `(B, S)`, is 0 for padding, in the cache as well; positions count what is not padding.
        `cache` and `past_key_values` are the same. Other arguments are refused, as ignoring one could change a text.
        """
        if inputs_embeds is not None or output_attentions or output_hidden_states:
            refused = "inputs_embeds, output_attentions and output_hidden_states"
            raise ValueError(f"{refused} are not supported: expected input_ids, and logits as the result")
        if cache is None:
            cache = past_key_values
        if use_cache and cache is None:
            cache = DynamicCache()
        known = cache.get_seq_length() if cache is not None else 0
        count = input_ids.shape[1]
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -count:]
        if position_ids is None:
            position_ids = torch.arange(known, known + count, device=input_ids.device)[None]
        x_BTD = self._embed(input_ids, position_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD, position_ids, attention_mask, cache)
        logits = self._logits(x_BTD)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        result = CausalLMOutputWithPast(loss=loss, logits=logits)
        if cache is not None:
            result[NAME_OF_CACHE] = cache
        return result

    def _embed(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        config = self.config
        x_BTD = F.embedding(tokens_BT, self.vocabulary.weight) * config.embedding_multiplier
        if config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(config.hidden_size)
        if config.positions == "learned":
            x_BTD = x_BTD + F.embedding(positions_BT, self.positions.weight)
        if config.positions == "sinusoidal":
            half = torch.arange(0, config.hidden_size, 2, device=x_BTD.device) / config.hidden_size
            angles = positions_BT[..., None].float() * config.distance_base**-half
            x_BTD = x_BTD + self.positions.weight * torch.cat([angles.sin(), angles.cos()], -1).to(x_BTD.dtype)
        if not config.embedding_norm:
            return x_BTD
        return self.embedding_norm(x_BTD)

    def _logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.final_norm:
            x_BTD = self.norm(x_BTD)
        logits = F.linear(x_BTD, self.vocabulary.weight if config.tied else self.head.weight).float()
        logits = logits * config.logit_multiplier
        if config.logit_cap is not None:
            logits = config.logit_cap * torch.tanh(logits / config.logit_cap)
        return logits
