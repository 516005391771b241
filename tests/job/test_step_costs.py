"""The costs of a step of several programs, from texts and sizes as a compiler gives them: nothing is compiled."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from zero.costs.predict import TimedPart, predict
from zero.hosts.speeds import SPEEDS
from zero.job.step_costs import StepCosts, costs_of, predicted_time
from zero.training.streamed_update import SpanPrograms, StreamedStep

KIND = "TPU v3"  # a device is half a chip, and has half its link
MS = round(SPEEDS[KIND].clock / 1000)  # cycles
LINK = 8_000_000  # bytes per millisecond of a device
GATHER = '%g = f32[4096] all-gather(%a), replica_groups={{0,1,2,3}}, metadata={op_name="jvp(f)/zero_gather/all_gather"}'
BEYOND = (
    "%send = (f32[8,128]{1,0}, u32[], token[]) send(%x, %token), channel_id=1, is_host_transfer=true, "
    'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_host_transfer_rendezvous="all_to_all.3_0",_xla_megascale_target={{100000,100001,200000,200001}},'
    '_xla_megascale_transfer_type="ALL_TO_ALL"}'
)
SENT_BEYOND = 4 * 8 * 128 / 2  # bytes of a device


def devices(platform: str = "tpu") -> list[Any]:
    """Two chips side by side."""
    places = [((x, 0, 0), core) for x in range(2) for core in range(2)]
    return [SimpleNamespace(device_kind=KIND, platform=platform, coords=x, core_on_chip=core) for x, core in places]


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled program: what its computation takes, its other instructions, and the sizes of its arrays."""

    milliseconds: float | None
    part: str
    lines: tuple[str, ...] = ()
    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    temp_size_in_bytes: int = 0
    peak_memory_in_bytes: int = 0
    host_temp_size_in_bytes: int = 0

    def as_text(self) -> str:
        cycles = ""
        if self.milliseconds is not None:
            cycles = f', backend_config={{"window_config":{{"estimated_cycles":"{round(self.milliseconds * MS)}"}}}}'
        fusion = f'%a = f32[8] fusion(%x), kind=kLoop, calls=%c, metadata={{op_name="{self.part}"}}{cycles}'
        body = "\n".join(f"  {line}" for line in (fusion, *self.lines))
        product = "%c (p: f32[8]) -> f32[8] {\n  %y = f32[8] multiply(%p, %p)\n}"
        return f"{product}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}"

    def memory_analysis(self) -> Any:
        return self


def step_of(
    *lines: str, spans: int = 4, keeps_on_host: bool = False, forward: float | None = 2, embedded: int = 24_000_000
) -> StreamedStep:
    """A step of 1 + 2 spans + 3 + 6 spans + 4 milliseconds; `lines` are those of its backward program."""
    programs = SpanPrograms(
        embed=Program(1, "jvp(f)/GPT.embed", output_size_in_bytes=embedded),
        forward=Program(forward, "jvp(f)/TransformerLayer._mlp/mul"),
        score=Program(3, "jvp(f)/GPT.score"),
        backward=Program(6, "transpose(jvp(f))/TransformerLayer._mlp/mul", lines),
        finish=Program(4, "f/update"),
    )
    return StreamedStep(programs, tuple(range(spans)), keeps_on_host)


def held_by(host_bytes: int, moving_bytes: int = 0) -> Any:
    return SimpleNamespace(host_bytes=host_bytes, moving_bytes=moving_bytes)


@pytest.mark.parametrize(
    ("block", "keeps_on_host", "each_way", "waits"),
    [
        pytest.param(5, False, 4 * 5, 0, id="the backward pass hides the link"),
        pytest.param(8, False, 4 * 8, 4 * 2, id="a block takes longer than its span"),
        # An input takes 3: longer than the forward pass of a span, and after a block than the backward pass.
        pytest.param(5, True, 4 * 8, 4 * 1 + 4 * 2, id="inputs of spans as well"),
        pytest.param(2, True, 4 * 5, 4 * 1, id="inputs that only the backward pass hides"),
    ],
)
def test_seconds_of_all_calls(block: int, keeps_on_host: bool, each_way: int, waits: int) -> None:
    """Each program counts as often as it is called, and the link where a span is shorter; in milliseconds."""
    found = predicted_time(step_of(keeps_on_host=keeps_on_host), held_by(4 * block * LINK), devices())
    assert found is not None
    assert found.seconds == pytest.approx((1 + 4 * 2 + 3 + 4 * 6 + 4 + waits) / 1000, rel=1e-5)
    assert found.host_exposed_seconds == pytest.approx(waits / 1000, rel=1e-5)
    assert found.host_link_seconds == pytest.approx(each_way / 1000)
    assert found.host_link_bytes == pytest.approx(2 * each_way * LINK)
    assert found.by_part == {
        TimedPart("vocabulary", "forward"): pytest.approx(0.001 + 0.003),
        TimedPart("MLP", "forward"): pytest.approx(4 * 0.002),
        TimedPart("MLP", "backward"): pytest.approx(4 * 0.006),
        TimedPart("update", "update"): pytest.approx(0.004),
        TimedPart("waiting for the host", "update"): pytest.approx(waits / 1000, rel=1e-5),
    }


