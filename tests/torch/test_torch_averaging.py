"""``ElasticAveraging`` and ``DiLoCo`` in one process: conservation, intervals, and the averages they must reduce to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvmpi
from kvmpi import optim
from kvmpi.errors import ConfigError
from kvmpi.torch import DiLoCo, ElasticAveraging

STORES = ["mpi", "dist_sync", "dist_async", "dist_sync_mpi", "dist_async_mpi"]


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def disturb(model: nn.Module, seed: int) -> None:
    """In place of local steps."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += torch.randn(p.shape, generator=generator)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])


@pytest.mark.parametrize("store", STORES)
def test_elastic_averaging_conserves_weights_plus_center(store: str) -> None:
    model = make_model()
    with kvmpi.create(store) as kv:
        elastic = ElasticAveraging(model.named_parameters(), kv, alpha=0.25, interval=1)
        center = flat(elastic.pull_center())
        assert torch.equal(center, flat(model.parameters()))  # worker 0's weights
        for round_ in range(3):
            disturb(model, round_)
            weights = flat(model.parameters())
            assert elastic.step()
            new_center = flat(elastic.pull_center())
            torch.testing.assert_close(new_center, center + 0.25 * (weights - center), atol=1e-6, rtol=0)
            torch.testing.assert_close(
                flat(model.parameters()) + new_center, weights + center, atol=1e-6, rtol=0, msg="w + center"
            )
            center = new_center


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_elastic_averaging_moves_weights_by_what_servers_get(compression: str, overlap: int) -> None:
    """These get weights that are rounded; every exchange would lose what was rounded off."""
    (w,) = [torch.linspace(-3.0, 3.0, 101)]
    with kvmpi.create("dist_async") as kv:
        elastic = ElasticAveraging([w], kv, alpha=0.25, interval=2, overlap=overlap)
        expected = 2 * w.double()
        for compressed in (True, False):
            kv.set_gradient_compression({"type": compression if compressed else "none"})
            for step in range(1, 5):
                change = torch.linspace(0.0, 0.1 * step, 101)
                w += change
                expected += change
                elastic.step()
            elastic.finish()
            [center] = elastic.pull_center()
            bound = 4 * 8 * 8 * torch.finfo(w.dtype).eps  # steps, roundings of each, values
            torch.testing.assert_close(w.double() + center, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("overlap", [0, 1])
def test_both_sides_move_by_the_alpha_that_the_servers_have(overlap: int, tmp_path: Path) -> None:
    """It is changed by ``set_hyperparams``, also while an exchange is under way, and by a file with another one."""
    alphas = [0.5, 0.5, 0.125, 0.125, 0.25]

    def train(elastic: ElasticAveraging, w: torch.Tensor, rounds: range) -> None:
        for round_ in rounds:
            if alphas[round_] != alphas[round_ - 1]:
                kv.set_hyperparams(alpha=alphas[round_])
            met = elastic.pull_center()[0].double()
            for _ in range(2):
                w += torch.linspace(0.0, 1.0, 5)
                sent = w.double()
                elastic.step()
            [center] = elastic.pull_center()
            torch.testing.assert_close(center.double(), met + alphas[round_] * (sent - met), atol=1e-6, rtol=0)
            if not overlap:
                torch.testing.assert_close(w.double() + center, sent + met, atol=1e-6, rtol=0)

    steps = 2 * torch.linspace(0.0, 1.0, 5).double()
    (w,) = [torch.arange(5.0)]
    with kvmpi.create("dist_sync") as kv:
        elastic = ElasticAveraging([w], kv, alpha=0.5, interval=2, overlap=overlap)
        train(elastic, w, range(3))
        kv.set_hyperparams(alpha=alphas[3])
        kv.save(tmp_path / "center")
        state, saved = elastic.state_dict(), w.clone()
    (w,) = [torch.zeros(5)]
    with kvmpi.create("dist_sync") as kv:
        elastic = ElasticAveraging([w], kv, alpha=1.0, interval=2, overlap=overlap)
        kv.load(tmp_path / "center")
        w.copy_(saved)
        elastic.load_state_dict(state)
        train(elastic, w, range(3, 5))
        elastic.finish()
        [center] = elastic.pull_center()
        torch.testing.assert_close(w.double() + center, 2 * torch.arange(5.0).double() + 5 * steps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_center_of_another_algorithm_is_refused(overlap: int, tmp_path: Path) -> None:
    """Weights that are taken for differences, or the other way round, would ruin it."""
    (w,) = [torch.ones(5)]
    makers: list[Any] = [
        lambda kv: ElasticAveraging([w], kv, 0.5, 2, overlap=overlap), lambda kv: DiLoCo([w], kv, 2, overlap=overlap)
    ]  # fmt: skip
    for saved, loaded, said in ((0, 1, r"applies Elastic\(.*needs Outer"), (1, 0, r"applies Outer\(.*needs Elastic")):
        with kvmpi.create("dist_sync") as kv:
            makers[saved](kv)
            kv.save(tmp_path / "center")
        with kvmpi.create("dist_sync") as kv:
            averaging = makers[loaded](kv)
            kv.load(tmp_path / "center")
            averaging.reset()
            averaging.step()
            with pytest.raises(ConfigError, match=said):
                averaging.step()
            assert torch.equal(averaging.pull_center()[0], torch.ones(5))


@pytest.mark.parametrize("make", [lambda p, kv: ElasticAveraging(p, kv, 0.5, 3), lambda p, kv: DiLoCo(p, kv, 3)])
def test_every_interval_th_step_exchanges(make: Any) -> None:
    model = make_model()
    with kvmpi.create("dist_sync") as kv:
        averaging = make(model.parameters(), kv)
        assert [averaging.step() for _ in range(7)] == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("store", STORES)
def test_diloco_that_averages_takes_the_weights_as_they_are(store: str) -> None:
    """The mean over one worker; several are in test_torch_jobs."""
    model = make_model()
    with kvmpi.create(store) as kv:
        diloco = DiLoCo(model.parameters(), kv, interval=1, lr=1.0, momentum=0.0, nesterov=False)
        for round_ in range(3):
            disturb(model, round_)
            weights = flat(model.parameters())
            diloco.step()
            torch.testing.assert_close(flat(model.parameters()), weights, atol=1e-6, rtol=0)
            assert torch.equal(flat(diloco.pull_center()), flat(model.parameters()))


def test_diloco_steps_like_torch_sgd_on_the_difference() -> None:
    model = make_model()
    expected = flat(model.parameters()).requires_grad_()
    outer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    with kvmpi.create("dist_async_mpi") as kv:
        diloco = DiLoCo(model.parameters(), kv, interval=2)
        for round_ in range(6):
            disturb(model, round_)
            weights = flat(model.parameters())
            if diloco.step():
                expected.grad = expected.detach() - weights
                outer.step()
                torch.testing.assert_close(flat(model.parameters()), expected.detach(), atol=1e-5, rtol=0)


def test_workers_of_a_client_step_together_through_kv_client() -> None:
    model = make_model()
    with kvmpi.create("dist_async_mpi") as kv:
        inside = kvmpi.torch.Trainer(model.parameters(), torch.optim.SGD(model.parameters(), 0.5), kv.client)
        elastic = ElasticAveraging(model.parameters(), kv, alpha=0.5, interval=1)
        start = flat(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        inside.step(kv.mpi_size)
        elastic.step()
        torch.testing.assert_close(flat(model.parameters()), start - 0.25, atol=1e-6, rtol=0)
        torch.testing.assert_close(flat(elastic.pull_center()), start - 0.25, atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [lambda p, kv: ElasticAveraging(p, kv, 0.5, 1), lambda p, kv: DiLoCo(p, kv, 1)])
def test_reset_goes_on_from_a_loaded_center(make: Any, tmp_path: Path) -> None:
    model = make_model()
    with kvmpi.create("dist_sync") as kv:
        averaging = make(model.parameters(), kv)
        disturb(model, 0)
        averaging.step()
        kv.save(tmp_path / "center")
        center = flat(averaging.pull_center())
    model = make_model(seed=9)
    with kvmpi.create("dist_sync") as kv:
        averaging = make(model.parameters(), kv)
        kv.load(tmp_path / "center")
        averaging.reset()
        assert torch.equal(flat(model.parameters()), center)
        averaging.step()
        if isinstance(averaging, ElasticAveraging):  # Outer's momentum goes on moving
            assert torch.equal(flat(averaging.pull_center()), center)


def test_pull_center_fills_another_model() -> None:
    model, other = make_model(), make_model(seed=5)
    with kvmpi.create("dist_async") as kv:
        elastic = ElasticAveraging(model.parameters(), kv, 0.5)
        elastic.pull_center(other.parameters())
        assert torch.equal(flat(other.parameters()), flat(model.parameters()))
        with pytest.raises(ConfigError, match="out has 1 tensors, the model 4"):
            elastic.pull_center([torch.empty(3)])


def test_arguments_are_checked() -> None:
    model = make_model()
    with kvmpi.create("mpi") as kv:
        for interval in (0, 1.5, True):
            with pytest.raises(ConfigError, match="interval"):
                DiLoCo(model.parameters(), kv, interval=interval)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="alpha"):
            ElasticAveraging(model.parameters(), kv, alpha=1.5)
        for net in (nn.Linear(2, 2), model):  # of which only the second can be iterated over
            with pytest.raises(ConfigError, match=r"params is of \w+: pass model\.parameters\(\)"):
                DiLoCo(net, kv)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"out is of Linear: pass other_model\.parameters"):
            DiLoCo(model.parameters(), kv).pull_center(nn.Linear(2, 2))  # type: ignore[arg-type]
    with kvmpi.create("mpi") as kv:
        with pytest.raises(ConfigError, match="expected a store"):
            ElasticAveraging(model.parameters(), "mpi", alpha=0.5)  # type: ignore[arg-type]
        kv.set_optimizer(optim.SGD(0.1))
        with pytest.raises(ConfigError, match=r"applies SGD\(lr=0\.1\) already"):
            DiLoCo(model.parameters(), kv)
