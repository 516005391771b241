"""What a run writes down as it goes: metrics.jsonl, and the same names to W&B."""

import json
import logging
import math
import netrc
import os
import secrets
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from zero.runtime.errors import UserError

if TYPE_CHECKING:
    import wandb

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_run_id"
NETWORK_SECONDS = 15  # the most that a run waits for W&B's servers, at its start and again at its end

log = logging.getLogger(__name__)


class Tracker:
    """Appends a run's metrics to `run_directory/metrics.jsonl` and sends them to W&B; a context manager.

    Args:
        run_directory: where everything goes, W&B's files included.
        project: W&B's project; None or "" leaves W&B out. Offline unless WANDB_API_KEY or a login (netrc) is there.
        config: shown by W&B beside the run.
        resumed_from: the step of the checkpoint that this process continues, None for a fresh start. Written down as
            `{"event": "resume", "step": ...}`; the run goes on under the same W&B id, which `wandb_run_id` keeps.

    Raises:
        UserError: W&B could not start.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> with Tracker(directory, project=None, config={}, resumed_from=None) as tracker:
    ...     tracker.log({"step": 1, "train/loss": 5.5})
    >>> read_metrics(directory / METRICS_FILE)
    [{'step': 1, 'train/loss': 5.5}]
    """

    def __init__(
        self, run_directory: Path, *, project: str | None, config: dict[str, Any], resumed_from: int | None
    ) -> None:
        self.run_directory = run_directory
        self.project = project
        self.config = config
        self.resumed_from = resumed_from
        self.last_step: float = -math.inf
        self.wandb_run: wandb.Run | None = None

    def __enter__(self) -> Self:
        if self.project:
            self.wandb_run = _start_wandb(self.run_directory, self.project, self.config)
        path = self.run_directory / METRICS_FILE
        written = path.read_bytes() if path.exists() else b""
        self.file = path.open("ab", buffering=0)  # one write a line: a kill tears at most the last one
        if written and not written.endswith(b"\n"):
            self.file.write(b"\n")
        if written or self.resumed_from is not None:
            self._append({"event": "resume", "step": self.resumed_from or 0})
        return self

    def log(self, metrics: dict[str, float | int]) -> None:
        """Writes one line: `step` and whatever else is known of it. A number that is not finite becomes null.

        Raises:
            ValueError: the step is not above the one before (of two lines for one step only the later would count).
        """
        if metrics["step"] <= self.last_step:
            raise ValueError(f"step {metrics['step']} is logged after step {self.last_step}")
        self.last_step = metrics["step"]
        self._append({key: value if math.isfinite(value) else None for key, value in metrics.items()})
        if self.wandb_run is not None:
            self.wandb_run.log(metrics)

    def _append(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file.close()
        if self.wandb_run is not None:
            self.wandb_run.finish(exit_code=0 if error is None else 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that count, by rising step; a number that was not finite is None.

    Of two lines for one step the later counts. After a resume at step s, lines of steps above s from before do not.

    Raises:
        UserError: a line is no JSON object, other than one that was torn by the end of its process.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in _read_lines(path):
        if line.get("event") == "resume":
            by_step = {step: metrics for step, metrics in by_step.items() if step <= line["step"]}
        else:
            by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)]


def read_resumes(path: Path) -> list[int]:
    """The steps at which a run was resumed, in the order of time."""
    return [line["step"] for line in _read_lines(path) if line.get("event") == "resume"]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line. A process that is killed may tear its last one: at the end, or before a resume."""
    lines: list[dict[str, Any]] = []
    torn: int | None = None
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        whole = isinstance(line, dict) and "step" in line
        if torn is not None and not (whole and line.get("event") == "resume"):
            raise UserError(f"{path}, line {torn}: expected a JSON object with a step")
        torn = None if whole else number
        if whole:
            lines.append(line)
    return lines


def _start_wandb(run_directory: Path, project: str, config: dict[str, Any]) -> "wandb.Run":
    os.environ.setdefault("WANDB_CACHE_DIR", str(run_directory / "wandb" / "cache"))  # else its logs go to the home
    import wandb  # half a second, which a run without W&B, --help and a refused configuration do not pay

    id_file = run_directory / WANDB_ID_FILE
    if not id_file.exists():
        fresh = id_file.with_suffix(".new")
        fresh.write_text(secrets.token_hex(4))
        fresh.rename(id_file)

    try:
        settings = wandb.setup().settings
        offline = settings.mode == "online" and not (_wandb_login(settings.base_url) and _answers(settings.base_url))
        run = wandb.init(
            dir=str(run_directory),
            project=project,
            name="/".join(run_directory.absolute().parts[-2:]),
            id=id_file.read_text(),
            resume="allow",
            mode="offline" if offline else None,
            config=config,
            settings=wandb.Settings(
                allow_val_change=True,  # a resume may override what the run began with
                console="off",
                disable_git=True,
                init_timeout=NETWORK_SECONDS,
                finish_timeout=NETWORK_SECONDS,
                silent=offline or settings.mode == "offline",
            ),
        )
    except (wandb.errors.Error, netrc.NetrcParseError) as error:
        raise UserError(f"W&B could not start ({error}); data.wandb_project=null leaves it out") from error
    # W&B's own step only rises and would drop what a resumed run logs again; ours is an axis like any other.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _wandb_login(base_url: str) -> bool:
    """Whether a key is there, found without asking anybody."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if not path.exists():
        return False
    hosts = netrc.netrc(path).hosts
    return urlsplit(base_url).netloc in hosts or "api.wandb.ai" in hosts


def _answers(base_url: str) -> bool:
    """Whether W&B's servers can be reached: its client itself would wait minutes to find that out."""
    try:
        urllib.request.urlopen(base_url, timeout=NETWORK_SECONDS).close()
    except urllib.error.HTTPError as error:  # an answer too
        error.close()
    except OSError as error:
        log.warning(
            "W&B is offline for this run, %s cannot be reached (%s); `wandb sync` sends it later", base_url, error
        )
        return False
    return True
