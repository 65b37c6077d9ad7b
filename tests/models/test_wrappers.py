"""What trainers wrap around blocks leaves numbers alone: activation checkpointing, FSDP2, compilation."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, rotation_from_ids
from tests.models.reference import LoopLayout, dense_attention, errors, make_samples, run_alone, run_packed

LENGTHS = [(0, 5), (0, 0), (0, 7)]
MODELS = {
    "mmdit": lambda: MMDiT(MMDiTConfig.tiny(num_double=2, num_single=2)),
    "dit": lambda: DiT(DiTConfig.tiny()),
}


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("model_name", MODELS)
def test_blocks_come_in_the_order_they_run(model_name):
    model, ran = MODELS[model_name]().double(), []
    for block in model.blocks():
        block.register_forward_hook(lambda module, *_: ran.append(module))
    run_packed(model, make_samples(model.config, LENGTHS))
    assert ran == model.blocks()
    assert len(ran) == model.config.num_layers


@pytest.mark.parametrize("lengths", [LENGTHS, []], ids=["tokens", "empty"])
@pytest.mark.parametrize("model_name", MODELS)
def test_activation_checkpointing(model_name, lengths):
    model = MODELS[model_name]().double()
    samples = make_samples(model.config, lengths)
    expected = run_packed(model, samples)
    blocks = model.blocks()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: module in blocks,
    )
    names = {name.replace("_checkpoint_wrapped_module.", ""): name for name, _ in model.named_parameters()}
    assert any(name != wrapped for name, wrapped in names.items())
    got = run_packed(model, samples)
    got = type(got)(got.outputs, got.input_grads, {name: got.param_grads[names[name]] for name in names})
    assert max(errors(got, expected).values()) < 1e-14


@pytest.mark.parametrize("model_name", MODELS)
def test_fully_shard(model_name, one_rank):
    model, plain = MODELS[model_name]().double(), MODELS[model_name]().double()
    for module in [*model.blocks(), model]:
        fully_shard(module)
    samples = make_samples(plain.config, LENGTHS)
    got = run_packed(model, samples)
    got = type(got)(
        got.outputs,
        got.input_grads,
        {name: None if grad is None else grad.full_tensor() for name, grad in got.param_grads.items()},  # pyright: ignore
    )
    assert max(errors(got, run_alone(plain, samples)).values()) < 1e-12


def test_mixed_precision_leaves_angles_and_times_alone(one_rank):
    """Blocks run in bf16, but angles reach them in fp32, and the sinusoid of the timestep is not rounded.

    Angles and timesteps as plain tensors, or angles in a dataclass, would be cast.
    """
    model, plain = MODELS["dit"](), MODELS["dit"]()
    for block in model.blocks():
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
    seen, times = [], []
    model.blocks()[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    model.conditioner.time_in.register_forward_pre_hook(lambda _, args: times.append(args[0]))
    plain.conditioner.time_in.register_forward_pre_hook(lambda _, args: times.append(args[0]))
    samples = make_samples(model.config, LENGTHS, dtype=torch.float32)
    run_packed(model, samples)
    x_TD, vec_SD, rotation, _ = seen[0]
    assert (x_TD.dtype, vec_SD.dtype, rotation.cos_TP.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    run_packed(plain, samples)
    assert torch.equal(*times)


class OneSequenceLayout(LoopLayout):
    """Attention without data-dependent shapes, which the loop over sequences has."""

    def attend(self, q, k, v, *, scale=None):
        return dense_attention(q, k, v, scale)


def test_blocks_compile_into_one_graph():
    model = MODELS["mmdit"]()
    config = model.config
    double, single = model.double_blocks[0], model.single_blocks[0]
    compiled = [torch.compile(block, backend="eager", fullgraph=True, dynamic=True) for block in (double, single)]
    g = torch.Generator().manual_seed(0)
    for text, image in [(3, 9), (5, 6)]:
        layout = OneSequenceLayout.build([(text, image)])
        rotation = rotation_from_ids(torch.zeros(text + image, 3), config.axes_dims, config.theta, torch.float32)
        img, txt, x, vec = (torch.randn(n, config.width, generator=g) for n in (image, text, text + image, 1))
        for got, expected in zip(
            compiled[0](img, txt, vec, rotation, layout), double(img, txt, vec, rotation, layout), strict=True
        ):
            torch.testing.assert_close(got, expected)
        torch.testing.assert_close(compiled[1](x, vec, rotation, layout), single(x, vec, rotation, layout))
