"""The models against their formulas, written out once more for one sequence without packing, modules or index tricks.

Packed against alone cannot see an error that both share, such as keys that are not rotated or swapped shift and scale.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig
from tests.models.reference import error, forward_packed, make_samples


class Formulas:
    """One sequence through a model given by its state dict. `ids` are those of the joint order [text, image]."""

    def __init__(self, model: MMDiT | DiT, ids: Tensor):
        self.state, self.config, self.ids = model.state_dict(), model.config, ids

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def embed(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.fc_out", silu(self.linear(f"{name}.fc_in", x)))

    def vec(self, timestep: Tensor, pooled: Tensor, guidance: Tensor | None = None) -> Tensor:
        vec = self.embed("conditioner.time_in", sinusoid(timestep)) + self.embed("conditioner.pooled_in", pooled)
        return vec if guidance is None else vec + self.embed("conditioner.guidance_in", sinusoid(guidance))

    def mod(self, name: str, vec: Tensor) -> list[Tensor]:
        return list(self.linear(f"{name}.mod.linear", silu(vec)).split(self.config.width, dim=-1))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.mlp.fc_out", gelu(self.linear(f"{name}.mlp.fc_in", x)))

    def qkv(self, norm_name: str, projected: Tensor) -> list[Tensor]:
        """Three lists of heads, each (L, K)."""
        q, k, v = projected.split(self.config.width, dim=-1)
        heads = []
        for x, part in ((q, "q_norm"), (k, "k_norm")):
            x = torch.stack(x.split(self.config.head_dim, dim=-1))
            rms = (x**2).mean(-1, keepdim=True).add(1e-6).sqrt()
            heads.append(x / rms * self.state[f"{norm_name}.{part}.weight"])
        return [*heads, torch.stack(v.split(self.config.head_dim, dim=-1))]

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(H, L, K) each, in joint order, to (L, D)."""
        scores = self.rotate(q) @ self.rotate(k).transpose(1, 2) / self.config.head_dim**0.5
        return torch.cat(list(scores.softmax(-1) @ v), dim=-1)

    def rotate(self, x: Tensor) -> Tensor:
        numbers, start = torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous()), 0
        for axis, dim in enumerate(self.config.axes_dims):
            for j in range(dim // 2):
                angle = self.ids[:, axis].double() / self.config.theta ** (2 * j / dim)
                numbers[..., start + j] *= torch.exp(1j * angle)
            start += dim // 2
        return torch.view_as_real(numbers).flatten(-2)

    def dit_block(self, name: str, x: Tensor, vec: Tensor) -> Tensor:
        m = self.mod(name, vec)
        heads = self.qkv(f"{name}.attn.norm", self.linear(f"{name}.attn.qkv", norm(x) * (1 + m[1]) + m[0]))
        x = x + m[2] * self.linear(f"{name}.proj", self.attention(*heads))
        return x + m[5] * self.mlp(name, norm(x) * (1 + m[4]) + m[3])

    def double_block(self, name: str, txt: Tensor, img: Tensor, vec: Tensor) -> tuple[Tensor, Tensor]:
        names, streams = (f"{name}.txt", f"{name}.img"), [txt, img]
        mods = [self.mod(part, vec) for part in names]
        heads = [
            self.qkv(f"{part}.attn.norm", self.linear(f"{part}.attn.qkv", norm(x) * (1 + m[1]) + m[0]))
            for part, x, m in zip(names, streams, mods, strict=True)
        ]
        joint = [torch.cat(pair, dim=1) for pair in zip(*heads, strict=True)]
        attended = self.attention(*joint).split([len(txt), len(img)])
        out = []
        for part, x, m, o in zip(names, streams, mods, attended, strict=True):
            x = x + m[2] * self.linear(f"{part}.proj", o)
            out.append(x + m[5] * self.mlp(part, norm(x) * (1 + m[4]) + m[3]))
        return out[0], out[1]

    def single_block(self, name: str, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale, gate = self.mod(name, vec)
        hidden = self.linear(f"{name}.fc_in", norm(x) * (1 + scale) + shift)
        width = 3 * self.config.width
        attended = self.attention(*self.qkv(f"{name}.norm", hidden[:, :width]))
        return x + gate * self.linear(f"{name}.fc_out", torch.cat((attended, gelu(hidden[:, width:])), dim=-1))

    def final(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.mod("final_layer", vec)
        return self.linear("final_layer.linear", norm(x) * (1 + scale) + shift)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def sinusoid(t: Tensor) -> Tensor:
    angle = 1000 * t[:, None] / 10_000 ** (torch.arange(128, dtype=torch.float64) / 128)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


@torch.no_grad()
def with_norm_scales(model):
    """Norm scales start at one, where a missing scale would go unseen."""
    g = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if "_norm." in name:
            param.copy_(1 + 0.3 * torch.randn(param.shape, generator=g))
    return model


@pytest.mark.parametrize("lengths", [(3, 7), (0, 7), (1, 1)], ids=str)
@torch.no_grad()
def test_mmdit(lengths):
    config = MMDiTConfig.tiny(num_heads=3, num_double=2, num_single=2, guidance=True)
    model = with_norm_scales(MMDiT(config).double())
    (sample,) = make_samples(config, [lengths])
    f = Formulas(model, sample.ids)
    vec = f.vec(sample.timestep, sample.pooled, sample.guidance)
    txt, img = f.linear("txt_in", sample.txt), f.linear("img_in", sample.img)
    for i in range(2):
        txt, img = f.double_block(f"double_blocks.{i}", txt, img, vec)
    x = torch.cat((txt, img))
    for i in range(2):
        x = f.single_block(f"single_blocks.{i}", x, vec)
    expected = f.final(x[len(txt) :], vec)
    assert error(forward_packed(model, [sample])[0], expected) < 1e-12
    # Mutation: weights of one block in place of another's.
    for key in ("double_blocks.0.img.mlp.fc_in.weight", "single_blocks.1.fc_out.weight"):
        model.state_dict()[key].mul_(1.01)
        assert error(forward_packed(model, [sample])[0], expected) > 1e-5
        model.state_dict()[key].div_(1.01)


@torch.no_grad()
def test_dit():
    config = DiTConfig.tiny(num_heads=3)
    model = with_norm_scales(DiT(config).double())
    (sample,) = make_samples(config, [(0, 7)])
    f = Formulas(model, sample.ids)
    vec = f.vec(sample.timestep, sample.pooled)
    x = f.linear("x_in", sample.img)
    for i in range(config.depth):
        x = f.dit_block(f"dit_blocks.{i}", x, vec)
    expected = f.final(x, vec)
    assert error(forward_packed(model, [sample])[0], expected) < 1e-12
    # Mutation: positions of another grid.
    moved = replace(sample, ids=2 * sample.ids)
    assert error(forward_packed(model, [moved])[0], expected) > 1e-5
