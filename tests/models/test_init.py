"""Weights: from one generator only, the same whatever the device, dtype or sharding; names that stay."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from knapformer.errors import SpecError
from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig
from knapformer.models.init import fill_parameters
from tests.models.reference import forward_packed, make_samples

MODELS = {
    "mmdit": lambda **kw: MMDiT(MMDiTConfig.tiny(guidance=True, **kw)),
    "dit": lambda **kw: DiT(DiTConfig.tiny(**kw)),
}

DIT_KEYS = [
    "x_in",
    "conditioner.time_in.fc_in",
    "conditioner.time_in.fc_out",
    "conditioner.pooled_in.fc_in",
    "conditioner.pooled_in.fc_out",
    "dit_blocks.0.mod.linear",
    "dit_blocks.0.attn.qkv",
    "dit_blocks.0.proj",
    "dit_blocks.0.mlp.fc_in",
    "dit_blocks.0.mlp.fc_out",
    "final_layer.mod.linear",
    "final_layer.linear",
]
MMDIT_KEYS = [
    "img_in",
    "txt_in",
    "conditioner.time_in.fc_in",
    "conditioner.time_in.fc_out",
    "conditioner.pooled_in.fc_in",
    "conditioner.pooled_in.fc_out",
    "conditioner.guidance_in.fc_in",
    "conditioner.guidance_in.fc_out",
    "double_blocks.0.txt.mod.linear",
    "double_blocks.0.txt.attn.qkv",
    "double_blocks.0.txt.proj",
    "double_blocks.0.txt.mlp.fc_in",
    "double_blocks.0.txt.mlp.fc_out",
    "double_blocks.0.img.mod.linear",
    "double_blocks.0.img.attn.qkv",
    "double_blocks.0.img.proj",
    "double_blocks.0.img.mlp.fc_in",
    "double_blocks.0.img.mlp.fc_out",
    "single_blocks.0.mod.linear",
    "single_blocks.0.fc_in",
    "single_blocks.0.fc_out",
    "final_layer.mod.linear",
    "final_layer.linear",
]
DIT_NORMS = ["dit_blocks.0.attn.norm"]
MMDIT_NORMS = ["double_blocks.0.txt.attn.norm", "double_blocks.0.img.attn.norm", "single_blocks.0.norm"]


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("model", "linears", "norms"),
    [(MODELS["mmdit"](), MMDIT_KEYS, MMDIT_NORMS), (MODELS["dit"](depth=1), DIT_KEYS, DIT_NORMS)],
    ids=["mmdit", "dit"],
)
def test_checkpoint_names_are_stable(model, linears, norms):
    expected = {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}
    expected |= {f"{name}.{part}_norm.weight" for name in norms for part in "qk"}
    assert set(model.state_dict()) == expected


@pytest.mark.parametrize("model_name", MODELS)
def test_global_random_state_is_neither_read_nor_moved(model_name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = MODELS[model_name]()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(first, MODELS[model_name]())


def test_generator_decides():
    model, other = MODELS["dit"](), MODELS["dit"]()
    other.init_weights(torch.Generator().manual_seed(7))
    assert not same(model, other)
    model.init_weights(torch.Generator().manual_seed(7))
    assert same(model, other)


@pytest.mark.parametrize("model_name", MODELS)
def test_meta_then_storage(model_name):
    with torch.device("meta"):
        model = MODELS[model_name]()
    with pytest.raises(SpecError, match=r"is on the meta device .* call model.to_empty"):
        model.init_weights()
    model.to_empty(device="cpu")
    model.init_weights()
    assert same(model, MODELS[model_name]())


def test_dtypes_share_their_weights():
    fp64, fp32, bf16 = MODELS["dit"]().double(), MODELS["dit"](), MODELS["dit"]().bfloat16()
    fp64.init_weights()
    bf16.init_weights()
    assert same(fp64.float(), fp32)
    assert same(bf16, fp32.bfloat16())


@pytest.mark.parametrize("model_name", MODELS)
def test_nothing_is_zero(model_name):
    for name, param in MODELS[model_name]().named_parameters():
        assert bool((param != 0).all()), name
        if name.endswith("weight") and param.dim() == 2:
            assert float(param.detach().std() * param.shape[1] ** 0.5) == pytest.approx(1, abs=0.15), name


@pytest.mark.parametrize("model_name", MODELS)
def test_zero_init_starts_as_the_identity(model_name):
    model = MODELS[model_name](zero_init=True).double()
    zero = {name for name, param in model.named_parameters() if not param.any()}
    weights = {name for name in zero if name.endswith("weight")}
    assert weights == {name for name, _ in model.named_parameters() if name.endswith("mod.linear.weight")} | {
        "final_layer.linear.weight"
    }
    assert zero - weights == {name for name, _ in model.named_parameters() if name.endswith("bias")}
    # Blocks hand their input on unchanged; only then does a zero output layer teach nothing about the blocks.
    seen = []
    for block in model.blocks():
        block.register_forward_hook(lambda _, args, out: seen.append((args[0], out[0] if type(out) is tuple else out)))
    (out,) = forward_packed(model, make_samples(model.config, [(0, 5)]))
    assert len(seen) == len(model.blocks())
    assert all(torch.equal(before, after) for before, after in seen)
    assert not out.any()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_shards_are_parts_of_the_same_weights(rank):
    """Sharded before it has storage, on 3 ranks that see no data of each other, a model gets the unsharded weights."""
    expected = MODELS["mmdit"]().state_dict()
    dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
    try:
        # Torch caches specs by mesh, and a mesh equals that of another rank played in this process but for its name.
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=(f"as_rank_{rank}",))
        with torch.device("meta"):
            model = MODELS["mmdit"]()
        for block in [*model.blocks(), model]:
            fully_shard(block, mesh=mesh)
        model.to_empty(device="cpu")
        model.init_weights()
        assert model.num_params == sum(value.numel() for value in expected.values())
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            chunks = expected[name].chunk(3)
            part = chunks[rank] if rank < len(chunks) else expected[name][:0]
            assert torch.equal(param.to_local(), part), name
    finally:
        dist.destroy_process_group()


def test_unknown_layer_is_refused():
    with pytest.raises(SpecError, match=r"parameter 0\.weight belongs to a LayerNorm; init knows"):
        fill_parameters(torch.nn.Sequential(torch.nn.LayerNorm(3)))
