"""Sends metrics to W&B, offline without a key or a connection, so that no run waits for a login (wandb)."""

import logging
import netrc
import os
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zero.base.errors import UserError, first_line
from zero.files import storage
from zero.record.metrics_file import Log, TextLog
from zero.record.run_files import WANDB_ID_FILE
from zero.tracking.dashboard import shown

NETWORK_SECONDS = 15  # the most that a run waits for W&B's servers, at its start and again at its end
LOCAL_SECONDS = 120  # the most that it waits for W&B's own process to write its files, on a busy machine

_ID = re.compile(rb"[\w.-]{1,64}")  # of a run; W&B refuses some other characters

log = logging.getLogger(__name__)


@contextmanager
def weights_and_biases(run_directory: Path, project: str, config: dict[str, Any]) -> Iterator[tuple[Log, TextLog]]:
    """Sends metrics and texts to a project of W&B, offline unless WANDB_API_KEY or a login (netrc) is found.

    A resumed run continues under the id that its file `wandb_run_id` holds. Where there is a login, W&B starts at once;
    else, when no server can refuse the run, with the first line of metrics: it takes a CPU second, which the first step
    does not wait for. Raises UserError if W&B cannot start; once the run trains, any failure of it is a warning.
    """
    run_id = _run_id(run_directory / WANDB_ID_FILE)

    with ExitStack() as stack:

        def start() -> tuple[Log, TextLog]:
            return stack.enter_context(_started(run_directory, project, config, run_id))

        @cache
        def start_late() -> tuple[Log, TextLog]:
            try:
                return start()
            except UserError as error:
                log.warning("%s; the run continues without it", error)
                return (lambda metrics: None), (lambda step, text: None)

        if os.environ.get("WANDB_API_KEY") or _netrc().exists():
            yield start()
        else:
            yield (lambda metrics: start_late()[0](metrics)), (lambda step, text: start_late()[1](step, text))


def _run_id(path: Path) -> str:
    """The W&B id of this run from the file; a new one if the file has none."""
    if path.exists():
        content = path.read_bytes().strip()
        if _ID.fullmatch(content):
            return content.decode()
        log.warning("%s is damaged: expected the id of a run, got %r; W&B shows a new run from now on", path, content)
    new_id = secrets.token_hex(4)
    try:
        storage.write(path, new_id.encode())
    except OSError as error:
        log.warning("%s; W&B will show the next start as a new run, not as %s", error, new_id)
    return new_id


@contextmanager
def _started(run_directory: Path, project: str, config: dict[str, Any], run_id: str) -> Iterator[tuple[Log, TextLog]]:
    for name in ("cache", "data"):  # else it writes to the home directory
        os.environ.setdefault(f"WANDB_{name.upper()}_DIR", str(run_directory / "wandb" / name))
    import wandb

    try:
        settings = wandb.setup().settings
        offline = settings.mode == "online" and not (_has_login(settings.base_url) and _is_reachable(settings.base_url))
        is_local = offline or settings.mode == "offline"
        run = wandb.init(
            dir=str(run_directory),
            project=project,
            name="/".join(run_directory.absolute().parts[-2:]),
            id=run_id,
            resume="allow",
            mode="offline" if offline else None,
            config=config,
            settings=wandb.Settings(
                allow_val_change=True,  # a resume may override what the run began with
                console="off",
                disable_git=True,
                init_timeout=NETWORK_SECONDS,
                finish_timeout=LOCAL_SECONDS if is_local else NETWORK_SECONDS,
                silent=is_local,
            ),
        )
    except (wandb.errors.Error, netrc.NetrcParseError, OSError) as error:
        raise UserError(f"W&B could not start ({error}); data.wandb_project=null disables it") from error
    # W&B's own step only increases and would drop what a resumed run logs again; `step` is an axis like any other.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    connection = _Connection(run_directory)
    texts: list[tuple[int, str]] = []

    def log_text(step: int, text: str) -> None:
        texts.append((step, text))  # a table of W&B cannot grow
        table = wandb.Table(columns=["step", "text"], data=[list(row) for row in texts])
        connection.call(run.log, {"samples": table, "step": step})

    try:
        yield (lambda metrics: connection.call(run.log, shown(metrics))), log_text
    except BaseException:
        connection.call(run.finish, exit_code=1)
        raise
    connection.call(run.finish, exit_code=0)


class _Connection:
    """Calls to W&B's own process, of which a machine without memory ends the largest processes first."""

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._is_lost = False

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Calls a function of W&B; once that has failed, neither it nor later calls do anything but warn once."""
        import wandb

        if self._is_lost:
            return
        try:
            function(*arguments, **options)
        except (wandb.errors.Error, OSError) as error:
            self._is_lost = True
            log.warning(
                "W&B failed (%s): the run continues without it; `wandb sync` uploads %s",
                first_line(error),
                self._run_directory / "wandb",
            )
            with suppress(OSError):  # as its process is gone; else it would be told again at the exit, with a traceback
                wandb.teardown()


def _has_login(base_url: str) -> bool:
    """Whether there is a key, found without a request."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    if not _netrc().exists():
        return False
    hosts = netrc.netrc(_netrc()).hosts
    return urlsplit(base_url).netloc in hosts or "api.wandb.ai" in hosts


def _netrc() -> Path:
    """The file of logins."""
    return Path(os.environ.get("NETRC") or "~/.netrc").expanduser()


def _is_reachable(base_url: str) -> bool:
    """Whether W&B's servers can be reached; its client would wait for minutes to find that out."""
    try:
        urllib.request.urlopen(base_url, timeout=NETWORK_SECONDS).close()
    except urllib.error.HTTPError as error:  # a response too
        error.close()
    except OSError as error:
        log.warning(
            "W&B is offline for this run because %s cannot be reached (%s); `wandb sync` uploads it later",
            base_url,
            error,
        )
        return False
    return True
