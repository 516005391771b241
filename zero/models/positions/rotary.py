"""Rotary positions: pairs of dimensions of queries and keys turn by angles (RoFormer, arXiv 2104.09864).

Shapes are named by suffix:
  B rows, T positions of a row, H heads of queries, G of keys, K head dimension, R pairs of rotated dimensions
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zero.base.keys import at_least, fraction, key, positive
from zero.models.attention.kernel import fused_rotation, fuses_rotation
from zero.models.part import Sizes
from zero.models.positions.kind import Place, PositionKind
from zero.models.positions.numbers import position_numbers
from zero.models.positions.rotary_scaling import SCALINGS, UNNAMED, forms, is_scaling


@dataclass(frozen=True)
class Rotary(Sizes):
    """The keys of rotary positions."""

    rotary_base: float = key(10_000.0, positive(), "base of the rotary frequencies")
    rotary_fraction: float = key(1.0, fraction(), "fraction of a head's dimensions that is rotated")
    rotary_dim: int | None = key(
        None,
        at_least(1),
        "dimensions of a head that are rotated; the last ones in latent attention, where these are all",
        none="rotary_fraction of head_dim",
    )
    # GPT-J; the weights of DeepSeek-V3
    rotary_interleaved: bool = key(
        False, None, "pairs of dimensions are neighbors: (0, 1), (2, 3) and so on; else one is from each half"
    )
    # Llama 3.1: arXiv 2407.21783; linear: arXiv 2306.15595; YaRN: arXiv 2309.00071, section 3; longrope: arXiv
    # 2402.13753. "dynamic" (NTK-aware) and "longrope" depend on the number of positions of a row, padding included.
    rotary_scaling: tuple[Any, ...] | None = key(
        None,
        None,
        "that of Llama 3.1: [factor, low frequency factor, high frequency factor, original context]; [linear, "
        "factor]; [yarn, factor, original context, fast turns, slow turns, factor of cosines and sines], or "
        "yarn_unrounded, with the ends of its ramp as they are; [dynamic, factor, original context], whose "
        "base grows with the positions of a row beyond that context; or [longrope, original context, factor "
        "of cosines and sines, ...], then for each pair a divisor in rows of up to that context, then one in "
        "longer rows",
    )
    local_rotary_base: float | None = key(
        None, positive(), "base in layers with a window, where rotary_scaling then does not apply", none="rotary_base"
    )
    # arXiv 2501.18795
    unrotated_every: int | None = key(None, at_least(1), "the last of every so many layers has no rotary positions")

    def mistakes(self) -> Iterator[str]:
        """A scaling that is none, and layers that do not divide."""
        if self.rotary_scaling is not None and not is_scaling(str(self.rotary_kind), self.rotary_numbers):
            yield f"rotary_scaling must be {forms()}, got {list(self.rotary_scaling)}"
        if self.rotary_kind == "longrope" and len(self.rotary_numbers) != 2 + 2 * (self.rotated // 2):
            yield (
                f"rotary_scaling longrope must have 2 x {self.rotated // 2} divisors, for the pairs of {self.rotated} "
                f"rotated dimensions, got {len(self.rotary_numbers) - 2}"
            )
        if self.unrotated_every is not None and self.N % self.unrotated_every:
            yield f"N {self.N} must be a multiple of unrotated_every {self.unrotated_every}"

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.rotary_dim or int(self.rotary_fraction * self.head_width)

    @property
    def rotary_kind(self) -> str | None:
        """The name of `rotary_scaling`, which Llama 3.1's does not have; None without one."""
        scaling = self.rotary_scaling
        if scaling is None:
            return None
        if scaling and isinstance(scaling[0], str):
            return scaling[0]
        return UNNAMED

    @property
    def rotary_numbers(self) -> tuple[float, ...]:
        """`rotary_scaling` without its name."""
        scaling = self.rotary_scaling or ()
        if scaling and isinstance(scaling[0], str):
            return scaling[1:]
        return scaling

    @property
    def rotary_switch(self) -> int | None:
        """The number of positions beyond which the length of a row changes rotary frequencies; None for none."""
        index = None if self.rotary_kind is None else SCALINGS[self.rotary_kind].switch
        if index is None:
            return None
        return int(self.rotary_numbers[index])


class Rotation(NamedTuple):
    """Rotary positions of one layer.

    Attributes:
      frequencies_R: radians per position, float32, for each pair of the dimensions that are rotated.
      length: factor of cosines and sines.
    """

    frequencies_R: jax.Array | np.ndarray
    length: jax.Array | float


