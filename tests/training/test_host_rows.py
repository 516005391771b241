"""Which rows each host reads, on any placement of groups and hosts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zero
from zero.training.host_rows import HostRows

ROWS_OF_PART = 3


@st.composite
def placements(draw: st.DrawFn) -> tuple[zero.Axis, list[int]]:
    """An axis with groups anywhere on it, and the host of each device; every host has as many devices."""
    hosts, local = draw(st.sampled_from([(1, 8), (2, 4), (2, 6), (3, 4), (4, 2), (4, 3)]))
    size = hosts * local
    group = draw(st.sampled_from([divisor for divisor in range(1, size + 1) if size % divisor == 0]))
    order = tuple(draw(st.permutations(range(size))))
    kind = draw(st.sampled_from(["tensor", "context"]))
    if kind == "context":
        axis = zero.Axis("zero", (1, size), order, context=group)
    else:
        axis = zero.Axis("zero", (1, group, size // group), order, tensor=group)
    return axis, list(np.arange(size) // local)


@given(placements())
def test_every_row_is_read_where_it_is_computed(placement: tuple[zero.Axis, list[int]]) -> None:
    """Each device gets the rows of its group, and over all hosts each row is counted once."""
    axis, hosts = placement
    groups = axis.row_groups()
    batch = np.arange(len(groups) * ROWS_OF_PART)
    by_part = batch.reshape(len(groups), ROWS_OF_PART)
    counted = []
    for host in sorted(set(hosts)):
        host_rows = HostRows.of_devices(axis, hosts, host)
        numbers = host_rows.numbers(len(host_rows.groups) * ROWS_OF_PART)
        of_devices = host_rows.split(batch[numbers])
        positions = [position for position, its_host in enumerate(hosts) if its_host == host]
        for position, rows in zip(positions, of_devices, strict=True):
            (group,) = [number for number, members in enumerate(groups) if position in members]
            np.testing.assert_array_equal(rows, by_part[group])
        np.testing.assert_array_equal(of_devices, host_rows.split_global(batch))
        assert sorted(set(of_devices.ravel().tolist())) == numbers.tolist()  # it reads no row that it does not compute
        counted += numbers[host_rows.is_counted(len(numbers))].tolist()
    assert sorted(counted) == batch.tolist()


def test_default_placement_is_a_share_of_the_batch() -> None:
    """Without groups, and with groups of neighbors within hosts, a host reads one run of rows, as many as another."""
    for axis in (zero.Axis("zero", (1, 8)), zero.Axis.with_tensor_groups("zero", 8, 2)):
        host_rows = HostRows.of_devices(axis, [0] * 4 + [1] * 4, host=1)
        rows = 16 // 2
        assert host_rows.numbers(rows).tolist() == list(range(rows, 2 * rows))
        assert host_rows.is_counted(rows).all()


@pytest.mark.parametrize("tensor", [2, 4, 8, 16])
def test_lines_of_a_torus(tensor: int) -> None:
    """Tensor groups are lines of chips with all their cores."""
    devices = [_Core((x, y, 0), core) for y in range(4) for x in range(8) for core in range(2)]
    axis = zero.Axis.with_tensor_lines("zero", devices, tensor)
    for group in axis.row_groups():
        places = [devices[position] for position in group]
        lines = {place.coords[1:] for place in places}
        columns = sorted({place.coords[0] for place in places})
        if tensor == 8:  # the dimension that a group spans as a whole, so that its links form a ring
            assert len({place.coords[0] for place in places}) == 1 and len(places) == 8
        else:
            assert len(lines) == 1 and columns == list(range(columns[0], columns[0] + tensor // 2))
    gathering = axis.groups(axis.shards // tensor) or [list(range(axis.size))]
    dimensions = 1 if tensor in (8, 16) else 2  # along which those lie that gather one part: the other one alone
    for group in gathering:
        coords = np.asarray([(*devices[position].coords, devices[position].core_on_chip) for position in group])
        assert (coords != coords[0]).any(axis=0).sum() == dimensions


class _Core:
    def __init__(self, coords: tuple[int, int, int], core: int) -> None:
        self.coords = coords
        self.core_on_chip = core
