"""A tiny Qwen-like model in vLLM's form: its layer classes, parameter names and tensor parallelism.

Class names, attributes and parameter shapes are vLLM's, as far as a weight loader looks at them.
`forward` runs all ranks of one server in one process, with a sum where vLLM has an all-reduce.
`dense_forward` is the same model from a checkpoint's tensors, without any of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import xxhash
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class TinyConfig:
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 48
    vocab: int = 50
    experts: int = 0
    tied: bool = False
    qkv_bias: bool = True
    dtype: str = "bfloat16"


def parameter(*shape, dtype):
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class LinearBase(nn.Module):
    def __init__(self, tp_size, tp_rank):
        super().__init__()
        self.tp_size, self.tp_rank = tp_size, tp_rank


class ReplicatedLinear(LinearBase):
    def __init__(self, inputs, outputs, dtype):
        super().__init__(1, 0)
        self.weight = parameter(outputs, inputs, dtype=dtype)


class ColumnParallelLinear(LinearBase):
    def __init__(self, inputs, outputs, tp_size, tp_rank, dtype, bias=False):
        super().__init__(tp_size, tp_rank)
        self.weight = parameter(outputs // tp_size, inputs, dtype=dtype)
        if bias:
            self.bias = parameter(outputs // tp_size, dtype=dtype)


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, inputs, output_sizes, tp_size, tp_rank, dtype):
        super().__init__(inputs, sum(output_sizes), tp_size, tp_rank, dtype)
        self.output_sizes = output_sizes


class QKVParallelLinear(LinearBase):
    def __init__(self, hidden, head_size, heads, kv_heads, tp_size, tp_rank, dtype, bias):
        super().__init__(tp_size, tp_rank)
        self.head_size = head_size
        self.total_num_heads, self.total_num_kv_heads = heads, kv_heads
        self.num_heads = heads // tp_size
        self.num_kv_heads = max(1, kv_heads // tp_size)
        self.num_kv_head_replicas = max(1, tp_size // kv_heads)
        rows = (self.num_heads + 2 * self.num_kv_heads) * head_size
        self.weight = parameter(rows, hidden, dtype=dtype)
        if bias:
            self.bias = parameter(rows, dtype=dtype)


class RowParallelLinear(LinearBase):
    def __init__(self, inputs, outputs, tp_size, tp_rank, dtype):
        super().__init__(tp_size, tp_rank)
        self.weight = parameter(outputs, inputs // tp_size, dtype=dtype)


class VocabParallelEmbedding(nn.Module):
    """Padded to a multiple of 16 rows a rank, as vLLM pads to one of 64."""

    def __init__(self, vocab, hidden, tp_size, tp_rank, dtype):
        super().__init__()
        self.tp_size = tp_size
        self.org_vocab_size = vocab
        rows = -(-vocab // (16 * tp_size)) * 16
        start = min(vocab, tp_rank * rows)
        self.shard_indices = SimpleNamespace(
            org_vocab_start_index=start, org_vocab_end_index=min(vocab, start + rows)
        )
        self.num_embeddings_per_partition = rows
        self.weight = parameter(rows, hidden, dtype=dtype)


class ParallelLMHead(VocabParallelEmbedding):
    pass


class RMSNorm(nn.Module):
    def __init__(self, hidden, dtype):
        super().__init__()
        self.weight = parameter(hidden, dtype=dtype)


class FusedMoE(nn.Module):
    """Experts spread over the ranks (expert parallelism), so each is whole."""

    def __init__(self, experts, hidden, intermediate, ep_size, ep_rank, dtype):
        super().__init__()
        self.tp_size, self.tp_rank = 1, 0
        self.ep_size, self.ep_rank = ep_size, ep_rank
        self.global_num_experts = experts
        mine = list(range(ep_rank, experts, ep_size))
        self.local_num_experts = len(mine)
        self.expert_map = torch.full((experts,), -1, dtype=torch.int32)
        self.expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        self.w13_weight = parameter(len(mine), 2 * intermediate, hidden, dtype=dtype)
        self.w2_weight = parameter(len(mine), hidden, intermediate, dtype=dtype)


class TinyForCausalLM(nn.Module):
    """One rank of the model."""

    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, config, tp_size=1, tp_rank=0):
        super().__init__()
        self.config = config
        c, dtype = config, getattr(torch, config.dtype)
        tp = (tp_size, tp_rank, dtype)
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(c.vocab, c.hidden, *tp)
        self.model.layers = nn.ModuleList()
        for _ in range(c.layers):
            layer = nn.Module()
            layer.input_layernorm = RMSNorm(c.hidden, dtype)
            layer.post_attention_layernorm = RMSNorm(c.hidden, dtype)
            layer.self_attn = nn.Module()
            layer.self_attn.qkv_proj = QKVParallelLinear(
                c.hidden, c.head_dim, c.heads, c.kv_heads, *tp, c.qkv_bias
            )
            layer.self_attn.o_proj = RowParallelLinear(c.heads * c.head_dim, c.hidden, *tp)
            layer.mlp = nn.Module()
            if c.experts:
                layer.mlp.gate = ReplicatedLinear(c.hidden, c.experts, dtype)
                layer.mlp.experts = FusedMoE(c.experts, c.hidden, c.intermediate, *tp)
            else:
                layer.mlp.gate_up_proj = MergedColumnParallelLinear(
                    c.hidden, [c.intermediate] * 2, *tp
                )
                layer.mlp.down_proj = RowParallelLinear(c.intermediate, c.hidden, *tp)
            self.model.layers.append(layer)
        self.model.norm = RMSNorm(c.hidden, dtype)
        self.lm_head = ParallelLMHead(c.vocab, c.hidden, *tp)
        if c.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens):
        """What a runner calls of each rank in a step; `forward` of all ranks does the work."""

    def compute_logits(self, hidden):
        """Likewise."""

    def load_weights(self, weights):
        """vLLM's loader: takes whole tensors by their checkpoint names, and slices them itself."""
        loaded = set()
        for name, tensor in weights:
            if name == "lm_head.weight" and self.config.tied:
                continue
            self._load(name, tensor)
            loaded.add(name)
        return loaded

    def _load(self, name, tensor):
        c = self.config
        head, _, leaf = name.rpartition(".")
        parent, _, last = head.rpartition(".")
        with torch.no_grad():
            if last in ("q_proj", "k_proj", "v_proj"):
                module = self.get_submodule(f"{parent}.qkv_proj")
                d, q, kv = c.head_dim, module.num_heads, module.num_kv_heads
                if last == "q_proj":
                    at, rows, first = 0, q * d, module.tp_rank * q * d
                else:
                    at = (q + (kv if last == "v_proj" else 0)) * d
                    rows, first = kv * d, module.tp_rank // module.num_kv_head_replicas * kv * d
                getattr(module, leaf)[at : at + rows] = tensor[first : first + rows]
                return
            if last in ("gate_proj", "up_proj") and ".experts." not in name:
                module = self.get_submodule(f"{parent}.gate_up_proj")
                rows = tensor.shape[0] // module.tp_size
                at = rows if last == "up_proj" else 0
                module.weight[at : at + rows] = tensor[module.tp_rank * rows :][:rows]
                return
            if ".experts." in name:
                prefix, _, number = parent.rpartition(".")
                module = self.get_submodule(prefix)
                local = int(module.expert_map[int(number)])
                if local >= 0 and last == "down_proj":
                    module.w2_weight[local] = tensor
                elif local >= 0:
                    at = c.intermediate if last == "up_proj" else 0
                    module.w13_weight[local, at : at + c.intermediate] = tensor
                return
            module = self.get_submodule(head)
            if isinstance(module, VocabParallelEmbedding):
                mine = tensor[
                    module.shard_indices.org_vocab_start_index : (
                        module.shard_indices.org_vocab_end_index
                    )
                ]
                module.weight[: len(mine)] = mine
            elif isinstance(module, RowParallelLinear):
                columns = tensor.shape[1] // module.tp_size
                first = module.tp_rank * columns
                module.weight.copy_(tensor[:, first : first + columns])
            else:
                getattr(module, leaf).copy_(tensor)