def rotation_of(config: Rotary, layer: jax.Array | int, positions: int) -> Rotation:
    """The rotary positions of a layer, whose number may be traced, in rows of this many positions.

    >>> rotation_of(Rotary(8, 10, 2, 16, 0.0, 1), 0, 16).frequencies_R.tolist()
    [1.0, 0.009999999776482582]
    """
    period = math.lcm(len(config.windows) if config.local_rotary_base else 1, config.unrotated_every or 1)
    kinds = [_rotation(config, number, positions) for number in range(period)]
    if period == 1:
        return kinds[0]
    frequencies_LR = np.stack([kind.frequencies_R for kind in kinds])
    length_L = np.asarray([x.length for x in kinds])
    return Rotation(jnp.asarray(frequencies_LR)[layer % period], jnp.asarray(length_L, jnp.float32)[layer % period])


def _rotation(config: Rotary, layer: int, positions: int) -> Rotation:
    """Source: RoFormer, arXiv 2104.09864, section 3.2.2; SmolLM3's layers without positions: arXiv 2501.18795."""
    rotated = config.rotated
    is_local = config.local_rotary_base is not None and config.windows[layer % len(config.windows)] > 0
    base = config.local_rotary_base if is_local and config.local_rotary_base else config.rotary_base
    frequencies_R = base ** -(np.arange(0, rotated, 2) / rotated)
    length = 1.0
    if config.unrotated_every is not None and (layer + 1) % config.unrotated_every == 0:
        return Rotation(np.zeros_like(frequencies_R, np.float32), 1.0)  # to turn by nothing is exact
    if config.rotary_scaling is not None and not is_local:
        length_of_row = () if config.rotary_switch is None else (positions,)
        scaling = SCALINGS[str(config.rotary_kind)]
        frequencies_R, length = scaling.scaled(frequencies_R, base, *length_of_row, *config.rotary_numbers)
    return Rotation(frequencies_R.astype(np.float32), length)


def cosines_and_sines(
    positions: int, position: jax.Array | int, rotation: Rotation, starts_BT: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angle of each position and pair, float32 `(B, T, 1, R)`; B is 1 without segments.

    `position` as in `position_numbers`; with segments, positions count from the start of their segment.
    """
    angles = position_numbers(position, positions).astype(jnp.float32)[None, :, None, None]
    if starts_BT is not None:
        angles = angles - starts_BT.astype(jnp.float32)[..., None, None]
    angles = angles * rotation.frequencies_R[None, None, None]
    return jnp.cos(angles) * rotation.length, jnp.sin(angles) * rotation.length


def rotate(x_BTHK: jax.Array, cos_BT1R: jax.Array, sin_BT1R: jax.Array) -> jax.Array:
    """Rotary positions: pairs `(i, i + R)` of the first 2 R dimensions of each head turn by an angle."""
    half = cos_BT1R.shape[-1]
    first, second = (x_BTHK[..., part].astype(jnp.float32) for part in (slice(half), slice(half, 2 * half)))
    turned = [first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R]
    rotated = jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)
    return jnp.concatenate([rotated, x_BTHK[..., 2 * half :]], axis=-1)


def halves(x_BTHK: jax.Array, pairs: int) -> jax.Array:
    """Neighboring pairs of the first dimensions of a head as `rotate` takes them: all first ones, then all second ones.

    >>> halves(jnp.arange(6).reshape(1, 1, 1, 6), 2).ravel().tolist()
    [0, 2, 1, 3, 4, 5]
    """
    first, second = x_BTHK[..., : 2 * pairs : 2], x_BTHK[..., 1 : 2 * pairs : 2]
    return jnp.concatenate([first, second, x_BTHK[..., 2 * pairs :]], axis=-1)


def turned(config: Rotary, q_BTHK: jax.Array, k_BSGK: jax.Array, place: Place) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, turned; in the kernel's own way where it has one."""
    positions = q_BTHK.shape[1]
    rotation = rotation_of(config, place.layer, place.row)
    angles = cosines_and_sines(positions, place.numbers, rotation, place.starts_BT)
    is_fused = fuses_rotation(place.kernel, positions, config.head_width, angles[0].shape[-1])
    turn = fused_rotation if is_fused else rotate
    if config.rotary_interleaved:  # in both the same order, which scores do not see
        q_BTHK, k_BSGK = (halves(x, angles[0].shape[-1]) for x in (q_BTHK, k_BSGK))
    return turn(q_BTHK, *angles), turn(k_BSGK, *angles)


def _mistakes(config: Rotary) -> Iterator[str]:
    if config.rotary_dim is not None and not (config.rotary_dim <= config.head_width and config.rotary_dim % 2 == 0):
        yield f"rotary_dim must be even and at most the {config.head_width} of a head, got {config.rotary_dim}"
    elif config.rotated < 2 or config.rotated % 2:
        yield f"rotary_fraction {config.rotary_fraction} of {config.head_width} dimensions are not even"
    if config.rotary_dim is not None and config.rotary_fraction != 1:
        yield f"rotary_dim {config.rotary_dim} needs rotary_fraction: 1.0, got {config.rotary_fraction}"


ROTARY = PositionKind(turned=turned, mistakes=_mistakes)
