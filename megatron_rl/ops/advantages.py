"""Advantages by the kernels of csrc/, for CPU and CUDA, with the results of the torch code in algos/scan.py.

setup.py builds them into this package. Where they are not built for the device of the tensors, the torch code runs,
which each process says once. The operators are torch.ops.megatron_rl.gae, .whiten and .group_advantages; they have fake
kernels, so that torch.compile and torch.export know them. No gradients flow through any of them.
"""

# torch leaves the types of its operators open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import functools
import logging
import zlib
from pathlib import Path

import torch

from megatron_rl.algos import scan as torch_code
from megatron_rl.algos.gae import Moments
from megatron_rl.algos.groups import group_moments as group_moments_in_torch
from megatron_rl.algos.groups import group_sums
from megatron_rl.algos.scan import CreditKernels, KlPenalty, TokenScan

logger = logging.getLogger(__name__)
PACKAGE = Path(__file__).resolve().parents[1]
BUILD = "python setup.py build_ext --inplace"
# Numbers as in csrc/advantage.h.
_NO_KL, _GIVEN = 0, 1
_KL_KINDS = {"k1": 2, "k2": 3, "k3": 4, "abs": 5}
GROUP_KINDS = {"mean": 0, "std": 1, "leave_one_out": 2}
"""R less the group's mean; that over the group's deviation + 1e-6; R less the mean of the group's others."""


def libraries(package: Path = PACKAGE) -> dict[str, Path]:
    """The built kernels by type of device; those for CUDA need those for CPUs, which hold the schemas.

    In a checkout only those of the sources that are there count; setup.py names them alike.
    """
    sources = package.parent / "csrc"
    digest = f"{sources_digest(sources):08x}" if sources.is_dir() else "*"
    built: dict[str, Path] = {}
    for device in ("cpu", "cuda"):
        for path in sorted(package.glob(f"_csrc_{device}_{digest}.*so")):
            built[device] = path
    return built if "cpu" in built else {}


def sources_digest(folder: Path) -> int:
    """CRC-32 of the kernels' sources, by name and contents."""
    digest = 0
    for path in sorted(folder.glob("advantage.*")):
        digest = zlib.crc32(path.name.encode() + path.read_bytes(), digest)
    return digest


@functools.cache
def built_for() -> frozenset[str]:
    """Types of devices that the kernels are built for. Loads them into this process."""
    built = libraries()
    for path in built.values():
        torch.ops.load_library(str(path))
    if built:
        _register_fakes()
    return frozenset(built)


def _built(values: torch.Tensor) -> bool:
    """Whether the kernels run on the tensor's device."""
    device = values.device.type
    if device not in built_for():
        _say_torch_code(device)
        return False
    return True


@functools.cache
def _say_torch_code(device: str) -> None:
    logger.info("advantages: torch code, since the kernels of csrc/ are not built for %s (%s)", device, BUILD)


def _register_fakes() -> None:
    @torch.library.register_fake("megatron_rl::gae")
    def _gae(rewards: torch.Tensor, values: torch.Tensor | None, *_: object) -> tuple[torch.Tensor, ...]:
        advantages = rewards.new_empty(rewards.shape, dtype=torch.float32)
        returns = rewards.new_empty(0 if values is None else rewards.shape, dtype=torch.float32)
        return advantages, returns, rewards.new_empty(5, dtype=torch.float64)

    @torch.library.register_fake("megatron_rl::whiten")
    def _whiten(values: torch.Tensor, *_: object) -> torch.Tensor:
        return values.new_empty(values.shape, dtype=torch.float32)

    @torch.library.register_fake("megatron_rl::group_advantages")
    def _group_advantages(returns: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
        return tuple(returns.new_empty(returns.shape) for _ in range(3))


def _lambda(lam: float | torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """As the operator takes it: a number, and those of the sequences."""
    return (1.0, lam.double()) if isinstance(lam, torch.Tensor) else (lam, None)


def scan(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    gamma: float,
    lam: float | torch.Tensor,
    critic_lam: float | torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    kl: KlPenalty | None = None,
) -> TokenScan:
    """algos/scan.py: scan, same arguments and results, in one pass. Raises ValueError as it does."""
    if not _built(rewards):
        return torch_code.scan(
            rewards, values, loss_mask, cu_seqlens, gamma=gamma, lam=lam, critic_lam=critic_lam, kept=kept, kl=kl
        )
    policy, critic = _lambda(lam), _lambda(lam if critic_lam is None else critic_lam)
    terms, ref, kind, coef = None, None, _NO_KL, 0.0
    if kl is not None:
        terms, ref, coef = kl.terms, kl.ref, kl.coef
        kind = _GIVEN if ref is None else _KL_KINDS[kl.estimator]
    advantages, returns, stats = torch.ops.megatron_rl.gae(
        rewards, values, loss_mask, cu_seqlens, kept, terms, ref, kind, coef,
        gamma, policy[0], critic[0], policy[1], critic[1],
    )  # fmt: skip
    stray, faults = stats[3:].tolist()
    if faults:
        raise ValueError("cu_seqlens must go from 0 to the number of tokens and not descend, and lambdas be 0 to 1")
    if stray:
        raise ValueError(f"{int(stray)} rewards lie on tokens that are not trained; put them on trained tokens")
    return TokenScan(advantages, advantages if values is None else returns, Moments(*stats[:3]))


def whiten(
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    kept: torch.Tensor | None,
    mean: torch.Tensor,
    std: torch.Tensor,
    *,
    shift_mean: bool = True,
) -> torch.Tensor:
    """algos/scan.py: whiten_kept, same arguments and results, in one pass."""
    if not _built(values):
        return torch_code.whiten_kept(values, loss_mask, cu_seqlens, kept, mean, std, shift_mean=shift_mean)
    moments = torch.stack([mean, std]).double()
    return torch.ops.megatron_rl.whiten(values, loss_mask, cu_seqlens, kept, moments, shift_mean)


def group_advantages(returns: torch.Tensor, group_ids: torch.Tensor, kind: str) -> torch.Tensor:
    """[S] float64: each return against its group. returns: [S]; group_ids: [S] int64, any numbers in any order; kind: a
    key of GROUP_KINDS. A group of one, or whose returns are all equal, gets exactly 0.
    """
    number = GROUP_KINDS[kind]
    if _built(returns):
        return torch.ops.megatron_rl.group_advantages(returns.double(), group_ids, number)[0]
    mean, std = group_moments_in_torch(returns, group_ids)
    above = returns.double() - mean
    if kind == "std":
        return above / (std + 1e-6)
    count = group_sums(torch.ones_like(mean), group_ids)
    return above * (count / (count - 1).clamp(min=1)) if kind == "leave_one_out" else above


def group_moments(returns: torch.Tensor, group_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """algos/groups.py: group_moments, same arguments and results."""
    if not _built(returns):
        return group_moments_in_torch(returns, group_ids)
    _, mean, std = torch.ops.megatron_rl.group_advantages(returns.double(), group_ids, GROUP_KINDS["mean"])
    return mean, std


KERNELS = CreditKernels(scan, whiten, group_moments)
"""The built kernels where there are any, else the torch code"""