def checkpoint(config, seed):
    """Tensors of a whole model by the names of a Hugging Face checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    c, dtype = config, getattr(torch, config.dtype)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    tensors = {"model.embed_tokens.weight": random(c.vocab, c.hidden)}
    for i in range(c.layers):
        p = f"model.layers.{i}"
        for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            tensors[f"{p}.self_attn.{name}_proj.weight"] = random(heads * c.head_dim, c.hidden)
            if c.qkv_bias:
                tensors[f"{p}.self_attn.{name}_proj.bias"] = random(heads * c.head_dim)
        tensors[f"{p}.self_attn.o_proj.weight"] = random(c.hidden, c.heads * c.head_dim)
        blocks = [f"{p}.mlp.experts.{e}" for e in range(c.experts)] or [f"{p}.mlp"]
        if c.experts:
            tensors[f"{p}.mlp.gate.weight"] = random(c.experts, c.hidden)
        for block in blocks:
            tensors[f"{block}.gate_proj.weight"] = random(c.intermediate, c.hidden)
            tensors[f"{block}.up_proj.weight"] = random(c.intermediate, c.hidden)
            tensors[f"{block}.down_proj.weight"] = random(c.hidden, c.intermediate)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}.{norm}.weight"] = 1 + random(c.hidden)
    tensors["model.norm.weight"] = 1 + random(c.hidden)
    if not c.tied:
        tensors["lm_head.weight"] = random(c.vocab, c.hidden)
    return tensors


def _norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()


def _attend(q, k, v):
    """Causal attention; q [tokens, heads, dim], k and v with as many or fewer heads."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    mask = torch.ones(scores.shape[-2:]).tril().bool()
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def _moe(x, router, experts):
    """Each token to its best expert; ``experts`` are (id, gate, up, down)."""
    scores = (x @ router.float().t()).softmax(-1)
    best, chosen = scores.max(-1)
    total = torch.zeros_like(x)
    for number, gate, up, down in experts:
        mine = (chosen == number).unsqueeze(-1) * best.unsqueeze(-1)
        y = functional.silu(x @ gate.float().t()) * (x @ up.float().t())
        total += mine * (y @ down.float().t())
    return total


