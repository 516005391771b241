"""Sends metrics to W&B, offline without a key or a connection, so that no run waits for a login (wandb)."""

import logging
import netrc
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zero.errors import UserError
from zero.files import storage
from zero.run_directory import WANDB_ID_FILE
from zero.tracking.metrics_file import Log

NETWORK_SECONDS = 15  # the most that a run waits for W&B's servers, at its start and again at its end
LOCAL_SECONDS = 120  # the most that it waits for W&B's own process to write its files, on a busy machine

log = logging.getLogger(__name__)


@contextmanager
def weights_and_biases(run_directory: Path, project: str, config: dict[str, Any]) -> Iterator[Log]:
    """Sends metrics to a project of W&B, offline unless WANDB_API_KEY or a login (netrc) is found.

    A resumed run continues under the id that its file `wandb_run_id` holds. Where there is a login, W&B starts at once;
    else, when no server can refuse the run, with the first line of metrics: it takes a CPU second, which the first step
    does not wait for. Raises UserError if W&B cannot start; once the run trains, that is a warning.
    """
    id_file = run_directory / WANDB_ID_FILE
    if not id_file.exists():
        storage.write(id_file, secrets.token_hex(4).encode())

    with ExitStack() as stack:

        def start() -> Log:
            return stack.enter_context(_started(run_directory, project, config, id_file.read_text()))

        @cache
        def start_late() -> Log:
            try:
                return start()
            except UserError as error:
                log.warning("%s; the run continues without it", error)
                return lambda metrics: None

        if os.environ.get("WANDB_API_KEY") or _netrc().exists():
            yield start()
        else:
            yield lambda metrics: start_late()(metrics)


@contextmanager
def _started(run_directory: Path, project: str, config: dict[str, Any], run_id: str) -> Iterator[Log]:
    # Else it writes to the home directory.
    os.environ.setdefault("WANDB_CACHE_DIR", str(run_directory / "wandb" / "cache"))
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
    except (wandb.errors.Error, netrc.NetrcParseError) as error:
        raise UserError(f"W&B could not start ({error}); data.wandb_project=null leaves it out") from error
    # W&B's own step only increases and would drop what a resumed run logs again; `step` is an axis like any other.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    try:
        yield run.log
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish(exit_code=0)


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
            "W&B is offline for this run, %s cannot be reached (%s); `wandb sync` sends it later", base_url, error
        )
        return False
    return True
