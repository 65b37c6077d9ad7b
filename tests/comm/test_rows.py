"""Rows by index: torch's operations everywhere, Triton's kernels on CUDA and under Triton's interpreter on the CPU."""

import importlib.util
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from knapformer.comm import rows_triton
from knapformer.errors import KnapFormerWarning, PlanInvariantError

ON_CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    """A second copy of the module whose kernels run in Python, on tensors of the CPU."""
    if rows_triton.triton is None:
        pytest.skip("Triton is not installed (pip install triton), so its interpreter cannot run the kernels")
    spec = importlib.util.spec_from_file_location("rows_interpreted", rows_triton.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is declared
        spec.loader.exec_module(module)
        patch.setattr(module, "_has_kernel", lambda tensor: True)
        yield module


@pytest.fixture(params=["torch", "interpreted", ON_CUDA])
def rows(request: pytest.FixtureRequest) -> tuple[ModuleType, str]:
    """The module, and the device its tensors are to be on."""
    if request.param == "interpreted":
        return request.getfixturevalue("interpreted"), "cpu"
    return rows_triton, "cuda" if request.param == "cuda" else "cpu"


def numbers(shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    high = 256 if dtype == torch.uint8 else 1 << (31 if dtype == torch.int32 else 62)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator, dtype=torch.int64).to(dtype).to(device)


def some_rows(n: int, of: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:n].to(device)


DTYPES = [torch.int64, torch.int32, torch.uint8]
# (words, first column, columns of the message): whole rows, aligned and unaligned columns, rows longer than a tile.
COLUMNS = [(32, 0, 32), (64, 16, 96), (33, 0, 33), (7, 3, 12), (1, 0, 1), (1, 5, 8), (2, 4, 8), (9000, 16, 9040)]


@pytest.mark.parametrize(("words", "start", "columns"), COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_take(rows, dtype: torch.dtype, words: int, start: int, columns: int) -> None:
    module, device = rows
    source = numbers((70, columns), dtype, device)[:, start : start + words]
    for n in (0, 1, 45, 70):
        index = some_rows(n, 70, device)
        taken = module.take_rows(source, index)
        assert taken.is_contiguous() and torch.equal(taken, source.index_select(0, index))
        out = torch.zeros(n, words, dtype=dtype, device=device)
        assert module.take_rows(source, index, out) is out
        assert torch.equal(out, taken)


@pytest.mark.parametrize(("words", "start", "columns"), COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_put(rows, dtype: torch.dtype, words: int, start: int, columns: int) -> None:
    module, device = rows
    for n in (0, 1, 45, 70):
        message = numbers((70, columns), dtype, device)
        expected = message.clone()
        source, index = numbers((n, words), dtype, device, seed=1), some_rows(n, 70, device)
        expected[:, start : start + words].index_copy_(0, index, source)
        module.put_rows(message[:, start : start + words], index, source)
        assert torch.equal(message, expected)  # all of it: neither other rows nor other columns have changed


def test_a_row_taken_twice(rows) -> None:
    module, device = rows
    source, index = numbers((5, 6), torch.int64, device), torch.tensor([4, 4, 0, 4], device=device)
    assert torch.equal(module.take_rows(source, index), source[index])


def test_all_rows_in_order(rows) -> None:
    module, device = rows
    message = numbers((9, 12), torch.int32, device)
    taken = module.take_rows(message[:, 2:7], None)
    assert taken.is_contiguous() and torch.equal(taken, message[:, 2:7])
    module.put_rows(message[:, 2:7], None, taken + 1)
    assert torch.equal(message[:, 2:7], taken + 1)


@pytest.mark.parametrize("lens", [(20, 13, 13), (5,), (0, 4, 0), (0, 0, 0), (6, 5, 4, 3, 2)], ids=str)
@pytest.mark.parametrize("words", [32, 5])
def test_several_tensors_in_one_message(rows, words: int, lens: tuple[int, ...]) -> None:
    module, device = rows
    total = sum(lens)
    indices = some_rows(total, total, device).split(lens)
    message = numbers((total, words), torch.int64, device)
    sources = [numbers((n, words), torch.int64, device, seed=i) for i, n in enumerate(lens)]
    module.put_all_rows(message, indices, sources)
    for source, index in zip(sources, indices, strict=True):
        assert torch.equal(message[index], source)


def test_16_byte_accesses_where_every_row_allows_them() -> None:
    words = rows_triton._words_per_access
    message = torch.zeros(10, 48, dtype=torch.int64)
    assert words((message, message[:, 2:4])) == 2
    assert words((message, message[:, 1:3])) == 1  # begins at 8 bytes
    assert words((message[:, :3],)) == 1  # ends at 8 bytes
    assert words((torch.zeros(10, 3, dtype=torch.int64),)) == 1  # rows of 24 bytes
    assert words((message.view(torch.int32),)) == 4
    assert words((message.view(torch.uint8),)) == 16


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 6), torch.int64), ((3, 5), torch.int64), ((3, 6), torch.int32)], ids=str
)
def test_tensors_that_do_not_fit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    message, index = torch.zeros(9, 6, dtype=torch.int64), torch.tensor([1, 5, 2])
    with pytest.raises(PlanInvariantError, match=r"3 rows of 6 words of torch.int64 on cpu do not fit a tensor"):
        rows_triton.put_rows(message, index, torch.zeros(shape, dtype=dtype))
    with pytest.raises(PlanInvariantError, match="do not fit"):
        rows_triton.take_rows(message, index, torch.zeros(shape, dtype=dtype))


def test_without_a_working_triton_torch_moves_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(rows_triton, "_move", broken)
    with pytest.warns(KnapFormerWarning, match="Triton cannot run on cpu .*Failed to find C compiler.* torch's slower"):
        assert not rows_triton._try_out(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source, index = numbers((5, 6), torch.int64, "cpu"), torch.tensor([3, 1])
        assert torch.equal(rows_triton.take_rows(source, index), source[index])


def wrong_row(module: ModuleType) -> bool:
    source, index = numbers((40, 6), torch.int64, "cpu"), some_rows(30, 40, "cpu")
    return torch.equal(module.take_rows(source, index), source[index.flip(0)])


def test_the_comparison_can_fail() -> None:
    assert not wrong_row(rows_triton)