@torch.no_grad()
def forward(ranks, tokens):
    """Logits of the last token from all ranks of a server, in float32."""
    c = ranks[0].config
    x = torch.zeros(len(tokens), c.hidden)
    for rank in ranks:
        embed = rank.model.embed_tokens
        first = embed.shard_indices.org_vocab_start_index
        for i, token in enumerate(tokens):
            if first <= token < embed.shard_indices.org_vocab_end_index:
                x[i] = embed.weight[token - first].float()
    for number in range(c.layers):
        layers = [rank.model.layers[number] for rank in ranks]
        y = _norm(x, layers[0].input_layernorm.weight)
        parts = []
        for layer in layers:
            qkv = layer.self_attn.qkv_proj
            made = y @ qkv.weight.float().t()
            if c.qkv_bias:
                made = made + qkv.bias.float()
            sizes = [qkv.num_heads * c.head_dim] + [qkv.num_kv_heads * c.head_dim] * 2
            q, k, v = (t.unflatten(1, (-1, c.head_dim)) for t in made.split(sizes, 1))
            parts.append(_attend(q, k, v) @ layer.self_attn.o_proj.weight.float().t())
        x = x + sum(parts)
        y = _norm(x, layers[0].post_attention_layernorm.weight)
        parts = []
        for layer in layers:
            if c.experts:
                moe = layer.mlp.experts
                ids = [i for i in range(c.experts) if moe.expert_map[i] >= 0]
                some = [
                    (i, *moe.w13_weight[n].split(c.intermediate), moe.w2_weight[n])
                    for n, i in enumerate(ids)
                ]
                parts.append(_moe(y, layer.mlp.gate.weight, some))
            else:
                gate, up = (y @ layer.mlp.gate_up_proj.weight.float().t()).chunk(2, 1)
                down = layer.mlp.down_proj.weight.float()
                parts.append((functional.silu(gate) * up) @ down.t())
        x = x + sum(parts)
    x = _norm(x[-1:], ranks[0].model.norm.weight)
    logits = [x @ rank.lm_head.weight[: _rows(rank.lm_head)].float().t() for rank in ranks]
    return torch.cat(logits, 1)[0]


def _rows(embedding):
    indices = embedding.shard_indices
    return indices.org_vocab_end_index - indices.org_vocab_start_index


@torch.no_grad()
def dense_forward(config, tensors, tokens):
    """The same from the tensors of a checkpoint."""
    c, w = config, {name: tensor.float() for name, tensor in tensors.items()}
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    for i in range(c.layers):
        p = f"model.layers.{i}"
        y = _norm(x, w[f"{p}.input_layernorm.weight"])
        q, k, v = (
            (
                y @ w[f"{p}.self_attn.{n}_proj.weight"].t()
                + (w[f"{p}.self_attn.{n}_proj.bias"] if c.qkv_bias else 0)
            ).unflatten(1, (-1, c.head_dim))
            for n in "qkv"
        )
        x = x + _attend(q, k, v) @ w[f"{p}.self_attn.o_proj.weight"].t()
        y = _norm(x, w[f"{p}.post_attention_layernorm.weight"])
        if c.experts:
            some = [
                (e, *(w[f"{p}.mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")))
                for e in range(c.experts)
            ]
            x = x + _moe(y, w[f"{p}.mlp.gate.weight"], some)
        else:
            gate, up, down = (w[f"{p}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            x = x + (functional.silu(y @ gate.t()) * (y @ up.t())) @ down.t()
    x = _norm(x[-1:], w["model.norm.weight"])
    return (x @ w["model.embed_tokens.weight" if c.tied else "lm_head.weight"].t())[0]


def digest_of(model):
    """Of all bytes of a rank's parameters, in the order of their names."""
    digest = xxhash.xxh3_128()
    for name, live in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(live.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