def test_collectives_of_all_calls() -> None:
    """What no computation hides, and what is sent, to other slices too."""
    step = step_of(GATHER)
    one = predict(step.programs.backward.as_text(), devices())
    found = predicted_time(step, held_by(0), devices())
    assert one is not None and found is not None
    assert found.exposed_seconds == pytest.approx(4 * one.exposed_seconds) and one.exposed_seconds > 0
    assert found.exposed_bytes == pytest.approx(4 * one.exposed_bytes) and one.exposed_bytes > 0
    costs = costs_of(step, held_by(0), 0, devices())
    assert [x.sent for x in costs.sent] == 4 * [3 * 4096]
    assert costs.predicted == found
    assert costs.sent_between == 0
    assert costs_of(step_of(BEYOND, forward=None), held_by(0), 0, devices()).sent_between == 4 * SENT_BEYOND


def test_no_time_without_cycles() -> None:
    """Of a sum, one of whose programs has none, nothing is known."""
    assert predicted_time(step_of(forward=None), held_by(0), devices()) is None
    assert costs_of(step_of(forward=None), held_by(0), 0, devices()).predicted is None


def test_one_program() -> None:
    """Its time and costs are its own, whatever the state."""
    program: Any = Program(
        5,
        "jvp(f)/TransformerLayer._mlp/mul",
        (GATHER,),
        argument_size_in_bytes=7,
        temp_size_in_bytes=9,
        peak_memory_in_bytes=8,
        host_temp_size_in_bytes=3,
    )
    expected = predict(program.as_text(), devices())
    assert predicted_time(program, held_by(1), devices()) == expected
    costs = costs_of(program, held_by(1), 2, devices())
    (gather,) = costs.sent
    assert costs == StepCosts(peak=8, host_bytes=3, sent=[gather], sent_between=0.0, predicted=expected)


# State and frozen weights; what moves. An input of a span, as the last output, has 30 bytes, what is embedded 20, and
# the loss with its gradients 50.
HELD, MOVING = 1000, 300


def peaked(spans: int, keeps_on_host: bool, platform: str) -> StepCosts:
    programs = SpanPrograms(
        embed=Program(1, "", argument_size_in_bytes=20, output_size_in_bytes=30),
        forward=Program(1, "", argument_size_in_bytes=500, output_size_in_bytes=30, temp_size_in_bytes=120),
        score=Program(1, "", argument_size_in_bytes=90, output_size_in_bytes=50, peak_memory_in_bytes=140),
        backward=Program(
            1,
            "",
            argument_size_in_bytes=700,
            output_size_in_bytes=650,
            alias_size_in_bytes=600,
            temp_size_in_bytes=400,
            peak_memory_in_bytes=900,
        ),
        finish=Program(1, "", argument_size_in_bytes=800, output_size_in_bytes=800, alias_size_in_bytes=800),
    )
    step = StreamedStep(programs, tuple(range(spans)), keeps_on_host)
    return costs_of(step, held_by(40 * spans, MOVING), HELD, devices(platform))


@pytest.mark.parametrize(
    ("spans", "keeps_on_host", "inputs", "on_host"),
    [(4, False, 4 * 30, 4 * 40), (4, True, 3 * 30, 4 * 40 + 4 * 30), (2, True, 2 * 30, 2 * 40 + 2 * 30)],
)
def test_peak_of_several_programs(spans: int, keeps_on_host: bool, inputs: int, on_host: int) -> None:
    """The fullest program beside all that is not its argument; on the host lie the state and inputs of all spans."""
    beside = HELD + inputs + MOVING + 50 + 30 + 20
    costs = peaked(spans, keeps_on_host, "cpu")
    assert costs.host_bytes == on_host
    assert costs.peak == beside - 700 + (700 + 650 - 600 + 400)
    assert peaked(spans, keeps_on_host, "tpu").peak == beside - 700 + 900
